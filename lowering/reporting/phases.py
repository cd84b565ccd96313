"""The model before and after each phase, side by side: fusion (ONNX), then the passes up to kernels (Relax)."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .dump import CompilationDump
from .elements import Child, E, Node, make_details, make_note

_CONTEXT = 3  # equal lines next to a change
_MIN_FOLDED = 8  # equal lines in a fold, at least
_MAX_LINES = 8000  # lines of a side: the time of a comparison is quadratic
_MAX_OPEN_CHANGES = 40  # changes that are shown unfolded
_MAX_ELEMENTS = 8  # elements of an attribute that are shown


@dataclass(frozen=True)
class DiffLine:
    """A line of a side, its mark ("", "fused", "removed" or "new"), and a remark."""

    text: str
    mark: str = ""
    remark: str = ""


def render_phases(dump: CompilationDump) -> Iterator[Node]:
    original, fused = dump.read_model("given"), dump.read_model("fused")
    before, after = _list_nodes(original), _list_nodes(fused)
    sources = {name for line in after.values() for name in _list_sources(line)}
    left = [
        _mark_line(text, "fused" if name in sources else "removed", name not in after)
        for name, (text, _) in before.items()
    ]
    right = [
        _mark_line(text, "new", name not in before or bool(source), source) for name, (text, source) in after.items()
    ]
    yield E("h3", "Fusion: ONNX as given, and as it is imported")
    if [line.text for line in left] == [line.text for line in right]:
        yield E("p", f"Of {len(left)} nodes none was changed.")
    else:
        yield E("p", _count_marks(left, right))
        yield from render_side_by_side(left, right, "as given", "after fusion")
    names = ("canonicalize", "as imported"), ("donate", "before scheduling")
    yield E("h3", "Passes: Relax as imported, and when kernels are about to be scheduled")
    yield E("p", "Operators became calls of kernels; what each kernel does is under Code. Weights are left out.")
    left, right = (
        [DiffLine(text) for text in _format_relax(dump.read_script(name).functions.get("main", ""))]
        for name, _ in names
    )
    yield from render_side_by_side(left, right, names[0][1], names[1][1])


def _count_marks(left: Sequence[DiffLine], right: Sequence[DiffLine]) -> str:
    marks = Counter(line.mark for line in (*left, *right))
    return (
        f"{len(left)} nodes became {len(right)}: {marks['fused']} were fused into others, {marks['removed']} were "
        f"removed or rewritten otherwise, {marks['new']} are new."
    )


def render_side_by_side(left: Sequence[DiffLine], right: Sequence[DiffLine], before: str, after: str) -> Iterator[Node]:
    """Yield the lines before and after a phase side by side; runs of equal lines are folded."""
    if max(len(left), len(right)) > _MAX_LINES:
        yield make_note(
            f"{len(left)} and {len(right)} lines are too many to be shown beside each other: the dump has them."
        )
        return
    diff_rows: list[Node] = [_render_row([DiffLine(before)], [DiffLine(after)], "heading")]
    matcher = difflib.SequenceMatcher(None, [l.text for l in left], [r.text for r in right], autojunk=False)
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag != "equal":
            diff_rows.append(_render_row(left[i0:i1], right[j0:j1], "changed"))
            continue
        equal_rows = [_render_row([a], [b], "same") for a, b in zip(left[i0:i1], right[j0:j1])]
        if len(equal_rows) < _MIN_FOLDED + 2 * _CONTEXT:
            diff_rows += equal_rows
            continue
        start = _CONTEXT if i0 else 0
        end = len(equal_rows) - (_CONTEXT if i1 < len(left) else 0)
        diff_rows += equal_rows[:start]
        diff_rows.append(make_details(f"{end - start} equal lines", equal_rows[start:end]))
        diff_rows += equal_rows[end:]
    changed = sum(tag != "equal" for tag, *_ in matcher.get_opcodes())
    title = f"Side by side: {changed} change{'' if changed == 1 else 's'}"
    yield make_details(title, E("div", diff_rows, class_="diff"), open_=changed <= _MAX_OPEN_CHANGES)


def _render_row(left: Sequence[DiffLine], right: Sequence[DiffLine], kind: str) -> Node:
    return E(
        "div",
        E("div", map(_render_line, left), class_="side"),
        E("div", map(_render_line, right), class_="side"),
        class_=f"pair {kind}",
    )


def _render_line(line: DiffLine) -> Node:
    chip: list[Child] = [E("span", line.mark, class_=f"chip {line.mark}"), " "] if line.mark else []
    remark = E("span", f"  {line.remark}", class_="remark") if line.remark else None
    return E("div", chip, E("code", line.text), remark, class_="line")


def _mark_line(text: str, mark: str, condition: bool, source: str = "") -> DiffLine:
    return DiffLine(text, mark if condition else "", f"of {source}" if source else "")


def _list_nodes(model: ir.Model) -> dict[str, tuple[str, str]]:
    """Return by node name, or by name of the first output, the line of a node and the nodes it was fused from."""
    lines: dict[str, tuple[str, str]] = {}
    for node in model.graph.all_nodes():
        name = node.name or next((o.name for o in node.outputs if o.name), "")
        while name in lines:
            name += "'"
        lines[name] = _format_node(node), node.metadata_props.get("fused_from", "")
    return lines


def _list_sources(line: tuple[str, str]) -> list[str]:
    return [name for name in line[1].split(", ") if name]


def _format_node(node: ir.Node) -> str:
    outputs = ", ".join(value.name or "" for value in node.outputs)
    inputs = ", ".join("" if value is None else value.name or "" for value in node.inputs)
    shown = (f"{name}={_format_value(attribute)}" for name, attribute in node.attributes.items())
    attributes = ", ".join(shown)
    domain = f"{node.domain}." if node.domain else ""
    return f"{outputs} = {domain}{node.op_type}({inputs})" + (f" {{{attributes}}}" if attributes else "")


def _format_value(attribute: ir.Attr) -> str:
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        size = int(np.prod(value.shape.numpy()))
        return str(value.numpy().tolist()) if size <= _MAX_ELEMENTS else f"tensor {list(value.shape.numpy())}"
    if isinstance(value, ir.Graph):
        return f"graph of {len(value)} nodes"
    text = str(list(value)) if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _format_relax(text: str) -> Iterator[str]:
    """Yield the lines of the main function, with short types and without weights: an input or statement each."""
    for line in text.splitlines():
        line = line.removeprefix("    ")
        if line.startswith(("@", "    R.func_attr(", "    cls = ")):
            continue
        line = re.sub(r", (?:out_ty|ty_args)=.*\)$", ")", line)
        line = re.sub(r"R\.Tensor\(\((.*?),?\), dtype=\"(\w+)\"\)", r"\2[\1]", line)
        line = re.sub(r"R\.call_tir(_inplace)?\(cls\.(\w+), (?:R\.tuple)?\((.*?),?\)", r"\2\1(\3", line).replace(
            "R.", ""
        )
        if line.startswith("def "):
            yield from re.findall(r"input_\d+: \w+\[.*?\]", line)
        else:
            yield line.removeprefix("    ")
