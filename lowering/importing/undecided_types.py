"""The error for a value whose type is decided at run time, and the names that nodes read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ..errors import NodeError
from ..graph.loading.legality import iterate_bodies

Move = Callable[[Sequence[ir.Node], Sequence[ir.Value]], list[ir.Node]]
"""A function of the following nodes of the graph, and its outputs; it returns the nodes that remain to be lowered."""


class UndecidedTypeError(NodeError):
    """The branches of a node give values of different types.

    `move` lowers the node together with nodes that follow, until the types are equal.
    """

    def __init__(self, error: NodeError, move: Move) -> None:
        super().__init__(error.code, error.where, error.what, error.remedy)
        self.move = move


def get_read_names(node: ir.Node) -> set[str]:
    """Return the names of the values that a node and its bodies read."""
    names = {value.name for value in node.inputs if value is not None and value.name}
    for body in iterate_bodies(node):
        names |= {value.name for value in body.outputs if value.name}
        names = names.union(*map(get_read_names, body))
    return names


def get_output_names(node: ir.Node) -> set[str]:
    """Return the names of a node's outputs."""
    return {value.name for value in node.outputs if value.name}
