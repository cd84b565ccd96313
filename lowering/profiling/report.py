"""A profile as a table and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from .. import units
from ..errors import InputError
from ..machine import describe_missing_package
from ..notebook import format_table
from .expected import SLOW

if TYPE_CHECKING:
    from .benchmark import Cost, Profile

_MAX_ROWS = 15
_WIDTH = 150  # characters
_KERNEL = ("kernel", "schedule", "calls")
_NUMBERS = ("time", "share", "GF/s", "GB/s", "expected", "of limit")
_BUSY = 0.1  # the share of a run lost to other processes, or beyond the limit, from which on the report mentions it
_NOTABLE = 0.01  # of a run: calls that take more are marked if they miss the expected share of the limit


def format_profile(profile: Profile) -> str:
    """Format three tables: by kind, by kernel, and the most expensive calls with their ONNX nodes.

    A mark follows rows that reach less than 30 % of the limit and take more than a hundredth of the run.
    """
    lines = format_headline(profile)
    kinds = [(kind, str(cost.calls), *_cells(cost, profile)) for kind, cost in profile.by_kind().items()]
    rest = max(profile.seconds - sum(call.seconds for call in profile.calls), 0.0)
    kinds.append(("between kernels", "", units.format_time(rest), _share(rest, profile), "", "", "", ""))
    lines += _table(("computes", "calls"), kinds)
    lines += _table(_KERNEL, _kernels(profile))
    calls = sorted(enumerate(profile.calls), key=lambda item: -item[1].seconds)[:_MAX_ROWS]
    rows = [
        (str(position), call.kernel.name, ", ".join(call.nodes) or "-", *_cells(profile.cost(call), profile))
        for position, call in calls
    ]
    lines += _table(("call", "kernel", "ONNX nodes"), rows)
    return "\n".join(lines)


def format_headline(profile: Profile) -> list[str]:
    """Format the lines about whole runs and their limits."""
    limits, slow = profile.limits, profile.percentiles
    sizes = ", ".join(f"{name}={size}" for name, size in profile.sizes.items())
    total = profile.total()
    lines = [
        f"{units.format_time(profile.seconds)} a run (p90 {units.format_time(slow.p90)}, "
        f"p99 {units.format_time(slow.p99)}), CPU time "
        f"{units.format_time(profile.cpu_seconds)}; median of {profile.runs} runs, threads: {profile.threads}"
        + (f"; {sizes}" if sizes else ""),
        f"{_rates(total)}, {total.of_limit:.0%} of the limit",
        f"limit: {limits}, threads: {profile.threads}",
    ]
    waited = 1 - profile.cpu_seconds / profile.seconds
    if profile.threads == 1 and profile.limits.flops is not None and waited > _BUSY:
        lines.append(
            f"the machine was busy: for {waited:.0%} of a run another process had the CPU, which counts as between "
            "kernels; measure again when it is quiet"
        )
    if any(profile.cost(call).of_limit > 1 + _BUSY for call in profile.calls):
        lines.append("more than 100%: NumPy was slower than the kernel, by its BLAS or while it was measured")
    if profile.peer is not None:
        ratio = profile.peer / profile.seconds
        lines.insert(1, f"onnxruntime, in turns with it: {units.format_time(profile.peer)}, {ratio:.2f} times as long")
    return lines


def format_html(profile: Profile) -> str:
    """Format the most expensive kernels for notebooks."""
    return format_table("\n".join(format_headline(profile)), (*_KERNEL, *_NUMBERS), _kernels(profile))


def _kernels(profile: Profile) -> list[tuple[str, ...]]:
    schedules = {call.kernel.name: call.kernel.schedule for call in profile.calls}
    kernels = list(profile.by_kernel().items())[:_MAX_ROWS]
    return [(name, schedules[name], str(cost.calls), *_cells(cost, profile)) for name, cost in kernels]


def format_overview(profiles: Sequence[Profile]) -> str:
    """Format a line for each of several sizes."""
    rows = [
        (
            ", ".join(f"{name}={size}" for name, size in profile.sizes.items()) or "-",
            units.format_time(profile.seconds),
            units.format_time(profile.cpu_seconds),
            f"{profile.total().of_limit:.0%}",
            "" if profile.peer is None else units.format_time(profile.peer),
            "" if profile.peer is None else f"{profile.peer / profile.seconds:.2f}",
        )
        for profile in profiles
    ]
    headings = ("sizes", "a run", "CPU time", "of limit", "onnxruntime", "ratio")
    count = 6 if any(profile.peer is not None for profile in profiles) else 4
    return "\n".join(align_columns([row[:count] for row in (headings, *rows)]))


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format a line for each row, with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(field.ljust(width) for field, width in zip(row, widths)).rstrip() for row in rows]


def draw_picture(profile: Profile, path: Path) -> None:
    """Draw a bar for the time of each kernel, the limit's share of it darker. Raises InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "toolchain.package_missing", f"'{path}' cannot be drawn: {describe_missing_package('matplotlib')}"
        ) from error
    costs = list(profile.by_kernel().items())[:_MAX_ROWS]
    kinds = {call.kernel.name: call.kernel.kind for call in profile.calls}
    colors = {"matmul": "tab:blue", "attention": "tab:orange", "other": "tab:green"}
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(costs)), layout="constrained")
    axes = figure.subplots()
    for row, (name, cost) in enumerate(costs):
        color = colors[kinds[name]]
        axes.barh(row, cost.seconds * 1e3, color=color, alpha=0.35)
        axes.barh(row, min(cost.of_limit, 1.0) * cost.seconds * 1e3, color=color)
        axes.text(cost.seconds * 1e3, row, f" {cost.of_limit:.0%}", va="center")
    axes.set_yticks(range(len(costs)), [f"{name} ({cost.calls})" for name, cost in costs])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("ms a run; dark: what the machine's limit allows")
    axes.set_title(f"{units.format_time(profile.seconds)} a run, {profile.total().of_limit:.0%} of the limit")
    figure.savefig(path, dpi=150, format="png")


