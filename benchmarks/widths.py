"""Tables of the models at published widths: a row for each model, a column for each form."""

from __future__ import annotations

from collections.abc import Iterable

from .cases import all_cases
from .cases.published import GROUP, PublishedCase
from .report import Row, markdown, mean, milliseconds, number, ours_cell

_COLUMNS = ("fixed", "batch1", "symbolic")
_HEADINGS = {"fixed": "every size fixed", "batch1": "batch 1", "symbolic": "symbolic"}
_COMPARED = "fixed / symbolic"

_ABOUT = """\
Models at published widths, two layers, 8192 words, in three forms: every size fixed, batch fixed at 1, every size
symbolic; exported by dynamo at opset 18 or 23, and where both were measured, each cell has the one that does worse:
**our milliseconds**, those of the best of ONNX Runtime and OpenVINO (which are told all sizes), and their ratio.
Prompts are 256 tokens for decoders, 128 for encoders and 32 behind an encoder; decoding reads one token behind 512, or
256 behind an encoder.
*{compared}* is our time, largest of both opsets.
"""


def tables(table_rows: list[Row]) -> str:
    """Return Markdown, one table for each task; "" without records of the group."""
    cells: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in table_rows:
        case = all_cases()[row.record.case]
        if row.record.group == GROUP and isinstance(case, PublishedCase):
            cells.setdefault((case.task, case.model_name), {}).setdefault(case.form, []).append(row)
    if not cells:
        return ""
    texts = [_ABOUT.format(compared=_COMPARED)]
    for task in dict.fromkeys(task for task, _ in cells):
        models = {model: forms for (other, model), forms in cells.items() if other == task}
        body = [
            [_label(forms), *(_cell(forms.get(form, [])) for form in _COLUMNS), number(_compared(forms))]
            for forms in models.values()
        ]
        body.append(["geometric mean", *(_mean(models.values(), form) for form in _COLUMNS), ""])
        texts.append(markdown([task, *(_HEADINGS[form] for form in _COLUMNS), _COMPARED], body))
    return "\n".join(texts)


def _label(forms: dict[str, list[Row]]) -> str:
    case = all_cases()[next(iter(forms.values()))[0].record.case]
    assert isinstance(case, PublishedCase)
    return f"{case.model_name} ({case.checkpoint})"


def _cell(rows: list[Row]) -> str:
    """Return the cell of the opset that does worse; a row without a ratio is worst."""
    if not rows:
        return ""
    row = min(rows, key=lambda row: row.ratio or 0.0)
    peer = milliseconds(row.best.timing.median) if row.best is not None and row.best.timing is not None else "-"
    return f"**{ours_cell(row)}** {peer} {number(row.ratio)}"


def _compared(forms: dict[str, list[Row]]) -> float | None:
    times = {
        (form, case.opset): row.seconds
        for form, rows in forms.items()
        for row in rows
        if isinstance(case := all_cases()[row.record.case], PublishedCase)
    }
    ratios = [
        fixed / symbolic
        for (form, opset), fixed in times.items()
        if form == "fixed" and fixed and (symbolic := times.get(("symbolic", opset)))
    ]
    return max(ratios, default=None)


def _mean(models: Iterable[dict[str, list[Row]]], form: str) -> str:
    """Return the mean of all ratios of both opsets, and the worst one."""
    ratios = [row.ratio for forms in models for row in forms.get(form, []) if row.ratio]
    return f"{mean(ratios):.2f}, worst {min(ratios):.2f}" if ratios else ""
