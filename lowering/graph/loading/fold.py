"""Constant folding: nodes whose inputs are all constant are computed at import, by onnx's own reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# Folding must not turn a small recipe for a large tensor (Expand, Range, ConstantOfShape) into a large weight.
_GROWTH_BYTES = 2**22

# Operators that move elements. The evaluator may multiply elements by ones, or convert them, so it is passed the bits.
_MOVERS = {
    "CenterCropPad", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherND", "Identity",
    "OneHot", "Pad", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
    "Where",
}  # fmt: skip

# Inputs whose contents may determine the size of an output.
_SMALL_BYTES = 2**12

_NUMBERS = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING}

# Never folded: random operators, those with bodies, and the one that enlarges weights. Also operators whose evaluator
# does not follow the standard, or accepts sizes and indices that do not match: their lowerings check them.
_NOT_FOLDED = {
    "AffineGrid", "Attention", "AveragePool", "BatchNormalization", "Bernoulli", "CausalConvWithState", "Col2Im",
    "Conv", "ConvInteger", "DFT", "DequantizeLinear", "Det", "Dropout", "EyeLike", "GRU", "GatherElements", "Gelu",
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GridSample", "GroupNormalization", "If",
    "InstanceNormalization", "LRN", "LSTM", "LayerNormalization", "LinearAttention", "Loop", "LpNormalization",
    "LpPool", "MaxPool", "MaxUnpool", "Multinomial", "NonMaxSuppression", "PRelu", "QLinearConv", "QuantizeLinear",
    "RMSNormalization", "RNN", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Resize",
    "ReverseSequence", "RoiAlign", "RotaryEmbedding", "STFT", "Scan", "Scatter", "ScatterElements", "ScatterND",
    "SequenceMap", "TensorScatter", "TopK", "Unique", "Upsample",
}  # fmt: skip


def fold_node(
    node: ir.Node, version: int, inputs: Sequence[np.ndarray | None], growth: int = _GROWTH_BYTES
) -> list[np.ndarray | None] | None:
    """Return the node's outputs for constant inputs, or None if the node must be lowered after all.

    inputs are None for absent ones. growth is how many bytes the outputs may have more than the inputs.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type in _NOT_FOLDED:
        return None
    if not all(a is None or is_numpy_type(a.dtype) for a in inputs):
        return None
    if _is_misread(node, inputs):
        return None
    if node.op_type in _MOVERS and onnx.defs.has(node.op_type, version, ""):
        return _fold_bits(node, version, inputs, growth)
    if node.op_type in ("Cast", "CastLike") and _has_same_type(node, inputs):
        return [inputs[0]]
    return _evaluate(node, version, inputs, growth)


def _has_same_type(node: ir.Node, inputs: Sequence[np.ndarray | None]) -> bool:
    """Return whether a cast is to the type that its input has."""
    data, like = inputs[0], inputs[1] if len(inputs) > 1 else None
    if node.op_type == "CastLike":
        return data is not None and like is not None and data.dtype == like.dtype
    to = node.attributes.get_int("to", 0)
    return data is not None and to != onnx.TensorProto.STRING and data.dtype == onnx.helper.tensor_dtype_to_np_dtype(to)


def _fold_bits(
    node: ir.Node, version: int, inputs: Sequence[np.ndarray | None], growth: int
) -> list[np.ndarray | None] | None:
    """Return the outputs of a node that moves elements, evaluated on their bits as unsigned integers."""
    schema = onnx.defs.get_schema(node.op_type, version)
    kind = schema.outputs[0].type_str
    moved = [k for k in range(len(inputs)) if schema.inputs[min(k, len(schema.inputs) - 1)].type_str == kind]
    dtypes = {a.dtype for k in moved if (a := inputs[k]) is not None}
    if len(dtypes) != 1 or (dtype := dtypes.pop()).kind in "biu":
        return _evaluate(node, version, inputs, growth)
    if dtype.itemsize > 8:
        return None  # no integer type has the size of complex128
    bits = np.dtype(f"u{dtype.itemsize}")
    viewed_inputs = [a if a is None or k not in moved else _view_as(a, bits) for k, a in enumerate(inputs)]
    results = _evaluate(node, version, viewed_inputs, growth)
    return None if results is None else [None if a is None else _view_as(a, dtype) for a in results]


def _view_as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(array).view(dtype).reshape(array.shape)


