"""Elements of HTML and SVG.

The standard library serializes them and escapes every text and attribute: names come from models, and may be
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from xml.etree import ElementTree

Node: TypeAlias = ElementTree.Element
Child: TypeAlias = Node | str | None

# Characters that HTML forbids even when escaped: control characters, halves of surrogate pairs.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def E(tag: str, *children: Child | Iterable[Child], **attributes: str | float) -> Node:
    """Return an element; in attribute names a trailing _ is dropped, other _ become hyphens (class_, stroke_width)."""
    escaped = {name.rstrip("_").replace("_", "-"): _replace_illegal(str(value)) for name, value in attributes.items()}
    node = ElementTree.Element(tag, escaped)
    for child in children:
        for item in [child] if isinstance(child, Node | str | None) else child:
            _append(node, item)
    return node


def to_html(node: Node) -> str:
    """Return a node as HTML."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def make_svg(width: float, height: float, *children: Child | Iterable[Child], label: str) -> Node:
    """Return a picture as wide as its container, at most `width` pixels; label is the text alternative."""
    box = {"viewBox": f"0 0 {width:g} {height:g}", "style": f"max-width: {width:g}px"}
    picture = E("svg", E("title", label), *children, role="img", **box)
    return E("div", picture, class_="picture")


def make_table(headings: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = ()) -> Node:
    """Return a table that scrolls horizontally where it is too wide; the columns `numbers` are right-aligned."""

    def cells(tag: str, row: Sequence[Child]) -> Node:
        return E("tr", (E(tag, cell, **({"class_": "number"} if k in numbers else {})) for k, cell in enumerate(row)))

    body = [cells("td", row) for row in rows]
    return E("div", E("table", E("thead", cells("th", headings)), E("tbody", body)), class_="wide")


def make_facts(pairs: Iterable[tuple[str, Child]]) -> Node:
    """Return a list of names and their descriptions."""
    return E("dl", (node for name, value in pairs for node in (E("dt", name), E("dd", value))))


def make_details(summary: Child, *children: Child | Iterable[Child], open_: bool = False) -> Node:
    return E("details", E("summary", summary), *children, **({"open": "open"} if open_ else {}))


def make_code(text: str) -> Node:
    return E("pre", E("code", text))


def make_note(*children: Child) -> Node:
    return E("p", *children, class_="note")


def _replace_illegal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


def _append(node: Node, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Node):
        node.append(child)
    elif len(node):
        node[-1].tail = (node[-1].tail or "") + _replace_illegal(child)
    else:
        node.text = (node.text or "") + _replace_illegal(child)
