"""The graph attributes of FlexAttention: their checks, and their application to a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...importing.node import Node
from ...importing.values import Shape, Value, format_size
from ..helpers.assertions import assert_shape


@dataclass(frozen=True)
class ModGraph:
    """A graph attribute of the node: a function from one tensor to a tensor of the same type and shape.

    It may use values of the graph that contains the node.
    """

    node: Node
    name: str
    dtype: str
    shape: Shape

    @staticmethod
    def from_attribute(node: Node, name: str, dtype: str, shape: Shape) -> ModGraph | None:
        """Return the graph of attribute `name` for tensors of this type and shape, or None without the attribute.

        Raises:
            NodeError: the graph does not take one such tensor, or does not return one.
        """
        graph = node.attr(name, None)
        if graph is None:
            return None
        mod = ModGraph(node, name, dtype, shape)
        for what, values in (("input", graph.inputs), ("output", graph.outputs)):
            if len(values) != 1:
                raise node.error(
                    "flex_attention.mod_signature_unsupported",
                    f"the graph {name} has {len(values)} {what}s.",
                    f"Give it one, {mod._type_text}. Make other inputs initializers of the graph, or refer by "
                    "name to values of the graph around the node.",
                )
        tensor = graph.inputs[0]
        if tensor.dtype is not None:
            mod._check_tensor("takes", tensor.dtype.numpy().name, None if tensor.shape is None else list(tensor.shape))
        return mod

    def __call__(self, value: Value) -> Value:
        """Apply the graph to the tensor; the result's shape is static or asserted at run time."""
        (result,) = self.node.subgraph(self.name, value, recipes=True)
        self._check_tensor("returns", result.dtype, result.shape)
        return assert_shape(self.node, result, self.shape, f"the output of the graph {self.name}")

    @property
    def _type_text(self) -> str:
        return f"{self.dtype}[{', '.join(map(format_size, self.shape))}]"

    def _check_tensor(self, verb: str, dtype: str, shape: Sequence[Any] | None) -> None:
        """Raise NodeError for another type, or for another shape as far as sizes are static."""
        if dtype != self.dtype:
            raise self.node.error(
                "flex_attention.mod_dtype_mismatch",
                f"the graph {self.name} {verb} {dtype}, and the softmax is in {self.dtype}.",
                f"Make it {self.dtype}, or set the attribute softmax_precision.",
            )
        if shape is None:
            return
        is_different = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, self.shape))
        if is_different or len(shape) != len(self.shape):
            text = ", ".join("?" if d is None else format_size(getattr(d, "value", d)) for d in shape)
            raise self.node.error(
                "flex_attention.mod_shape_mismatch",
                f"the graph {self.name} {verb} a tensor of shape [{text}].",
                f"Make its input and output {self._type_text}, one element for each query row and key.",
            )