def _evaluate(
    node: ir.Node, version: int, inputs: Sequence[np.ndarray | None], growth: int
) -> list[np.ndarray | None] | None:
    """Return the outputs of the evaluator; None if it fails, or if they are too large."""
    feeds = {f"x{k}": a for k, a in enumerate(inputs) if a is not None}
    proto = ir.to_proto(node)
    del proto.input[:]
    proto.input.extend("" if a is None else f"x{k}" for k, a in enumerate(inputs))
    graph = onnx.helper.make_graph(
        [proto],
        "fold",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in proto.output if n],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    budget = sum(a.nbytes for a in feeds.values()) + growth
    if _is_over_budget(model, feeds, budget):
        return None
    try:
        with np.errstate(all="ignore"):  # NaN and infinities are valid results
            results = ReferenceEvaluator(model).run(None, feeds)
    except Exception:
        return None  # the lowering handles the node, and has the better error
    if any(not isinstance(r, (np.ndarray, np.generic)) for r in results):
        return None
    if sum(np.asarray(a).nbytes for a in results) > budget:
        return None
    if node.op_type.startswith("Reduce"):  # NumPy adds small integers up in wider ones
        results = [np.asarray(r, feeds["x0"].dtype) for r in results]
    computed = iter(results)
    return [np.asarray(next(computed)) if output.name else None for output in node.outputs]


def is_numpy_type(dtype: np.dtype) -> bool:
    """Return whether NumPy, and with it onnx's evaluator, computes with the type.

    With some types of less than a byte it crashes.
    """
    return dtype.kind in "biufc" or dtype.name == "bfloat16"


def _is_misread(node: ir.Node, inputs: Sequence[np.ndarray | None]) -> bool:
    """Return whether the evaluator deviates from the standard, or accepts an error."""
    present = [a for a in inputs if a is not None]
    match node.op_type:
        case "Slice":  # clamps as Python does, and loses the first element for negative steps
            return len(inputs) > 4 and inputs[4] is not None and bool((inputs[4] < 0).any())
        case "Clip":  # bounds are scalars of its type in order; NaN has rules of its own
            are_scalars = all(a.ndim == 0 and a.dtype == present[0].dtype for a in present[1:])
            is_ordered = len(inputs) < 3 or len(present) < 3 or bool((present[1] <= present[2]).all())
            return (
                not are_scalars
                or not is_ordered
                or any(bool(np.isnan(a).any()) for a in present if a.dtype.kind == "f")
            )
        case "Range":
            return any(a.dtype.kind == "f" and not np.isfinite(a).all() for a in present)
        case "Flatten":
            axis, rank = node.attributes.get_int("axis", 1), present[0].ndim
            return not -rank <= axis <= rank
        case "Split":  # accepts negative lengths, and a negative last length
            data, axis, count = (
                present[0],
                node.attributes.get_int("axis", 0),
                node.attributes.get_int("num_outputs", 0),
            )
            size = data.shape[axis] if -data.ndim <= axis < data.ndim else 0
            if len(present) > 1:
                return bool((present[1] < 0).any()) or int(present[1].sum()) != size
            return count > 0 and -(-size // count) * (count - 1) > size
        case "Shape":  # does not clamp indices before the first dimension
            rank = present[0].ndim
            return any(node.attributes.get_int(name, 0) < -rank for name in ("start", "end"))
        case "Tile":  # NumPy takes any number of repeats
            return present[1].shape != (present[0].ndim,)
        case "Transpose":  # NumPy takes axes modulo 2^32
            rank = present[0].ndim
            return sorted(node.attributes.get_ints("perm", range(rank))) != list(range(rank))
        case "Gather":  # accepts any index of an empty tensor
            data, axis = present[0], node.attributes.get_int("axis", 0)
            is_legal = -data.ndim <= axis < data.ndim
            return data.size == 0 and (not is_legal or _has_index_beyond(present[1], data.shape[axis]))
    return False


def _has_index_beyond(indices: np.ndarray, size: int) -> bool:
    return bool(((indices < -size) | (indices >= size)).any())


def _is_over_budget(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], budget: int) -> bool:
    """Return whether the outputs, by the sizes that ONNX infers, exceed the budget; nothing is computed."""
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    small = (onnx.numpy_helper.from_array(a, name) for name, a in feeds.items() if a.nbytes <= _SMALL_BYTES)
    sized.graph.initializer.extend(small)
    try:
        outputs = onnx.shape_inference.infer_shapes(sized, data_prop=True).graph.output
    except Exception:
        return False  # the node is rejected later
    output_bytes = 0
    for output in outputs:
        kind = output.type.tensor_type
        dims = [d.dim_value for d in kind.shape.dim]
        if kind.elem_type in _NUMBERS and all(d.HasField("dim_value") for d in kind.shape.dim):
            output_bytes += math.prod(dims) * onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return output_bytes > budget
