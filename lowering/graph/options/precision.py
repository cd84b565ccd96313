"""Conversion of matmuls to half precision, on request.

Matmuls (MatMul, Gemm, Conv, Attention, Einsum) take operands in float16 or bfloat16, and their weights are stored in
that type. Elementwise operators and moves of their results stay in that type if a later node reads them in it. So do
the norms, which read and write it and compute in float32, as ONNX specifies (stash_type). Everything else, such as
softmax and other exponentials, sums, positions and angles, stays float32, with Casts in between, which are fused into
the kernels around them. Accumulators of matmuls are float32 in any case.

Inputs and outputs keep their types, except for caches: a decoder whose present keys are its next past keys stores them
in half precision.

"fast" is bfloat16 if all targets multiply it, also for models of float16, and has no effect otherwise. Caches keep
their types then, and so does an attention that reads one: it is bound by memory bandwidth, and a copy would add reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from ... import scratch
from ...choices import Precision
from ...chunks import map_columns
from ..caches.cache_forms import is_growing_cache
from ..loading.legality import iterate_bodies
from ..rewriting.attention_node import MASK, PAST_KEY, PAST_VALUE, is_attention
from ..rewriting.matching import add_initializer, is_op
from ..rewriting.opset import opset
from ..rewriting.sizes import InferSizesPass
from ..rewriting.sources import set_sources

TYPES: dict[str, ir.DataType] = {
    "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "fast": ir.DataType.BFLOAT16,
}  # fmt: skip

_SOURCE_TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}

_MATMULS = {"MatMul", "Gemm", "Conv", "Attention", "Einsum"}

# Mixtures of experts of com.microsoft are matmuls. These inputs keep their types: logits, and the scales of quantized
# matrices.
_MIXTURES = {"MoE": (1,), "QMoE": (1, 3, 6, 9, 14)}

_FOLLOW = {
    "Abs", "Add", "AveragePool", "Clip", "Concat", "Div", "Dropout", "Elu", "Expand", "Flatten", "Gather", "Gelu",
    "GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "LayerNormalization", "LeakyRelu", "Max", "MaxPool",
    "Min", "Mul", "Neg", "Pad", "RMSNormalization", "Relu", "Reshape", "RotaryEmbedding", "Sigmoid", "Slice", "Split",
    "Squeeze", "Sub", "Swish", "Tanh", "TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip

# The inputs that decide the type of a node in _FOLLOW. For other nodes all inputs that are not constants decide.
_DECIDING_INPUTS = {"Gather": (0,), "Where": (1, 2), "TensorScatter": (0, 1), "RotaryEmbedding": (0,)}

# Operators between a cache and the attention that reads it.
_CACHE_MOVES = {
    "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "TensorScatter", "Transpose", "Unsqueeze",
}  # fmt: skip

# Operators that take numbers of any type, or read none.
_ANY_TYPE = {"Cast", "Shape", "Size"}

_MIN_TABLE_ELEMENTS = 1 << 14  # minimum elements of a table to store it in half precision


def use_precision(
    model: ir.Model, precision: Precision, slower: Collection[str] = (), beyond: Collection[ir.Value] = ()
) -> str:
    """Rewrite a model that `fuse` has processed for one of TYPES; return a description for the user.

    slower are the types that the targets multiply at a lower rate than bfloat16: "fast" replaces them. beyond are
    values that the type cannot represent: nodes that read or compute one are not narrowed.
    """
    if precision == "fast" and not slower:
        return "precision: fast changes nothing for a target that has no matmuls of bfloat16"
    InferSizesPass()(model)
    replaced = slower if precision == "fast" else ("float32",)
    sources = {_SOURCE_TYPES[name] for name in replaced}
    return _PrecisionConverter(model, TYPES[precision], sources, precision == "fast", set(beyond)).convert()


class _PrecisionConverter:
    """The conversion of one model, with the values converted so far."""

    def __init__(
        self,
        model: ir.Model,
        dtype: ir.DataType,
        sources: set[ir.DataType],
        keeps_caches: bool,
        beyond: set[ir.Value],
    ) -> None:
        self.beyond = beyond
        self.model, self.graph, self.dtype, self.sources = model, model.graph, dtype, sources
        self.keeps_caches = keeps_caches
        self.opset = opset(model)
        self.narrow: dict[ir.Value, ir.DataType] = {}  # values whose type is now dtype, with their original types
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.clipped_count = self.out_of_range_count = 0
        self.weights: dict[ir.Value, ir.Value] = {}

    def convert(self) -> str:
        nodes = list(self.graph)
        caches = {} if self.keeps_caches else self.find_caches(nodes)
        self.wide = self.find_cache_readers(nodes) if self.keeps_caches else set()
        self.read_wide = self.find_wide_results(nodes, set(caches.values()))
        for past in caches:
            self.narrow_value(past)
        unchanged_count = matmul_count = 0
        for node in nodes:
            floats = [value for value in node.outputs if value.dtype in self.sources]
            if self.is_narrow(node):
                matmul_count += _is_matmul(node)
                for position, value in self.iterate_float_inputs(node):
                    node.replace_input_with(position, self.convert_value(value, self.dtype, node))
                for value in floats:
                    self.narrow_value(value)
                continue
            unchanged_count += bool(floats)
            for position, read in enumerate(node.inputs):
                if read is not None and read in self.narrow and node.op_type not in _ANY_TYPE:
                    node.replace_input_with(position, self.convert_value(read, self.narrow[read], node))
            self.widen_subgraphs(node)
        self.restore_output_types(set(caches.values()))
        for value in self.weights:
            if not value.uses() and value.name is not None and not value.is_graph_output():
                self.graph.initializers.pop(value.name)
        name = self.dtype.name.lower()
        note = (
            f"precision: {matmul_count} matmuls are computed in {name}, {unchanged_count} other nodes keep their type"
        )
        if self.out_of_range_count:
            note += f"; {self.out_of_range_count} of these for numbers that {name} cannot hold"
        if self.clipped_count:
            note += f"; {self.clipped_count} constants beyond its range became its largest numbers"
        return note

    def narrow_value(self, value: ir.Value) -> None:
        assert value.dtype is not None
        self.narrow[value] = value.dtype
        value.type = ir.TensorType(self.dtype)  # a new one: copies of a model share their types

    def find_caches(self, nodes: list[ir.Node]) -> dict[ir.Value, ir.Value]:
        """Return inputs with past keys and values, and the outputs that they become."""
        output_by_input: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            pairs: list[tuple[int, int]] = []
            if is_growing_cache(node) or is_op(node, "TensorScatter"):
                pairs = [(0, 0)]
            elif is_attention(node):
                pairs = [(PAST_KEY, 1), (PAST_VALUE, 2)]
            for past, present in pairs:
                if past < len(node.inputs) and present < len(node.outputs):
                    value, output = node.inputs[past], node.outputs[present]
                    if value is not None and self.is_input(value) and output.is_graph_output():
                        output_by_input[value] = output
        return output_by_input

    def find_wide_results(self, nodes: list[ir.Node], caches: set[ir.Value]) -> set[ir.Node]:
        """Return nodes whose results no node reads in half precision: scores before a softmax, or outputs."""
        nodes_read_wide: set[ir.Node] = set()
        for node in reversed(nodes):
            readers = [reader for output in node.outputs for reader, _ in output.uses()]
            is_read_narrow = any(
                reader.op_type in _MATMULS | _FOLLOW and reader not in nodes_read_wide for reader in readers
            )
            if node.op_type in _FOLLOW and not is_read_narrow and not caches & set(node.outputs):
                nodes_read_wide.add(node)
        return nodes_read_wide

    def is_input(self, value: ir.Value) -> bool:
        return value.is_graph_input() and value.dtype in self.sources and value.name not in self.graph.initializers

    def find_cache_readers(self, nodes: list[ir.Node]) -> set[ir.Node]:
        """Return attentions that read keys or values of an earlier call, and the nodes between."""
        from_caches: dict[ir.Value, bool] = {}
        cache_readers: set[ir.Node] = set()
        for node in nodes:
            inputs = [value for value in node.inputs if value is not None and value.dtype in self.sources]
            cached = [value for value in inputs if self.is_input(value) or from_caches.get(value, False)]
            if is_attention(node):
                cached = [value for value in cached if value not in node.inputs[:1]]
            elif node.op_type not in _CACHE_MOVES:
                cached = []
            from_caches.update(dict.fromkeys(node.outputs, bool(cached)))
            if cached:
                cache_readers.add(node)
        return cache_readers

    def is_narrow(self, node: ir.Node) -> bool:
        """Return whether the node is to read and write half precision."""
        if not (is_op(node, *_MATMULS, *_FOLLOW) or is_attention(node) or _is_mixture(node)):
            return False
        if not any(True for _ in self.iterate_float_inputs(node)) or not self.is_legal(node) or node in self.wide:
            return False
        if not _is_matmul(node) and node in self.read_wide:
            return False
        if self.is_beyond(node):
            self.out_of_range_count += 1
            return False
        if _is_matmul(node):
            return True
        positions = _DECIDING_INPUTS.get(node.op_type)
        deciding = [v for k, v in enumerate(node.inputs) if v is not None and (positions is None or k in positions)]
        if any(value in self.narrow for value in deciding):
            return True
        # A table of embeddings, most of whose elements are not read.
        return (
            node.op_type == "Gather"
            and self.is_constant(deciding[0])
            and self.count_elements(deciding[0]) >= _MIN_TABLE_ELEMENTS
        )

    def is_beyond(self, node: ir.Node) -> bool:
        """Return whether the node reads or computes numbers that the type cannot represent.

        A mask may hide keys by any large number.
        """
        inputs = [value for k, value in enumerate(node.inputs) if not (is_attention(node) and k == MASK)]
        return any(value in self.beyond for value in (*inputs, *node.outputs) if value is not None)

    def is_legal(self, node: ir.Node) -> bool:
        """Return whether the operator is defined for the type at the model's opset."""
        schema = onnx.defs.get_schema(node.op_type, self.opset, "" if is_op(node, node.op_type) else node.domain)
        type_name = f"tensor({self.dtype.name.lower()})"
        types = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        floats = [k for k, _ in self.iterate_float_inputs(node)]
        formal = [schema.inputs[min(k, len(schema.inputs) - 1)].type_str for k in floats]
        return all(type_name in types.get(name, [name]) for name in formal)

    def iterate_float_inputs(self, node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
        """Yield inputs of a type that is replaced, or was."""
        wide = _MIXTURES[node.op_type] if _is_mixture(node) else ()
        for position, value in enumerate(node.inputs):
            if value is not None and position not in wide and (value.dtype in self.sources or value in self.narrow):
                yield position, value

    def is_constant(self, value: ir.Value) -> bool:
        return value.is_initializer() and not value.is_graph_input()

    def count_elements(self, value: ir.Value) -> int:
        return 0 if value.const_value is None else value.const_value.size

    def convert_value(self, value: ir.Value, dtype: ir.DataType, reader: ir.Node) -> ir.Value:
        """Return the value in that type, converted before its reader if necessary."""
        if value.dtype == dtype:
            return value
        if self.is_constant(value) and value.const_value is not None:
            if value not in self.weights:
                self.weights[value] = self.convert_weight(value)
            return self.weights[value]
        if (value, dtype) not in self.casts:
            node = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{value.name}/{dtype.name.lower()}")
            output = node.outputs[0]
            output.type, output.shape = ir.TensorType(dtype), value.shape
            self.graph.insert_before(reader, node)
            self.casts[value, dtype] = output
        return self.casts[value, dtype]

    def convert_weight(self, value: ir.Value) -> ir.Value:
        """Return a constant in half precision.

        Numbers beyond the range become the largest ones: masks hide keys by numbers beyond float16's range, and its
        lowest number hides them too.
        """
        assert value.const_value is not None
        elements = value.const_value.numpy()
        flat, limit = elements.reshape(-1), np.float32(ml_dtypes.finfo(self.dtype.numpy()).max)
        narrow = scratch.empty(elements.shape, self.dtype.numpy())

        def round_elements(chunk: slice) -> bool:
            array = flat[chunk].astype(np.float32)
            is_out_of_range = np.isfinite(array) & (np.abs(array) > limit)
            narrow.reshape(-1)[chunk] = np.where(is_out_of_range, np.copysign(limit, array), array)
            return bool(is_out_of_range.any())

        self.clipped_count += any(map_columns(round_elements, 1, flat.size))
        result = add_initializer(self.graph, f"{value.name}/{self.dtype.name.lower()}", narrow)
        set_sources(result, [value])
        return result

    def widen_subgraphs(self, node: ir.Node) -> None:
        """Convert values that the node's branches and bodies read from outside to their original types."""
        for graph in iterate_bodies(node):
            for nested in ir.traversal.RecursiveGraphIterator(graph):
                for position, value in enumerate(nested.inputs):
                    if value is not None and value in self.narrow:
                        nested.replace_input_with(position, self.convert_value(value, self.narrow[value], node))
            for position, output in enumerate(graph.outputs):
                if output in self.narrow:
                    graph.outputs[position] = self.convert_value(output, self.narrow[output], node)

    def restore_output_types(self, caches: set[ir.Value]) -> None:
        """Convert outputs except caches to the model's types, under their names."""
        for position, value in enumerate(self.graph.outputs):
            if value not in self.narrow or value in caches:
                continue
            original_type = self.narrow[value]
            node = ir.node(
                "Cast", [value], {"to": int(original_type)}, name=f"{value.name}/{original_type.name.lower()}"
            )
            output = node.outputs[0]
            output.type, output.shape, output.name = ir.TensorType(original_type), value.shape, value.name
            value.name = f"{value.name}/{self.dtype.name.lower()}"
            self.graph.append(node)
            self.graph.outputs[position] = output


def _is_mixture(node: ir.Node) -> bool:
    """Return whether the node is a mixture of experts of com.microsoft."""
    return node.domain == "com.microsoft" and node.op_type in _MIXTURES


def _is_matmul(node: ir.Node) -> bool:
    return node.op_type in _MATMULS or _is_mixture(node)
