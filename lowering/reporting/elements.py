"""Elements of HTML and SVG. The standard library writes them out, which escapes every text and attribute: names come
from models, and may be anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias
from xml.etree import ElementTree

Node: TypeAlias = ElementTree.Element
Child: TypeAlias = Node | str | None

# What HTML forbids even when it is escaped: control characters, halves of surrogate pairs.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def E(tag: str, *children: Child | Iterable[Child], **attributes: str | float) -> Node:
    """An element. A trailing _ of an attribute's name is left out, other _ are hyphens (class_, stroke_width)."""
    named = {name.rstrip("_").replace("_", "-"): _legal(str(value)) for name, value in attributes.items()}
    node = ElementTree.Element(tag, named)
    for child in children:
        for each in [child] if isinstance(child, Node | str | None) else child:
            _append(node, each)
    return node


def to_html(node: Node) -> str:
    """As HTML."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def svg(width: float, height: float, *children: Child | Iterable[Child], label: str) -> Node:
    """A picture as wide as its place, at most `width` pixels; label is for who does not see it."""
    box = {"viewBox": f"0 0 {width:g} {height:g}", "style": f"max-width: {width:g}px"}
    picture = E("svg", E("title", label), *children, role="img", **box)
    return E("div", picture, class_="picture")


def table(headings: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = ()) -> Node:
    """A table that scrolls inside itself where it is too wide; the columns `numbers` are set flush right."""

    def cells(tag: str, row: Sequence[Child]) -> Node:
        return E("tr", (E(tag, cell, **({"class_": "number"} if k in numbers else {})) for k, cell in enumerate(row)))

    body = [cells("td", row) for row in rows]
    return E("div", E("table", E("thead", cells("th", headings)), E("tbody", body)), class_="wide")


def facts(pairs: Iterable[tuple[str, Child]]) -> Node:
    """Names and what is to be said of them."""
    return E("dl", (node for name, value in pairs for node in (E("dt", name), E("dd", value))))


def folded(summary: Child, *children: Child | Iterable[Child], open_: bool = False) -> Node:
    return E("details", E("summary", summary), *children, **({"open": "open"} if open_ else {}))


def code(text: str) -> Node:
    return E("pre", E("code", text))


def note(*children: Child) -> Node:
    return E("p", *children, class_="note")


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


def _append(node: Node, child: Child) -> None:
    if child is None:
        return
    if isinstance(child, Node):
        node.append(child)
    elif len(node):
        node[-1].tail = (node[-1].tail or "") + _legal(child)
    else:
        node.text = (node.text or "") + _legal(child)
