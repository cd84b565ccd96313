"""The bar chart of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from .records import Results
from .report import rows


def draw(results: Results, path: Path) -> None:
    """Two columns of bars: how many times as fast as the best peer we are, and our share of the limit."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"'{path}' is not drawn: matplotlib is not installed; pip install '.[bench]' brings it.", file=sys.stderr)
        return
    found = [row for row in rows(results) if row.seconds is not None]
    names = [row.record.case for row in found]
    figure = Figure(figsize=(11, 1 + 0.19 * len(names)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(f"onnx-lowering, {results.threads} thread(s), {results.machine}", fontsize=10)
    for axis, values, title in (
        (axes[0], [row.ratio or 0.0 for row in found], "times as fast as the best peer"),
        (axes[1], [row.share or 0.0 for row in found], "share of the limit"),
    ):
        axis.barh(names, values, color=["#3a7ca5" if value >= 1 or axis is axes[1] else "#c8553d" for value in values])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(y=0.005)
    axes[0].set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)
