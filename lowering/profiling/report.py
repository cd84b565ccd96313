"""A profile as a table and as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..errors import InputError
from .expected import SLOW

if TYPE_CHECKING:
    from .benchmark import Cost, Profile

_COSTLIEST = 15
_NOTABLE = 0.01  # of a run: what is below the expected share of the limit is marked from here on


def text(profile: Profile) -> str:
    """Three tables: by what is computed, by kernel, and the costliest calls with their ONNX nodes.

    A mark stands behind what reaches less than 30 % of the limit and takes more than a hundredth of the run.
    """
    buffer = io.StringIO()
    console = Console(file=buffer, width=150, markup=False)  # names are no markup
    low, high = profile.quartiles
    limits = profile.limits
    sizes = ", ".join(f"{name}={size}" for name, size in profile.sizes.items())
    total = profile.total()
    console.print(
        f"{_time(profile.seconds)} a run (half of the runs {_time(low)} to {_time(high)}), CPU time "
        f"{_time(profile.cpu_seconds)}; median of {profile.runs} runs, threads: {profile.threads}"
        + (f"; {sizes}" if sizes else ""),
        f"{_rates(total)}, {total.of_limit:.0%} of the limit",
        f"limit: {limits}, threads: {profile.threads}",
        sep="\n",
        highlight=False,
    )
    kinds = _table("computes", "calls")
    for kind, cost in profile.by_kind().items():
        kinds.add_row(kind, str(cost.calls), *_cells(cost, profile))
    rest = profile.seconds - sum(call.seconds for call in profile.calls)
    kinds.add_row("between kernels", "", _time(max(rest, 0.0)), _share(max(rest, 0.0), profile), "", "", "", "")
    console.print(kinds)
    schedules = {call.kernel.name: call.kernel.schedule for call in profile.calls}
    kernels = _table("kernel", "schedule", "calls")
    for name, cost in list(profile.by_kernel().items())[:_COSTLIEST]:
        kernels.add_row(name, schedules[name], str(cost.calls), *_cells(cost, profile))
    console.print(kernels)
    single = _table("call", "kernel", "ONNX nodes")
    for position, call in sorted(enumerate(profile.calls), key=lambda item: -item[1].seconds)[:_COSTLIEST]:
        nodes = ", ".join(call.nodes) or "-"
        single.add_row(str(position), call.kernel.name, nodes, *_cells(profile.cost(call), profile))
    console.print(single)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def picture(profile: Profile, path: Path) -> None:
    """A bar for the time of each kernel, the limit's share of it darker. Raises InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"'{path}' is not drawn: matplotlib is not installed; pip install 'onnx-lowering[bench]' brings it."
        ) from error
    costs = list(profile.by_kernel().items())[:_COSTLIEST]
    kinds = {call.kernel.name: call.kernel.kind for call in profile.calls}
    colours = {"matmul": "tab:blue", "attention": "tab:orange", "other": "tab:green"}
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(costs)), layout="constrained")
    axes = figure.subplots()
    for row, (name, cost) in enumerate(costs):
        colour = colours[kinds[name]]
        axes.barh(row, cost.seconds * 1e3, color=colour, alpha=0.35)
        axes.barh(row, min(cost.of_limit, 1.0) * cost.seconds * 1e3, color=colour)
        axes.text(cost.seconds * 1e3, row, f" {cost.of_limit:.0%}", va="center")
    axes.set_yticks(range(len(costs)), [f"{name} ({cost.calls})" for name, cost in costs])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("ms a run; dark: what the machine's limit allows")
    axes.set_title(f"{_time(profile.seconds)} a run, {profile.total().of_limit:.0%} of the limit")
    figure.savefig(path, dpi=150)


def _table(*first: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first[0], no_wrap=first[0] == "call")
    for name in first[1:]:
        table.add_column(name)
    for name in ("time", "share", "GF/s", "GB/s", "expected", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(cost: Cost, profile: Profile) -> list[str]:
    return [
        _time(cost.seconds),
        _share(cost.seconds, profile),
        f"{cost.flops / cost.seconds / 1e9:.1f}",
        f"{cost.bytes / cost.seconds / 1e9:.1f}",
        _time(cost.expected),
        f"{cost.of_limit:.0%}" + (" !" if cost.of_limit < SLOW and cost.seconds > _NOTABLE * profile.seconds else ""),
    ]


def _rates(cost: Cost) -> str:
    return (
        f"{cost.flops / 1e9:.3g} GFLOP at {cost.flops / cost.seconds / 1e9:.1f} GF/s, "
        f"{cost.bytes / 1e6:.3g} MB at {cost.bytes / cost.seconds / 1e9:.1f} GB/s"
    )


def _share(seconds: float, profile: Profile) -> str:
    return f"{seconds / profile.seconds:.1%}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
