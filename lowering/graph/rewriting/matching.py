"""Helpers shared by all rewrites: queries about a graph, and one way to rewrite it.

Every value has a type, a shape and, if it is a small constant array, a `const_value`: `InferSizesPass` ran before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import ModelError
from .sources import inherit_names

Size = int | ir.SymbolicDim


def is_op(node: ir.Node | None, *operators: str) -> bool:
    """Return whether the node is one of these ai.onnx operators."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in operators


def producer(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the node that computes the value, if it is one of these ai.onnx operators."""
    node = value.producer() if value is not None else None
    return node if is_op(node, *operators) else None


def operand(node: ir.Node, position: int) -> ir.Value:
    """Return an input that is not absent."""
    value = node.inputs[position]
    assert value is not None
    return value


def operand_orders(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield the two inputs of a commutative operator in both orders."""
    a, b = operand(node, 0), operand(node, 1)
    yield a, b
    yield b, a


def label(node: ir.Node) -> str:
    """Return the operator and the name of a node, or of its first output if it has none."""
    return f"{node.op_type} {node.name or node.outputs[0].name or ''}"


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    stored = node.attributes.get(name)
    return default if stored is None else stored.value


def read_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the elements of a constant value."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def read_number(value: ir.Value | None) -> float | None:
    """Return the number in a constant value of one element."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    elements = value.const_value.numpy()
    return float(elements.item()) if elements.dtype.kind in "iuf" or elements.dtype.name == "bfloat16" else None


def read_integers(node: ir.Node, position: int, name: str) -> list[int] | None:
    """Return constant integers; None if they are not constant.

    They are an input in newer opsets and an attribute in older ones.
    """
    if len(node.inputs) > position and node.inputs[position] is not None:
        elements = read_array(node.inputs[position])
        return None if elements is None else [int(i) for i in elements.reshape(-1)]
    values = attribute(node, name, None)
    return None if values is None else [int(i) for i in values]


def dims(value: ir.Value) -> tuple[Size, ...]:
    """Return the sizes of a value; () also for an unknown rank, which no pattern matches."""
    return () if value.shape is None else tuple(value.shape)


def is_static(size: Size) -> bool:
    return isinstance(size, int)


def read_static_sizes(sizes: Iterable[Size]) -> list[int] | None:
    """Return the sizes if all of them are integers."""
    listed = list(sizes)
    return [size for size in listed if isinstance(size, int)] if all(map(is_static, listed)) else None


def can_drop(dropout: ir.Node) -> bool:
    """Return whether a Dropout may be in training mode with a ratio other than 0."""
    ratio, training = (dropout.inputs[k] if len(dropout.inputs) > k else None for k in (1, 2))
    if training is None:
        return False
    constants = (None if value is None else ir.convenience.get_const_tensor(value) for value in (ratio, training))
    return not any(constant is not None and not constant.numpy().any() for constant in constants)


def is_widening_cast(cast: ir.Node) -> bool:
    """Return whether a Cast goes from a floating-point type to one of more bits."""
    before, after = operand(cast, 0).dtype, cast.outputs[0].dtype
    return before is not None and after is not None and before.is_floating_point() and after.itemsize > before.itemsize


def can_broadcast(size: Size, to: Size) -> bool:
    """Return whether a dimension broadcasts to another one without enlarging it.

    Two different symbols count as equal, as everywhere in this compiler: that is checked when the model runs.
    """
    return size == 1 or (to != 1 and (size == to or not (is_static(size) and is_static(to))))


def is_closed(nodes: Collection[ir.Node], result: ir.Value) -> bool:
    """Return whether no node outside of these reads their outputs, except for the result.

    A Shape reads no elements: it keeps its input, which then need not be computed.
    """
    for value in (output for node in nodes for output in node.outputs if output is not result):
        readers = [use.node for use in value.uses() if not is_op(use.node, "Shape")]
        if value.is_graph_output() or any(reader not in nodes for reader in readers):
            return False
    return True


def only_reader(value: ir.Value, *operators: str) -> ir.Node | None:
    """Return the single node that reads the value, if it is one of these operators."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = next(iter(uses)).node
    return node if is_op(node, *operators) else None


class Rewrite:
    """New nodes that replace matched ones, inserted at the anchor, the last matched node."""

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
        """Return the output of a new node; its type is that of the first input unless stated otherwise."""
        if dtype is None:
            assert inputs[0] is not None
            dtype = inputs[0].dtype
        if dtype is None:
            raise ModelError(
                "model.dtype_unknown",
                f"the element type of the inputs of node '{self.origin}' is unknown: a node before it has inputs "
                "that its operator does not accept.",
            )
        (output,) = self.emit_node(operator, inputs, attributes, [dtype], domain=domain)
        output.shape = None if shape is None else ir.Shape(shape)
        return output

    def emit_node(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None,
        likes: Sequence[ir.Value | ir.DataType | None],
        *,
        domain: str = "",
        name: str | None = None,
    ) -> Sequence[ir.Value]:
        """Return the outputs of a new node.

        Args:
            likes: For each output a value of the same type and shape, or its element type, or None if it is unknown.
            name: The name of the node; the default one states the anchor and the operator.
        """
        earlier_count = sum(node.op_type == operator for node in self.nodes)
        suffix = f"_{earlier_count}" if earlier_count else ""
        node = ir.node(
            operator, inputs, attributes or {}, domain=domain, num_outputs=len(likes),
            name=f"{self.origin}/{operator}{suffix}" if name is None else name,
        )  # fmt: skip
        for output, like in zip(node.outputs, likes):
            if isinstance(like, ir.Value):
                output.type, output.shape = like.type, like.shape
            elif like is not None:
                output.type = ir.TensorType(like)
        self.nodes.append(node)
        return node.outputs

    def emit_constant(self, elements: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.tensor(elements.astype(dtype.numpy(), copy=False), dtype=dtype)
        value = self.emit("Constant", [], {"value": tensor}, dtype, elements.shape)
        value.const_value = tensor
        return value

    def emit_integers(self, *elements: int) -> ir.Value:
        return self.emit_constant(np.array(elements, np.int64), ir.DataType.INT64)

    def emit_size(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the size of an axis, int64 [1]."""
        return self.emit("Shape", [value], {"start": axis, "end": axis + 1}, ir.DataType.INT64, [1])

    def emit_shape(self, sizes: Sequence[int | ir.Value]) -> ir.Value:
        """Return a shape of static sizes and values [1]."""
        parts = [self.emit_integers(size) if isinstance(size, int) else size for size in sizes]
        return self.emit("Concat", parts, {"axis": 0}, ir.DataType.INT64, [len(parts)])

    def emit_slices(self, value: ir.Value, widths: Sequence[int]) -> list[ir.Value]:
        """Return successive slices of these widths along the last axis."""
        leading, slices, start = dims(value)[:-1], [], 0
        for width in widths:
            bounds = [self.emit_integers(bound) for bound in (start, start + width, -1)]
            slices.append(self.emit("Slice", [value, *bounds], shape=[*leading, width]))
            start += width
        return slices

    def emit_cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in that type; the value itself if it already has it."""
        if value.dtype == dtype:
            return value
        return self.emit("Cast", [value], {"to": int(dtype)}, dtype, dims(value))

    def emit_transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        if list(perm) == list(range(len(perm))):
            return value
        shape = dims(value)
        return self.emit("Transpose", [value], {"perm": list(perm)}, shape=[shape[axis] for axis in perm])

    def insert(self) -> None:
        """Insert the new nodes before the anchor, which reads them."""
        graph = self.anchor.graph
        assert isinstance(graph, ir.Graph)
        graph.insert_before(self.anchor, self.nodes)

    def replace(self, nodes: Collection[ir.Node], old: ir.Value, new: ir.Value) -> None:
        """Replace `old` by `new`, under its name, and remove matched nodes that nothing reads any more."""
        inherit_names(self.nodes, nodes)
        self.insert()
        new.shape = old.shape
        replace_value(old, new)
        remove_unused(nodes)

    def replace_anchor(self, outputs: Sequence[ir.Value]) -> None:
        """Replace the outputs of the anchor by these, under their names, and remove it."""
        inherit_names(self.nodes, [self.anchor])
        self.insert()
        for old, new in zip(self.anchor.outputs, outputs):
            replace_value(old, new)
        remove_unused([self.anchor])

    def replace_input(self, position: int, value: ir.Value | None) -> None:
        """Let the anchor read the value as that input."""
        self.insert()
        if position >= len(self.anchor.inputs):
            self.anchor.resize_inputs(position + 1)
        self.anchor.replace_input_with(position, value)


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return a new initializer, whose name is extended until it is unused."""
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace a value by another one, which takes its name."""
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None


def remove_unused(nodes: Iterable[ir.Node]) -> None:
    """Remove those of the nodes whose outputs are not read, the last first."""
    remaining = [node for node in dict.fromkeys(nodes) if node.graph is not None]
    while remaining:
        unused = [n for n in remaining if not any(o.uses() or o.is_graph_output() for o in n.outputs)]
        if not unused:
            return
        for node in unused:
            assert node.graph is not None
            node.graph.remove(node, safe=True)
        remaining = [node for node in remaining if node not in unused]
