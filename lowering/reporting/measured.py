"""Measurements of `bench`: a roofline of the kernels, and a run as a timeline."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import units
from ..errors import InputError
from ..manifest import Manifest
from ..profiling.benchmark import Cost, Profile
from ..records import decode
from .elements import Child, E, Node, make_svg, make_table
from .ticks import list_decades, list_ticks

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720.0, 380.0, 86.0, 44.0
_LONG, _ROW = 1000.0, 64.0
_NUMBERS = ("calls", "time", "share", "arithmetic", "memory", "bytes", "expected", "of limit")
_MAX_NUMBERED = 8  # kernels with a number in the plot


def read_profiles(path: Path, manifest: Manifest) -> list[Profile]:
    """Return the profiles in the JSON of `bench --json`, of one run or of several.

    Raises:
        InputError: The file cannot be read, or is of another artifact.
    """
    try:
        data = json.loads(path.read_text())
        profiles = []
        for item in data if isinstance(data, list) else [data]:
            fields = {name: value for name, value in item.items() if name not in ("by_kind", "by_kernel")}
            profiles.append(decode(Profile, fields, "profile"))
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            "report.file_unreadable",
            f"--bench {path}: it cannot be read ({reason}). Write it by `bench --json > {path}`.",
        ) from error
    for profile in profiles:
        if any(call.kernel not in manifest.kernels for call in profile.calls):
            raise InputError(
                "report.bench_mismatch",
                f"--bench {path}: it is of another artifact. Measure this one by `bench --json > {path}`.",
            )
    return profiles


def render_measurements(profiles: Sequence[Profile]) -> Iterator[Node]:
    for profile in profiles:
        sizes = ", ".join(f"{name} = {size}" for name, size in profile.sizes.items())
        yield E("h3", sizes or "A run")
        slow = profile.percentiles
        spread = f"p90 {units.format_time(slow.p90)}, p99 {units.format_time(slow.p99)}, threads: {profile.threads}"
        peer = "" if profile.peer is None else f" onnxruntime, in turns with it: {units.format_time(profile.peer)}."
        share = f"{profile.total().of_limit:.0%} of the limit"
        middle = f"{units.format_time(profile.seconds)} a run, the median of {profile.runs}"
        yield E("p", f"{middle} ({spread}); {share}.{peer} Limit: {profile.limits}.")
        yield from render_roofline(profile)
        yield from render_timeline(profile)


def render_roofline(profile: Profile) -> Iterator[Node]:
    """Yield a plot of operations per second over operations per byte, both logarithmic, and a table."""
    costs = profile.by_kernel()
    kinds = {call.kernel.name: call.kernel.kind for call in profile.calls}
    drawn = {name: cost for name, cost in costs.items() if cost.flops and cost.bytes and cost.seconds > 0}
    if drawn:
        yield _draw_roofline(profile, drawn, kinds)
    numbers = {name: k for k, name in enumerate(drawn, 1)}
    rows: list[tuple[Child, ...]] = []
    for name, cost in costs.items():
        rows.append((str(numbers.get(name, "-")), E("code", name), kinds[name], *_format_cells(cost, profile)))
    yield make_table(("", "kernel", "computes", *_NUMBERS), rows, numbers=range(3, 3 + len(_NUMBERS)))


def _format_cells(cost: Cost, profile: Profile) -> tuple[str, ...]:
    """Return the cells of a kernel for the columns _NUMBERS."""
    return (
        str(cost.calls),
        units.format_time(cost.seconds),
        f"{cost.seconds / profile.seconds:.1%}",
        units.format_rate(cost.flops / cost.seconds, "FLOP") if cost.flops and cost.seconds else "-",
        units.format_rate(cost.bytes / cost.seconds, "B") if cost.seconds else "-",
        units.format_size(cost.bytes),
        units.format_time(cost.expected),
        f"{cost.of_limit:.0%}",
    )


def render_timeline(profile: Profile) -> Iterator[Node]:
    """Yield the kernels of one run in the order of their calls."""
    end = max((begin + seconds for begin, seconds in profile.timeline), default=0.0)
    if end <= 0:
        return
    across = _LONG / end
    shapes = []
    for call, (begin, seconds) in zip(profile.calls, profile.timeline):
        title = f"{call.kernel.name}: {units.format_time(seconds)}; {', '.join(call.nodes) or '-'}"
        box = {"x": f"{begin * across:.2f}", "width": f"{max(seconds * across, 0.3):.2f}"}
        shapes.append(E("rect", E("title", title), y=4, height=34, class_=f"span {call.kernel.kind}", **box))
    for value in list_ticks(end * 1e6, 8):
        x = value * 1e-6 * across
        anchor = "start" if not value else "middle"
        shapes.append(
            E("text", units.format_time(value * 1e-6) if value else "0", x=f"{x:.1f}", y=56, text_anchor=anchor)
        )
    caption = "One run, the middle one by its length"
    kinds = ((kind, name) for kind, name in (("matmul", "matmuls"), ("attention", "attention"), ("other", "others")))
    legend = E("ul", (E("li", E("span", class_=f"swatch {kind}"), name) for kind, name in kinds), class_="legend")
    yield E("figure", make_svg(_LONG + 30, _ROW, shapes, label=caption), E("figcaption", caption, legend))


def _draw_roofline(profile: Profile, costs: dict[str, Cost], kinds: dict[str, str]) -> Node:
    limits = profile.limits
    points = {name: (cost.flops / cost.bytes, cost.flops / cost.seconds) for name, cost in costs.items()}
    ridge = limits.flops / limits.bandwidth if limits.flops else None
    xs = [x for x, _ in points.values()] + ([ridge] if ridge else [])
    x_axis = list(list_decades(min(xs) / 2, max(xs) * 2))

    def roof(x: float) -> float:
        return min(x * limits.bandwidth, limits.flops or math.inf)

    ys = [y for _, y in points.values()] + [roof(x_axis[-1])]
    y_axis = list(list_decades(min(ys) / 1.5, max(ys) * 1.2))
    ground = _HEIGHT - _BOTTOM

    def to_point(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - math.log10(x_axis[0])) / (len(x_axis) - 1)
        up = (math.log10(y) - math.log10(y_axis[0])) / (len(y_axis) - 1)
        return _LEFT + right * (_WIDTH - _LEFT - 16), ground - up * (ground - 12)

    shapes: list[Node] = []
    for y in y_axis:
        _, coordinate = to_point(x_axis[0], y)
        shapes.append(
            E("line", x1=_LEFT, x2=_WIDTH - 16, y1=f"{coordinate:.1f}", y2=f"{coordinate:.1f}", class_="grid")
        )
        shapes.append(
            E("text", units.format_rate(y, "FLOP"), x=_LEFT - 6, y=f"{coordinate + 4:.1f}", text_anchor="end")
        )
    for x in x_axis:
        coordinate, _ = to_point(x, y_axis[0])
        shapes.append(E("line", x1=f"{coordinate:.1f}", x2=f"{coordinate:.1f}", y1=12, y2=ground, class_="grid"))
        shapes.append(E("text", f"{x:g}", x=f"{coordinate:.1f}", y=ground + 16, text_anchor="middle"))
    first = max(x_axis[0], y_axis[0] / limits.bandwidth)
    corners = [first, *([ridge] if ridge and ridge > first else []), x_axis[-1]]
    line = " ".join("{:.1f},{:.1f}".format(*to_point(x, roof(x))) for x in corners)
    shapes.append(E("polyline", points=line, class_="roof"))
    for position, (name, (x, y)) in enumerate(points.items(), 1):
        cost, (cx, cy) = costs[name], to_point(x, y)
        title = (
            f"{name}: {units.format_time(cost.seconds)}, {units.format_rate(y, 'FLOP')}, "
            f"{cost.of_limit:.0%} of the limit"
        )
        radius = 4 + 12 * math.sqrt(cost.seconds / profile.seconds)
        circle = {"cx": f"{cx:.1f}", "cy": f"{cy:.1f}", "r": f"{radius:.1f}"}
        shapes.append(E("circle", E("title", title), class_=f"point {kinds[name]}", **circle))
        if position <= _MAX_NUMBERED:
            shapes.append(E("text", str(position), x=f"{cx + radius + 2:.1f}", y=f"{cy + 4:.1f}", class_="label"))
    shapes.append(E("text", "FLOP per byte", x=_WIDTH - 16, y=ground + 34, text_anchor="end"))
    caption = (
        "Roofline: the line is what this machine can do at most; the area of a point grows with its share of the run; "
        "numbers are those of the table"
    )
    return E("figure", make_svg(_WIDTH, _HEIGHT, shapes, label="Roofline"), E("figcaption", caption))
