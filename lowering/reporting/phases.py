"""The model before and after each phase, side by side: fusion (ONNX), then the passes up to kernels (Relax)."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .dump import Dump
from .elements import Child, E, Node, folded, note

_AROUND = 3  # equal lines beside a change
_FEWEST = 8  # equal lines that are worth folding
_MOST = 8000  # lines of a side: comparing takes time that grows with their square
_OPEN = 40  # changes up to which they are shown at once
_ELEMENTS = 8  # of an attribute


@dataclass(frozen=True)
class Line:
    """A line of a side, and what is to be marked about it: "", "fused", "removed" or "new", and a remark."""

    text: str
    mark: str = ""
    remark: str = ""


def phases(dump: Dump) -> Iterator[Node]:
    given, fused = dump.model("given"), dump.model("fused")
    before, after = _nodes(given), _nodes(fused)
    sources = {name for line in after.values() for name in _sources(line)}
    left = [
        _marked(text, "fused" if name in sources else "removed", name not in after)
        for name, (text, _) in before.items()
    ]
    right = [_marked(text, "new", name not in before or bool(source), source) for name, (text, source) in after.items()]
    yield E("h3", "Fusion: ONNX as given, and as it is imported")
    if [line.text for line in left] == [line.text for line in right]:
        yield E("p", f"Of {len(left)} nodes none was changed.")
    else:
        yield E("p", _counted(left, right))
        yield from side_by_side(left, right, "as given", "after fusion")
    names = ("canonicalize", "as imported"), ("donate", "before scheduling")
    yield E("h3", "Passes: Relax as imported, and when kernels are about to be scheduled")
    yield E("p", "Operators became calls of kernels; what each kernel does is under Code. Weights are left out.")
    left, right = ([Line(text) for text in _relax(dump.script(name).functions.get("main", ""))] for name, _ in names)
    yield from side_by_side(left, right, names[0][1], names[1][1])


def _counted(left: Sequence[Line], right: Sequence[Line]) -> str:
    marks = Counter(line.mark for line in (*left, *right))
    return (
        f"{len(left)} nodes became {len(right)}: {marks['fused']} were fused into others, {marks['removed']} were "
        f"removed or rewritten otherwise, {marks['new']} are new."
    )


def side_by_side(left: Sequence[Line], right: Sequence[Line], before: str, after: str) -> Iterator[Node]:
    """Lines beside what became of them; runs of equal lines are folded."""
    if max(len(left), len(right)) > _MOST:
        yield note(f"{len(left)} and {len(right)} lines are too many to be shown beside each other: the dump has them.")
        return
    parts: list[Node] = [_row([Line(before)], [Line(after)], "heading")]
    matcher = difflib.SequenceMatcher(None, [l.text for l in left], [r.text for r in right], autojunk=False)
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag != "equal":
            parts.append(_row(left[i0:i1], right[j0:j1], "changed"))
            continue
        same = [_row([a], [b], "same") for a, b in zip(left[i0:i1], right[j0:j1])]
        if len(same) < _FEWEST + 2 * _AROUND:
            parts += same
            continue
        start = _AROUND if i0 else 0
        end = len(same) - (_AROUND if i1 < len(left) else 0)
        parts += same[:start]
        parts.append(folded(f"{end - start} equal lines", same[start:end]))
        parts += same[end:]
    changed = sum(tag != "equal" for tag, *_ in matcher.get_opcodes())
    title = f"Side by side: {changed} change{'' if changed == 1 else 's'}"
    yield folded(title, E("div", parts, class_="diff"), open_=changed <= _OPEN)


def _row(left: Sequence[Line], right: Sequence[Line], kind: str) -> Node:
    return E(
        "div",
        E("div", map(_line, left), class_="side"),
        E("div", map(_line, right), class_="side"),
        class_=f"pair {kind}",
    )


def _line(line: Line) -> Node:
    chip: list[Child] = [E("span", line.mark, class_=f"chip {line.mark}"), " "] if line.mark else []
    remark = E("span", f"  {line.remark}", class_="remark") if line.remark else None
    return E("div", chip, E("code", line.text), remark, class_="line")


def _marked(text: str, mark: str, condition: bool, source: str = "") -> Line:
    return Line(text, mark if condition else "", f"of {source}" if source else "")


def _nodes(model: ir.Model) -> dict[str, tuple[str, str]]:
    """By the name of a node, or of its first output, its line and what it was fused from."""
    found: dict[str, tuple[str, str]] = {}
    for node in model.graph.all_nodes():
        name = node.name or next((o.name for o in node.outputs if o.name), "")
        while name in found:
            name += "'"
        found[name] = _text(node), node.metadata_props.get("fused_from", "")
    return found


def _sources(line: tuple[str, str]) -> list[str]:
    return [name for name in line[1].split(", ") if name]


def _text(node: ir.Node) -> str:
    outputs = ", ".join(value.name or "" for value in node.outputs)
    inputs = ", ".join("" if value is None else value.name or "" for value in node.inputs)
    shown = (f"{name}={_value(attribute)}" for name, attribute in node.attributes.items())
    attributes = ", ".join(shown)
    domain = f"{node.domain}." if node.domain else ""
    return f"{outputs} = {domain}{node.op_type}({inputs})" + (f" {{{attributes}}}" if attributes else "")


def _value(attribute: ir.Attr) -> str:
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        size = int(np.prod(value.shape.numpy()))
        return str(value.numpy().tolist()) if size <= _ELEMENTS else f"tensor {list(value.shape.numpy())}"
    if isinstance(value, ir.Graph):
        return f"graph of {len(value)} nodes"
    text = str(list(value)) if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _relax(text: str) -> Iterator[str]:
    """The main function of a script: an input or a statement on a line, types short and said once, no weights."""
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
