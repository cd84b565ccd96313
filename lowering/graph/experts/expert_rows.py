"""The rows of a mixture of experts, sorted by expert, and the subgraphs of its experts merged into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ..loading.legality import OWN_DOMAIN
from ..rewriting.matching import Rewrite, attribute, dims, is_op, operand, read_integers
from ..rewriting.sources import set_sources

Values = tuple[ir.Value, ...]  # a value of each expert, at the same position of its subgraph


class SortedRows:
    """Emitter of nodes over rows that are sorted by their expert.

    Args:
        new: The rewrite to which nodes are added.
        chosen: The experts of the rows, as many integers as there are rows.
        experts: The number of experts.
    """

    def __init__(self, new: Rewrite, chosen: ir.Value, experts: int) -> None:
        self.new, self.experts = new, experts
        flat = new.emit("Reshape", [new.emit_cast(chosen, ir.DataType.INT64), new.emit_integers(-1)])
        sort = self._emit_own("SortByExpert", [flat], {"experts": experts}, 3)
        self.expert_of_row, self.order, self.position_of_row = sort

    def sort(self, rows: ir.Value) -> ir.Value:
        """Return rows [R, ...] in the order of their experts."""
        return self.new.emit("Gather", [rows, self.order], {"axis": 0})

    def restore(self, rows: ir.Value) -> ir.Value:
        """Return sorted rows in their original order."""
        return self.new.emit("Gather", [rows, self.position_of_row], {"axis": 0})

    def gather_by_expert(self, table: ir.Value) -> ir.Value:
        """Return for each row the element of the table [experts, ...] for its expert."""
        return self.new.emit("Gather", [table, self.expert_of_row], {"axis": 0})

    def matmul(
        self, rows: ir.Value, matrices: Sequence[ir.Value | None], bias: ir.Value | None, attributes: dict[str, int]
    ) -> ir.Value:
        """Return rows times the matrix of their expert, plus its bias.

        matrices are the weights, scales and zero points of GroupedMatMul (ops/experts/grouped_matmul.py).
        """
        y = self._emit_own("GroupedMatMul", [rows, self.expert_of_row, *matrices], attributes, 1)[0]
        return y if bias is None else self.new.emit("Add", [y, self.gather_by_expert(bias)])

    def _emit_own(
        self, operator: str, inputs: Sequence[ir.Value | None], attributes: dict[str, int], outputs: int
    ) -> Sequence[ir.Value]:
        dtype = inputs[0].dtype if inputs[0] is not None else None
        return self.new.emit_node(operator, inputs, attributes, [dtype] * outputs, domain=OWN_DOMAIN)


class ExpertRows(SortedRows):
    """Emitter of nodes over sorted rows [R, ...], with `per_token` rows for each token.

    Args:
        new: The rewrite to which nodes are added.
        chosen: Int [..., per_token], the experts of each token.
        per_token: The number of experts that a token chooses.
        experts: The number of experts.
    """

    def __init__(self, new: Rewrite, chosen: ir.Value, per_token: int, experts: int) -> None:
        super().__init__(new, chosen, experts)
        self.per_token, self.tokens = per_token, dims(chosen)[:-1]
        self._merged: dict[Values, ir.Value] = {}
        self.token_of_row = new.emit("Div", [self.order, new.emit_integers(per_token)])

    def merge(self, values: Values) -> ir.Value | None:
        """Return the rows of these values, where each row is that of its own expert.

        None if they differ in more than constants, or are not computed for each token by itself.
        """
        if values not in self._merged:
            rows = self._merge(values)
            if rows is None:
                return None
            self._merged[values] = rows
        return self._merged[values]

    def gather_rows(self, tokens: ir.Value, width: int) -> ir.Value:
        """Return the rows of a tensor [..., width] of tokens."""
        flat = self.new.emit("Reshape", [tokens, self.new.emit_integers(-1, width)])
        return self.new.emit("Gather", [flat, self.token_of_row], {"axis": 0})

    def sum_per_token(self, rows: ir.Value, weights: ir.Value, like: ir.Value) -> ir.Value:
        """Return the sum of each token's rows times its weights [..., per_token], in the shape of `like`."""
        new, width = self.new, dims(like)[-1]
        assert isinstance(width, int)
        factors = new.emit("Reshape", [weights, new.emit_integers(-1, self.per_token)])
        (total,) = self._emit_own("CombineExperts", [rows, self.position_of_row, factors], {}, 1)
        leading = new.emit("Shape", [weights], {"start": 0, "end": -1}, ir.DataType.INT64)
        shape = new.emit("Concat", [leading, new.emit_integers(width)], {"axis": 0})
        return new.emit("Reshape", [total, shape], shape=dims(like))

    def _merge(self, values: Values) -> ir.Value | None:
        if len(set(values)) == 1:
            return self._emit_shared(values[0])
        arrays = [read_constant(value) for value in values]
        if all(array is not None for array in arrays):
            return self._emit_by_expert(arrays)
        nodes = [value.producer() for value in values]
        first = nodes[0]
        if first is None or any(node is None or not _are_alike(first, node) for node in nodes):
            return None
        output = list(first.outputs).index(values[0])
        if any(list(node.outputs).index(value) != output for node, value in zip(nodes, values) if node is not None):
            return None
        return self._merge_nodes([node for node in nodes if node is not None], output)

    def _merge_nodes(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        first = nodes[0]
        own_domain = _MICROSOFT if first.op_type == "MatMulNBits" else ""
        rule = _RULES.get(first.op_type) if (first.domain or "").removeprefix("ai.onnx") == own_domain else None
        if rule is not None:
            return rule(self, nodes, output)
        if len(first.outputs) != 1 or not (is_op(first, *_ELEMENTWISE) or _is_activation(first)):
            return None
        inputs = self._merge_operands(nodes)
        return None if inputs is None else self._emit_like(first, inputs)[0]

    def _merge_operands(self, nodes: list[ir.Node]) -> list[ir.Value | None] | None:
        """Return the rows of all inputs."""
        inputs: list[ir.Value | None] = []
        for operands in zip(*(node.inputs for node in nodes)):
            rows = None if all(value is None for value in operands) else self.merge(operands)
            if rows is None and any(value is not None for value in operands):
                return None
            inputs.append(rows)
        return inputs

    def _emit_shared(self, value: ir.Value) -> ir.Value | None:
        """Return the rows of a value that all experts read: of tokens, or a constant that fits any row."""
        sizes = dims(value)
        if read_constant(value) is not None:
            return value if len(sizes) < 2 else None
        if sizes[:-1] != self.tokens or not isinstance(sizes[-1], int):
            return None
        return self.gather_rows(value, sizes[-1])

    def _emit_by_expert(self, arrays: Sequence[np.ndarray | None]) -> ir.Value | None:
        """Return for each row the vector of its expert."""
        vectors = [a.reshape(a.shape[-1:]) for a in arrays if a is not None and a.size == (a.shape or (1,))[-1]]
        if len(vectors) < len(arrays) or len({a.shape for a in vectors}) > 1:
            return None
        return self.gather_by_expert(self._stack([a.reshape(-1) for a in vectors]))

    def _stack(self, arrays: Sequence[np.ndarray]) -> ir.Value:
        stacked = np.stack(arrays)
        return self.new.emit_constant(stacked, ir.DataType.from_numpy(stacked.dtype))

    def merge_matmuls(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return rows times the matrix of their expert."""
        stacked, rows = self._stack_inputs(nodes, 1, rank=2), self._merge_first_inputs(nodes)
        if rows is None or stacked is None or operand(nodes[0], 0).dtype not in _MULTIPLIED:
            return None
        return self.matmul(rows, [stacked], None, {})

    def merge_gemms(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return rows times the matrix of their expert, plus its bias."""
        first, bias = nodes[0], None
        stacked, rows = self._stack_inputs(nodes, 1, rank=2), self._merge_first_inputs(nodes)
        if rows is None or stacked is None or operand(first, 0).dtype not in _MULTIPLIED:
            return None
        is_scaled = attribute(first, "alpha", 1.0) != 1 or attribute(first, "beta", 1.0) != 1
        if is_scaled or attribute(first, "transA", 0):
            return None
        if len(first.inputs) > 2 and first.inputs[2] is not None:
            bias = self._stack_inputs(nodes, 2, rank=1)
            if bias is None or dims(bias)[1:] != dims(first.outputs[0])[1:]:
                return None
        return self.matmul(rows, [stacked], bias, {"transB": attribute(first, "transB", 0)})

    def merge_matmuls_n_bits(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return rows times the quantized matrix of their expert, plus its bias."""
        rows = self._merge_first_inputs(nodes)
        names = dict(enumerate(("B", "scales", "zero_points", "g_idx", "bias"), 1))
        stacks: dict[str, ir.Value | None] = {}
        for k, name in names.items():
            inputs = [node.inputs[k] if len(node.inputs) > k else None for node in nodes]
            arrays = [read_constant(value) for value in inputs if value is not None]
            if any(a is None for a in arrays) or len(arrays) not in (0, len(nodes)):
                return None
            if arrays and (name == "g_idx" or len({a.shape for a in arrays if a is not None}) > 1):
                return None
            stacks[name] = stacked = self._stack([a for a in arrays if a is not None]) if arrays else None
            if stacked is not None:
                set_sources(stacked, [value for value in inputs if value is not None])
        if rows is None:
            return None
        matrices = [stacks["B"], stacks["scales"], stacks["zero_points"]]
        attributes = {name: attribute(nodes[0], name, default) for name, default in _PACKED}
        return self.matmul(rows, matrices, stacks["bias"], attributes)

    def merge_with_scalars(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return rows whose elements are limited or scaled by numbers that all experts share."""
        first, rows = nodes[0], self._merge_first_inputs(nodes)
        positions = range(1, len(first.inputs))
        shared = [read_constant(first.inputs[k]) for k in positions]
        if (
            rows is None
            or not _have_same_constants(nodes, positions)
            or any(a is not None and a.ndim > 0 for a in shared)
        ):
            return None
        return self._emit_like(first, [rows, *first.inputs[1:]])[0]

    def _merge_first_inputs(self, nodes: list[ir.Node]) -> ir.Value | None:
        return self.merge(tuple(operand(node, 0) for node in nodes))

    def _stack_inputs(self, nodes: list[ir.Node], position: int, rank: int) -> ir.Value | None:
        """Return the constants of all nodes as one, if they have one shape, of that rank."""
        arrays = [a for node in nodes if (a := read_constant(node.inputs[position])) is not None]
        if len(arrays) < len(nodes) or {a.ndim for a in arrays} != {rank} or len({a.shape for a in arrays}) > 1:
            return None
        stacked = self._stack(arrays)
        set_sources(stacked, [operand(node, position) for node in nodes])
        return stacked

    def merge_splits(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return a slice of each row, of sizes that all experts share."""
        first, rank = nodes[0], len(self.tokens) + 1
        rows = self._merge_first_inputs(nodes)
        if (
            rows is None
            or attribute(first, "axis", 0) % rank != rank - 1
            or not _have_same_constants(nodes, range(1, 2))
        ):
            return None
        key = tuple(node.outputs[output] for node in nodes)
        for k, value in enumerate(self._emit_like(first, [rows, *first.inputs[1:]], {"axis": -1})):
            self._merged[tuple(node.outputs[k] for node in nodes)] = value
        return self._merged[key]

    def merge_slices(self, nodes: list[ir.Node], output: int) -> ir.Value | None:
        """Return some columns of each row."""
        first, rank = nodes[0], len(self.tokens) + 1
        rows = self._merge_first_inputs(nodes)
        axes = read_integers(first, 3, "axes") if len(first.inputs) > 3 else None
        if rows is None or axes is None or [axis % rank for axis in axes] != [rank - 1]:
            return None
        if not all(_same_constants(nodes, k) for k in range(1, len(first.inputs))):
            return None
        return self._emit_like(first, [rows, *first.inputs[1:3], self.new.emit_integers(-1), *first.inputs[4:]])[0]

    def _emit_like(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], changes: dict[str, int] | None = None
    ) -> Sequence[ir.Value]:
        """Return the outputs of a node that computes for rows what `node` computes for tokens."""
        attributes = {name: stored.value for name, stored in node.attributes.items()} | (changes or {})
        dtypes = [node.outputs[0].dtype] * len(node.outputs)
        return self.new.emit_node(node.op_type, inputs, attributes, dtypes, domain=node.domain)


_MICROSOFT = "com.microsoft"
_MULTIPLIED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ELEMENTWISE = (  # operators on inputs that broadcast
    "Abs", "Add", "Cast", "CastLike", "Ceil", "Cos", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "Where",
)  # fmt: skip
_PACKED = (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))
_RULES: dict[str, Callable[[ExpertRows, list[ir.Node], int], ir.Value | None]] = {
    "MatMul": ExpertRows.merge_matmuls,
    "Gemm": ExpertRows.merge_gemms,
    **dict.fromkeys(("Clip", "QuantizeLinear", "DequantizeLinear"), ExpertRows.merge_with_scalars),
    "MatMulNBits": ExpertRows.merge_matmuls_n_bits,
    "Split": ExpertRows.merge_splits,
    "Slice": ExpertRows.merge_slices,
}


def read_constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the elements of an initializer or a Constant, also if it is transposed."""
    if value is None:
        return None
    if value.const_value is not None and not value.is_graph_input():
        return value.const_value.numpy()
    node = value.producer()
    if not is_op(node, "Transpose"):
        return None
    assert node is not None
    elements = read_constant(operand(node, 0))
    return None if elements is None else elements.transpose(attribute(node, "perm", None))


def _is_activation(node: ir.Node) -> bool:
    """Return whether the node is an activation of com.microsoft without a bias."""
    return node.domain == _MICROSOFT and node.op_type in ("Gelu", "QuickGelu", "FastGelu") and len(node.inputs) == 1


def _have_same_constants(nodes: list[ir.Node], inputs: range) -> bool:
    return all(_same_constants(nodes, k) for k in inputs if len(nodes[0].inputs) > k)


def _same_constants(nodes: list[ir.Node], k: int) -> bool:
    """Return whether an input is the same constant in all nodes, or absent."""
    arrays = [read_constant(node.inputs[k]) for node in nodes]
    first = arrays[0]
    if first is None:
        return all(node.inputs[k] is None for node in nodes)
    return all(a is not None and np.array_equal(a, first) for a in arrays)


def _are_alike(first: ir.Node, second: ir.Node | None) -> bool:
    """Return whether two nodes are of one operator with the same attributes."""
    if second is None or first.op_identifier() != second.op_identifier():
        return False
    if len(first.inputs) != len(second.inputs) or first.attributes.keys() != second.attributes.keys():
        return False
    kinds = (ir.AttributeType.TENSOR, ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    attribute_pairs = (
        (attribute_of_first, second.attributes[name]) for name, attribute_of_first in first.attributes.items()
    )
    return all(
        attribute_of_first.type not in kinds and attribute_of_first.value == attribute_of_second.value
        for attribute_of_first, attribute_of_second in attribute_pairs
    )
