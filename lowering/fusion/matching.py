"""What the passes of this folder share: questions about a graph, and one way to change it.

Every value has a type, a shape and, where it is a small known array, a `const_value`: `InferSizesPass` ran before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import ModelError

Size = int | ir.SymbolicDim


def is_op(node: ir.Node | None, *operators: str) -> bool:
    """Whether the node is one of these ai.onnx operators."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in operators


def producer(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that computes the value, if it is one of these ai.onnx operators."""
    node = value.producer() if value is not None else None
    return node if is_op(node, *operators) else None


def operand(node: ir.Node, position: int) -> ir.Value:
    """An input that is no hole."""
    value = node.inputs[position]
    assert value is not None
    return value


def pairs(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two inputs of a commutative operator, both ways round."""
    a, b = operand(node, 0), operand(node, 1)
    yield a, b
    yield b, a


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    given = node.attributes.get(name)
    return default if given is None else given.value


def array(value: ir.Value | None) -> np.ndarray | None:
    """The elements of a known value."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def number(value: ir.Value | None) -> float | None:
    """The number that a known value of one element is."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    found = value.const_value.numpy()
    return float(found.item()) if found.dtype.kind in "iuf" or found.dtype.name == "bfloat16" else None


def integers(node: ir.Node, position: int, name: str) -> list[int] | None:
    """Known integers that are an input in newer opsets and an attribute in older ones; None where unknown."""
    if len(node.inputs) > position and node.inputs[position] is not None:
        found = array(node.inputs[position])
        return None if found is None else [int(i) for i in found.reshape(-1)]
    given = attribute(node, name, None)
    return None if given is None else [int(i) for i in given]


def dims(value: ir.Value) -> tuple[Size, ...]:
    """The sizes of a value; () also where nobody knows its rank, which no pattern matches."""
    return () if value.shape is None else tuple(value.shape)


def known(size: Size) -> bool:
    return isinstance(size, int)


def numbers(sizes: Iterable[Size]) -> list[int] | None:
    """The sizes, where all of them are numbers."""
    found = list(sizes)
    return [size for size in found if isinstance(size, int)] if all(map(known, found)) else None


def may_drop(dropout: ir.Node) -> bool:
    """Whether a Dropout may be in training, at a ratio that is not 0."""
    ratio, training = (dropout.inputs[k] if len(dropout.inputs) > k else None for k in (1, 2))
    if training is None:
        return False
    constants = (None if value is None else ir.convenience.get_const_tensor(value) for value in (ratio, training))
    return not any(constant is not None and not constant.numpy().any() for constant in constants)


def widens(cast: ir.Node) -> bool:
    """Whether a Cast goes from a floating-point type to one of more bits."""
    before, after = operand(cast, 0).dtype, cast.outputs[0].dtype
    return before is not None and after is not None and before.is_floating_point() and after.itemsize > before.itemsize


def may_broadcast(size: Size, to: Size) -> bool:
    """Whether a dimension fits into another one without making it larger.

    Two different symbols count as equal, as everywhere in this compiler: that is checked when the model runs.
    """
    return size == 1 or (to != 1 and (size == to or not (known(size) and known(to))))


def closed(nodes: Collection[ir.Node], result: ir.Value) -> bool:
    """Whether nothing outside of these nodes reads what they compute, but for the result.

    Who asks for a Shape reads no element: it is left to its value, which nobody computes for that.
    """
    for value in (output for node in nodes for output in node.outputs if output is not result):
        readers = [use.node for use in value.uses() if not is_op(use.node, "Shape")]
        if value.is_graph_output() or any(reader not in nodes for reader in readers):
            return False
    return True


def only_reader(value: ir.Value, *operators: str) -> ir.Node | None:
    """The one node that reads the value, if it is one of these operators."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = next(iter(uses)).node
    return node if is_op(node, *operators) else None


class Rewrite:
    """New nodes in place of matched ones. They stand where the last matched node, the anchor, stood."""

    def __init__(self, anchor: ir.Node) -> None:
        self.anchor = anchor
        self.origin = anchor.name or anchor.outputs[0].name
        self.nodes: list[ir.Node] = []

    def emit(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        dtype: ir.DataType | None = None,
        shape: Iterable[Size] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """The output of a new node; its type is that of the first input unless stated."""
        if dtype is None:
            assert inputs[0] is not None
            dtype = inputs[0].dtype
        if dtype is None:
            raise ModelError(
                f"nobody knows the element type of what node '{self.origin}' reads: a node before it has inputs that "
                "its operator does not take."
            )
        name = f"{self.origin}/{operator}"
        before = sum(node.op_type == operator for node in self.nodes)
        node = ir.node(operator, inputs, attributes or {}, domain=domain, name=f"{name}_{before}" if before else name)
        output = node.outputs[0]
        output.type = ir.TensorType(dtype)
        output.shape = None if shape is None else ir.Shape(shape)
        self.nodes.append(node)
        return output

    def constant(self, elements: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.tensor(elements.astype(dtype.numpy(), copy=False), dtype=dtype)
        value = self.emit("Constant", [], {"value": tensor}, dtype, elements.shape)
        value.const_value = tensor
        return value

    def integers(self, *elements: int) -> ir.Value:
        return self.constant(np.array(elements, np.int64), ir.DataType.INT64)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in that type; itself if it has it."""
        if value.dtype == dtype:
            return value
        return self.emit("Cast", [value], {"to": int(dtype)}, dtype, dims(value))

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        if list(perm) == list(range(len(perm))):
            return value
        shape = dims(value)
        return self.emit("Transpose", [value], {"perm": list(perm)}, shape=[shape[axis] for axis in perm])

    def insert(self) -> None:
        """Puts the new nodes before the anchor, which reads them."""
        graph = self.anchor.graph
        assert isinstance(graph, ir.Graph)
        graph.insert_before(self.anchor, self.nodes)

    def replace(self, nodes: Collection[ir.Node], old: ir.Value, new: ir.Value) -> None:
        """Puts `new` in the place of `old`, under its name, and removes the matched nodes that nobody needs then."""
        names = ", ".join(node.name or node.outputs[0].name or "" for node in nodes)
        for node in self.nodes:
            node.metadata_props["fused_from"] = names
        self.insert()
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.shape, new.name, old.name = old.shape, old.name, None
        remove_unused(nodes)


def remove_unused(nodes: Iterable[ir.Node]) -> None:
    """Removes those of the nodes that nobody reads, the last first."""
    left = [node for node in dict.fromkeys(nodes) if node.graph is not None]
    while left:
        unused = [n for n in left if not any(o.uses() or o.is_graph_output() for o in n.outputs)]
        if not unused:
            return
        for node in unused:
            assert node.graph is not None
            node.graph.remove(node, safe=True)
        left = [node for node in left if node not in unused]
