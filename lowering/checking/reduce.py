"""`verify --reduce`: of a model that fails, the smallest part that still does.

The reference's values of the whole model make every part of it a model: what a part reads from outside is an input, or
a constant if it depends on no input or is arithmetic of sizes. Nodes are looked for from both ends. First the shortest
beginning of the model that fails, by bisection: its last node is where things go wrong, or the last of those that are
compiled as one. Then nodes before it are left out, many at a time at first, as long as the rest fails (ddmin, Zeller
and Hildebrandt 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import onnx_ir as ir

from ..compiling import progress
from .parts import Part, Whole
from .references import Against, Feeds

Blamed: TypeAlias = Callable[[ir.Model, Feeds], Collection[str]]
"""The outputs at fault of a model that takes these arrays; none where it is all right, or fails in another way."""

_SINGLE = 4  # outputs that are tried one by one


def reduce(model: ir.Model, feeds: Feeds, against: Against, blamed: Blamed) -> Part | None:
    """The smallest part found for which `blamed` names an output; None if it names none of the whole model's.

    feeds are the arrays by input name. Raises LoweringError if the reference cannot run the model.
    """
    whole = Whole(model, feeds, against)
    beginning = whole.beginning(len(whole.nodes))
    if not _at_fault(beginning, blamed):
        return None
    passes, fails = 0, len(whole.nodes)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        progress.at(f"reducing: {fails} of {len(whole.nodes)} nodes fail")
        part = whole.beginning(middle)
        if _at_fault(part, blamed):
            fails, beginning = middle, part
        else:
            passes = middle
    own = {value.name for value in whole.nodes[fails - 1].outputs}
    names = sorted(_at_fault(beginning, blamed), key=lambda name: name not in own)
    for name in names[:_SINGLE]:
        if _at_fault(part := whole.part(range(fails), [name]), blamed):
            return None if part is None else _shrunk(whole, part, [name], blamed)
    return None if beginning is None else _shrunk(whole, beginning, names, blamed)


def _shrunk(whole: Whole, part: Part, outputs: Sequence[str], blamed: Blamed) -> Part:
    """The part without all nodes without which it fails as well."""
    count = max(1, len(part.nodes) // 2)
    while True:
        before, start = len(part.nodes), 0
        while start < len(part.nodes):
            progress.at(f"reducing: {len(part.nodes)} of {len(whole.nodes)} nodes fail", start, len(part.nodes))
            smaller = whole.part((*part.nodes[:start], *part.nodes[start + count :]), outputs)
            if smaller is not None and _at_fault(smaller, blamed):
                part = smaller
            else:
                start += count
        if count == 1 and len(part.nodes) == before:
            return part
        count = max(1, count // 2)


def _at_fault(part: Part | None, blamed: Blamed) -> Collection[str]:
    return () if part is None else blamed(part.model, part.feeds)
