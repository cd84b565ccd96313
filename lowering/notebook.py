"""What notebooks show of results: tables in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .manifest import Manifest

_CELL = ' style="text-align: left; vertical-align: top"'


def table(said: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lines of text and a table below them; characters that mean something in HTML are escaped."""
    head = "".join(f"<th{_CELL}>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td{_CELL}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    lines = "<br>".join(escape(line) for line in said.splitlines())
    return f"<p>{lines}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def of_model(manifest: Manifest) -> str:
    """What a model takes and gives."""
    rows = [("input", t.name, t.dtype, list(t.dims), manifest.donated.get(t.name, "")) for t in manifest.inputs]
    rows += [("output", t.name, t.dtype, list(t.dims), "") for t in manifest.outputs]
    size = sum(weight.nbytes for weight in manifest.weights) / 2**20
    said = f"model for {manifest.target}, {len(manifest.kernels)} kernels, {size:.1f} MiB of weights"
    for name, (low, high) in manifest.ranges.items():
        said += f"\n{name}: {low}" if low == high else f"\n{name}: {low} to {high}"
    return table(said, ("", "name", "dtype", "shape", "donated to"), rows)
