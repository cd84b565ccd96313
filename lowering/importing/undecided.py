"""What is raised where the run decides of which type a value is, and how names are read by nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ..errors import NodeError

Move = Callable[[Sequence[ir.Node], Sequence[ir.Value]], list[ir.Node]]
"""Of the nodes that follow in the graph, and its outputs, those that are still to be lowered."""


class UndecidedTypeError(NodeError):
    """The branches of a node give values of different types.

    `move` lowers the node together with nodes that follow, until the types are equal.
    """

    def __init__(self, error: NodeError, move: Move) -> None:
        super().__init__(error.where, error.what, error.remedy)
        self.move = move


def names_read(node: ir.Node) -> set[str]:
    """Return the names of the values that a node and its bodies read."""
    names = {value.name for value in node.inputs if value is not None and value.name}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            names |= {value.name for value in body.outputs if value.name}
            names = names.union(*map(names_read, body))
    return names


def names_given(node: ir.Node) -> set[str]:
    """Return the names of a node's outputs."""
    return {value.name for value in node.outputs if value.name}
