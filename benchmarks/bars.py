"""Two columns of bars: how many times as fast as the best peer we are, and our share of the limit."""

from __future__ import annotations

import sys
from pathlib import Path


def draw_bars(title: str, names: list[str], ratios: list[float], shares: list[float], path: Path) -> None:
    """One bar for each name in each column, as PNG. Says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"'{path}' is not drawn: matplotlib is not installed; pip install '.[bench]' brings it.", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 1 + 0.19 * len(names)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title, fontsize=10)
    for axis, values, heading in (
        (axes[0], ratios, "times as fast as the best peer"),
        (axes[1], shares, "share of the limit"),
    ):
        axis.barh(names, values, color=["#3a7ca5" if value >= 1 or axis is axes[1] else "#c8553d" for value in values])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(heading, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(y=0.005)
    axes[0].set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)
