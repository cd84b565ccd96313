"""The graphs of FlexAttention: what they may be, and what they make of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...importing.node import Node
from ...importing.values import Shape, Value, as_text
from ..asserted import asserted


@dataclass(frozen=True)
class Mod:
    """The graph in an attribute of the node: a function from tensors of one type and shape to such tensors. It may use
    values of the graph around the node."""

    node: Node
    name: str
    dtype: str
    shape: Shape

    @staticmethod
    def of(node: Node, name: str, dtype: str, shape: Shape) -> Mod | None:
        """That of the attribute `name`, for tensors of that type and shape; None if the node does not have it.

        Raises NodeError for a graph that does not take one such tensor, or does not give one.
        """
        graph = node.attr(name, None)
        if graph is None:
            return None
        mod = Mod(node, name, dtype, shape)
        for what, values in (("input", graph.inputs), ("output", graph.outputs)):
            if len(values) != 1:
                raise node.error(
                    f"the graph {name} has {len(values)} {what}s.",
                    f"Give it one, {mod._wanted}; what else it needs can be an initializer of it, or a value around "
                    "the node, which it may name.",
                )
        given = graph.inputs[0]
        if given.dtype is not None:
            mod._check("takes", given.dtype.numpy().name, None if given.shape is None else list(given.shape))
        return mod

    def __call__(self, value: Value) -> Value:
        """What the graph makes of the tensor, known or asserted at run time to have the same shape."""
        (result,) = self.node.subgraph(self.name, value, recipes=True)
        self._check("gives", result.dtype, result.shape)
        return asserted(self.node, result, self.shape, f"what the graph {self.name} gives")

    @property
    def _wanted(self) -> str:
        return f"{self.dtype}[{', '.join(map(as_text, self.shape))}]"

    def _check(self, verb: str, dtype: str, shape: Sequence[Any] | None) -> None:
        """Raises NodeError for another type, or for another shape as far as numbers tell."""
        if dtype != self.dtype:
            raise self.node.error(
                f"the graph {self.name} {verb} {dtype}, and the softmax is in {self.dtype}.",
                f"Make it {self.dtype}, or set the attribute softmax_precision.",
            )
        if shape is None:
            return
        differs = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, self.shape))
        if differs or len(shape) != len(self.shape):
            text = ", ".join("?" if d is None else as_text(getattr(d, "value", d)) for d in shape)
            raise self.node.error(
                f"the graph {self.name} {verb} a tensor of shape [{text}].",
                f"It takes and gives {self._wanted}, one element for each query row and key.",
            )
