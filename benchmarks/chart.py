"""The bar chart of a run."""

from __future__ import annotations

from pathlib import Path

from .bars import draw_bars
from .cases.published import GROUP
from .records import Results
from .report import rows


def draw(results: Results, path: Path) -> None:
    """One bar for each case, in the order of the report; published widths have tables of their own (widths.py), and no
    picture."""
    timed_rows = [row for row in rows(results) if row.seconds is not None and row.record.group != GROUP]
    if not timed_rows:
        return
    title = f"onnx-lowering, {results.threads} thread(s), {results.machine}"
    names, ratios = [row.record.case for row in timed_rows], [row.ratio or 0.0 for row in timed_rows]
    draw_bars(title, names, ratios, [row.share or 0.0 for row in timed_rows], path)
