"""Models whose matmuls are computed in half precision, on request.

Matmuls (MatMul, Gemm, Conv, Attention, Einsum) take operands in float16 or bfloat16, and their weights are stored
so. What is made of their results element by element, or moves them, goes on in that type where somebody reads it so,
as do the norms, which read and write it and compute in float32, as ONNX has it (stash_type). Everything else, such as
softmax and other exponentials, sums, positions and angles, stays float32, with Casts in between, which become part of
the kernels around them. Sums of matmuls are float32 in any case.

Inputs and outputs keep their types, except for caches: a decoder that gets its past keys back as its present ones keeps
them in half precision.

"fast" is bfloat16 where all targets multiply it, for models of float16 too, and nothing anywhere else. Caches keep
their types then, and so does an attention that reads one: it waits for memory, of which a copy would read more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from ..choices import Precision
from ..fusion.attention_node import MASK, PAST_KEY, PAST_VALUE, is_attention
from ..fusion.matching import is_op
from ..fusion.opset import opset
from ..fusion.sizes import InferSizesPass
from .cache_forms import grows

TYPES: dict[str, ir.DataType] = {
    "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "fast": ir.DataType.BFLOAT16,
}  # fmt: skip

_REPLACED = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}

_MATMULS = {"MatMul", "Gemm", "Conv", "Attention", "Einsum"}

# Mixtures of experts of com.microsoft are matmuls, but for the inputs that stay as they are: logits, and the scales of
# quantized matrices.
_MIXTURES = {"MoE": (1,), "QMoE": (1, 3, 6, 9, 14)}

_FOLLOW = {
    "Abs", "Add", "AveragePool", "Clip", "Concat", "Div", "Dropout", "Elu", "Expand", "Flatten", "Gather", "Gelu",
    "GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "LayerNormalization", "LeakyRelu", "Max", "MaxPool",
    "Min", "Mul", "Neg", "Pad", "RMSNormalization", "Relu", "Reshape", "RotaryEmbedding", "Sigmoid", "Slice", "Split",
    "Squeeze", "Sub", "Swish", "Tanh", "TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip

# Of nodes that follow: which inputs decide. Of the others all that are no constants do.
_DATA = {"Gather": (0,), "Where": (1, 2), "TensorScatter": (0, 1), "RotaryEmbedding": (0,)}

# What may lie between a cache and the attention that reads it.
_KEPT = {"Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "TensorScatter", "Transpose", "Unsqueeze"}

# What takes numbers of any type, or reads none.
_ANY_TYPE = {"Cast", "Shape", "Size"}

_LARGE = 1 << 14  # elements from which on a table is worth being stored in half precision


def use_precision(
    model: ir.Model, precision: Precision, slower: Collection[str] = (), beyond: Collection[ir.Value] = ()
) -> str:
    """Rewrites a model that `fuse` has been through for one of TYPES; says what was done, for the reader.

    slower are the types of which the targets multiply fewer numbers in the time than of bfloat16: what "fast" replaces.
    beyond are values that the type cannot hold: nodes that read or make one are not narrowed.
    """
    if precision == "fast" and not slower:
        return "precision: fast changes nothing for a target that has no matmuls of bfloat16"
    InferSizesPass()(model)
    replaced = slower if precision == "fast" else ("float32",)
    sources = {_REPLACED[name] for name in replaced}
    return _Converter(model, TYPES[precision], sources, precision == "fast", set(beyond)).convert()


class _Converter:
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
        self.narrow: dict[ir.Value, ir.DataType] = {}  # values whose type is now dtype, and what it was
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.clipped = self.held_wide = 0
        self.weights: dict[ir.Value, ir.Value] = {}

    def convert(self) -> str:
        nodes = list(self.graph)
        caches = {} if self.keeps_caches else self.caches(nodes)
        self.wide = self.around_caches(nodes) if self.keeps_caches else set()
        self.read_wide = self.only_read_wide(nodes, set(caches.values()))
        for past in caches:
            self.make_narrow(past)
        kept = matmuls = 0
        for node in nodes:
            floats = [value for value in node.outputs if value.dtype in self.sources]
            if self.is_narrow(node):
                matmuls += _is_matmul(node)
                for place, value in self.float_inputs(node):
                    node.replace_input_with(place, self.as_type(value, self.dtype, node))
                for value in floats:
                    self.make_narrow(value)
                continue
            kept += bool(floats)
            for place, given in enumerate(node.inputs):
                if given is not None and given in self.narrow and node.op_type not in _ANY_TYPE:
                    node.replace_input_with(place, self.as_type(given, self.narrow[given], node))
            self.widen_subgraphs(node)
        self.give_out(set(caches.values()))
        for value in self.weights:
            if not value.uses() and value.name is not None and not value.is_graph_output():
                self.graph.initializers.pop(value.name)
        name = self.dtype.name.lower()
        note = f"precision: {matmuls} matmuls are computed in {name}, {kept} other nodes keep their type"
        if self.held_wide:
            note += f"; {self.held_wide} of these for numbers that {name} cannot hold"
        if self.clipped:
            note += f"; {self.clipped} constants beyond its range became its largest numbers"
        return note

    def make_narrow(self, value: ir.Value) -> None:
        assert value.dtype is not None
        self.narrow[value] = value.dtype
        value.type = ir.TensorType(self.dtype)  # a new one: copies of a model share their types

    def caches(self, nodes: list[ir.Node]) -> dict[ir.Value, ir.Value]:
        """Inputs that hold past keys and values, and the outputs that they become."""
        found: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            pairs: list[tuple[int, int]] = []
            if grows(node) or is_op(node, "TensorScatter"):
                pairs = [(0, 0)]
            elif is_attention(node):
                pairs = [(PAST_KEY, 1), (PAST_VALUE, 2)]
            for past, present in pairs:
                if past < len(node.inputs) and present < len(node.outputs):
                    value, output = node.inputs[past], node.outputs[present]
                    if value is not None and self.is_input(value) and output.is_graph_output():
                        found[value] = output
        return found

    def only_read_wide(self, nodes: list[ir.Node], caches: set[ir.Value]) -> set[ir.Node]:
        """Nodes whose results nobody wants in half precision: scores before a softmax, or what is given out."""
        found: set[ir.Node] = set()
        for node in reversed(nodes):
            readers = [reader for output in node.outputs for reader, _ in output.uses()]
            wanted = any(reader.op_type in _MATMULS | _FOLLOW and reader not in found for reader in readers)
            if node.op_type in _FOLLOW and not wanted and not caches & set(node.outputs):
                found.add(node)
        return found

    def is_input(self, value: ir.Value) -> bool:
        return value.is_graph_input() and value.dtype in self.sources and value.name not in self.graph.initializers

    def around_caches(self, nodes: list[ir.Node]) -> set[ir.Node]:
        """Attentions that read keys or values of an earlier call, and what leads from those to them."""
        from_caches: dict[ir.Value, bool] = {}
        found: set[ir.Node] = set()
        for node in nodes:
            given = [value for value in node.inputs if value is not None and value.dtype in self.sources]
            kept = [value for value in given if self.is_input(value) or from_caches.get(value, False)]
            if is_attention(node):
                kept = [value for value in kept if value not in node.inputs[:1]]
            elif node.op_type not in _KEPT:
                kept = []
            from_caches.update(dict.fromkeys(node.outputs, bool(kept)))
            if kept:
                found.add(node)
        return found

    def is_narrow(self, node: ir.Node) -> bool:
        """Whether the node is to read and write half precision."""
        if not (is_op(node, *_MATMULS, *_FOLLOW) or is_attention(node) or _is_mixture(node)):
            return False
        if not any(True for _ in self.float_inputs(node)) or not self.is_legal(node) or node in self.wide:
            return False
        if not _is_matmul(node) and node in self.read_wide:
            return False
        if self.is_beyond(node):
            self.held_wide += 1
            return False
        if _is_matmul(node):
            return True
        places = _DATA.get(node.op_type)
        deciding = [v for k, v in enumerate(node.inputs) if v is not None and (places is None or k in places)]
        if any(value in self.narrow for value in deciding):
            return True
        # A table of embeddings, most of whose elements nobody reads.
        return node.op_type == "Gather" and self.is_constant(deciding[0]) and self.size(deciding[0]) >= _LARGE

    def is_beyond(self, node: ir.Node) -> bool:
        """Whether the node reads or makes numbers that the type cannot hold. What hides keys may be any large one."""
        read = [value for k, value in enumerate(node.inputs) if not (is_attention(node) and k == MASK)]
        return any(value in self.beyond for value in (*read, *node.outputs) if value is not None)

    def is_legal(self, node: ir.Node) -> bool:
        """Whether the operator is defined for the type at the model's opset."""
        schema = onnx.defs.get_schema(node.op_type, self.opset, "" if is_op(node, node.op_type) else node.domain)
        wanted = f"tensor({self.dtype.name.lower()})"
        types = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        floats = [k for k, _ in self.float_inputs(node)]
        formal = [schema.inputs[min(k, len(schema.inputs) - 1)].type_str for k in floats]
        return all(wanted in types.get(name, [name]) for name in formal)

    def float_inputs(self, node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
        """Inputs of a type that is replaced, or that were."""
        wide = _MIXTURES[node.op_type] if _is_mixture(node) else ()
        for place, value in enumerate(node.inputs):
            if value is not None and place not in wide and (value.dtype in self.sources or value in self.narrow):
                yield place, value

    def is_constant(self, value: ir.Value) -> bool:
        return value.is_initializer() and not value.is_graph_input()

    def size(self, value: ir.Value) -> int:
        return 0 if value.const_value is None else value.const_value.size

    def as_type(self, value: ir.Value, dtype: ir.DataType, reader: ir.Node) -> ir.Value:
        """The value in that type, made before its reader where it is new."""
        if value.dtype == dtype:
            return value
        if self.is_constant(value) and value.const_value is not None:
            if value not in self.weights:
                self.weights[value] = self.weight(value)
            return self.weights[value]
        if (value, dtype) not in self.casts:
            node = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{value.name}/{dtype.name.lower()}")
            output = node.outputs[0]
            output.type, output.shape = ir.TensorType(dtype), value.shape
            self.graph.insert_before(reader, node)
            self.casts[value, dtype] = output
        return self.casts[value, dtype]

    def weight(self, value: ir.Value) -> ir.Value:
        """A constant in half precision. What hides keys is a number beyond float16's range: its lowest one does too."""
        assert value.const_value is not None
        array = value.const_value.numpy().astype(np.float32)
        most = float(ml_dtypes.finfo(self.dtype.numpy()).max)
        beyond = np.isfinite(array) & (np.abs(array) > most)
        self.clipped += int(beyond.any())
        narrow = np.where(beyond, np.copysign(np.float32(most), array), array).astype(self.dtype.numpy())
        name = f"{value.name}/{self.dtype.name.lower()}"
        made = ir.Value(name=name, shape=value.shape, type=ir.TensorType(self.dtype))
        made.const_value = ir.tensor(narrow, dtype=self.dtype, name=name)
        self.graph.register_initializer(made)
        return made

    def widen_subgraphs(self, node: ir.Node) -> None:
        """What the node's branches and bodies read from outside has the model's type for them."""
        inside: list[ir.Graph] = []
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inside.append(attribute.value)
            elif attribute.type == ir.AttributeType.GRAPHS:
                inside += attribute.value
        for graph in inside:
            for nested in ir.traversal.RecursiveGraphIterator(graph):
                for place, value in enumerate(nested.inputs):
                    if value is not None and value in self.narrow:
                        nested.replace_input_with(place, self.as_type(value, self.narrow[value], node))
            for place, output in enumerate(graph.outputs):
                if output in self.narrow:
                    graph.outputs[place] = self.as_type(output, self.narrow[output], node)

    def give_out(self, caches: set[ir.Value]) -> None:
        """Outputs in the model's types under their names, but for caches."""
        for place, value in enumerate(self.graph.outputs):
            if value not in self.narrow or value in caches:
                continue
            was = self.narrow[value]
            node = ir.node("Cast", [value], {"to": int(was)}, name=f"{value.name}/{was.name.lower()}")
            output = node.outputs[0]
            output.type, output.shape, output.name = ir.TensorType(was), value.shape, value.name
            value.name = f"{value.name}/{self.dtype.name.lower()}"
            self.graph.append(node)
            self.graph.outputs[place] = output


def _is_mixture(node: ir.Node) -> bool:
    """Whether the node is a mixture of experts of com.microsoft."""
    return node.domain == "com.microsoft" and node.op_type in _MIXTURES


def _is_matmul(node: ir.Node) -> bool:
    return node.op_type in _MATMULS or _is_mixture(node)
