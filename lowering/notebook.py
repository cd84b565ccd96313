"""HTML tables of results, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .manifest import Manifest

_CELL = ' style="text-align: left; vertical-align: top"'


def format_table(text: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return lines of text with a table below them, with HTML characters escaped."""
    head = "".join(f"<th{_CELL}>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td{_CELL}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    lines = "<br>".join(escape(line) for line in text.splitlines())
    return f"<p>{lines}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def format_model(manifest: Manifest) -> str:
    """Return a table of a model's inputs and outputs."""
    rows = [("input", t.name, t.dtype, list(t.dims), manifest.donated.get(t.name, "")) for t in manifest.inputs]
    rows += [("output", t.name, t.dtype, list(t.dims), "") for t in manifest.outputs]
    size = sum(weight.nbytes for weight in manifest.weights) / 2**20
    text = f"model for {manifest.target}, {len(manifest.kernels)} kernels, {size:.1f} MiB of weights"
    for name, (low, high) in manifest.ranges.items():
        text += f"\n{name}: {low}" if low == high else f"\n{name}: {low} to {high}"
    return format_table(text, ("", "name", "dtype", "shape", "donated to"), rows)