def _table(first: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose first columns are text, which is wrapped to fit."""
    rows = [(*first, *_NUMBERS), *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    while sum(widths) + 2 * len(widths) > _WIDTH:
        widest = max(range(len(first)), key=widths.__getitem__)
        widths[widest] -= 1
    lines = []
    for row in rows:
        wrapped = [textwrap.wrap(cell, width) for cell, width in zip(row, widths)]
        for cells in zip_longest(*wrapped, fillvalue=""):
            texts = [field.ljust(width) for field, width in zip(cells[: len(first)], widths)]
            numbers = [field.rjust(width) for field, width in zip(cells[len(first) :], widths[len(first) :])]
            lines.append("  ".join([*texts, *numbers]).rstrip())
    return lines


def _cells(cost: Cost, profile: Profile) -> tuple[str, ...]:
    return (
        units.format_time(cost.seconds),
        _share(cost.seconds, profile),
        f"{cost.flops / cost.seconds / 1e9:.1f}",
        f"{cost.bytes / cost.seconds / 1e9:.1f}",
        units.format_time(cost.expected),
        f"{cost.of_limit:.0%}" + (" !" if cost.of_limit < SLOW and cost.seconds > _NOTABLE * profile.seconds else ""),
    )


def _rates(cost: Cost) -> str:
    return (
        f"{cost.flops / 1e9:.3g} GFLOP at {cost.flops / cost.seconds / 1e9:.1f} GF/s, "
        f"{cost.bytes / 1e6:.3g} MB at {cost.bytes / cost.seconds / 1e9:.1f} GB/s"
    )


def _share(seconds: float, profile: Profile) -> str:
    return f"{seconds / profile.seconds:.1%}"
