"""Checks that nodes compute each row from itself alone, so that rows of several sequences may be packed."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from ...errors import ModelError
from ..rewriting.matching import Size, attribute, dims, operand, read_integers, read_static_sizes
from ..rewriting.size_rules import canonicalize_size

_BY_ELEMENT = {
    "Abs", "Add", "And", "BiasGelu", "Cast", "CastLike", "Ceil", "Clip", "Cos", "DequantizeLinear", "Div", "Dropout",
    "Elu", "Equal", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pow", "QuantizeLinear", "QuickGelu", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "Where", "Xor",
}  # fmt: skip

# Norms over the last axis or axes, from attribute axis on.
_NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
_RESHAPES = ("Reshape", "Flatten", "Unsqueeze", "Squeeze")
_SKIPPING_NORMS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}


def check_row_wise(nodes: list[ir.Node], tokens: Size) -> None:
    """Raise ModelError for a node that mixes tokens, or is not proven to keep them apart.

    Sizes are inferred; `tokens` is the size of the axis over tokens.
    """
    for node in nodes:
        if not _is_row_wise(node, tokens):
            shapes = [list(map(str, dims(v))) for v in node.inputs if v is not None]
            raise ModelError(
                "serve.node_not_row_wise",
                f"serve: node '{node.name}' ({node.op_type}) of inputs {shapes} may not compute each token "
                "independently, but tokens of several requests are batched together. Only attention over a growing "
                "cache, and LinearAttention and CausalConvWithState with a state from call to call, may read other "
                "tokens.",
            )


def row_axis(value: ir.Value, tokens: Size) -> int | None:
    """Return the axis over tokens; None if there is none, or more than one."""
    axes = [axis for axis, size in enumerate(dims(value)) if size == tokens]
    return axes[0] if len(axes) == 1 else None


def _rows_axis(value: ir.Value, tokens: Size) -> int | None:
    """Return the axis over tokens, or over a fixed number of rows per token; None if not exactly one."""
    axes = [axis for axis, size in enumerate(dims(value)) if _rows_of_token(size, tokens)]
    return axes[0] if len(axes) == 1 else None


def _rows_of_token(size: Size, tokens: Size) -> int:
    """Return how many rows each token has along an axis of that size, 0 if these are not rows of tokens."""
    if size == tokens:
        return 1
    if isinstance(size, int) or isinstance(tokens, int) or str(tokens) not in str(size):
        return 0
    count = canonicalize_size(size / tokens)
    return count if isinstance(count, int) else 0


def _is_row_wise(node: ir.Node, tokens: Size) -> bool:
    inputs = [value for value in node.inputs if value is not None]
    row_inputs = [value for value in inputs if _rows_axis(value, tokens) is not None]
    outputs = [value for value in node.outputs if value.name]
    has_several_axes = any(
        sum(_rows_of_token(size, tokens) > 0 for size in dims(value)) > 1 for value in (*inputs, *outputs)
    )
    if has_several_axes or not row_inputs or any(_rows_axis(value, tokens) is None for value in outputs):
        return False
    operator = node.op_type
    counts = {_rows_of_token(dims(value)[_find_rows_axis(value, tokens)], tokens) for value in (*row_inputs, *outputs)}
    if len(counts) > 1 and operator not in _RESHAPES:
        return False
    if operator in _BY_ELEMENT:
        return len({_axis_from_back(value, tokens) for value in (*row_inputs, *outputs)}) == 1
    if operator in _SKIPPING_NORMS:
        return all(_axis_from_back(value, tokens) != -1 for value in row_inputs)
    rule = _RULES.get(operator)
    return rule is not None and rule(node, tokens)


def _find_rows_axis(value: ir.Value, tokens: Size) -> int:
    axis = _rows_axis(value, tokens)
    assert axis is not None
    return axis


def _axis_from_back(value: ir.Value, tokens: Size) -> int:
    return _find_rows_axis(value, tokens) - len(dims(value))


def _first_row_axis(node: ir.Node, tokens: Size) -> int:
    """Return the row axis of the first input, -1 if it has none."""
    axis = _rows_axis(operand(node, 0), tokens)
    return -1 if axis is None else axis


def _check_matmul(node: ir.Node, tokens: Size) -> bool:
    """Accept rows times a matrix without rows, or a matrix of each row times another matrix of it."""
    rank = len(dims(operand(node, 0)))
    if node.op_type == "MatMul" and rank == len(dims(operand(node, 1))):
        axes = {_rows_axis(operand(node, k), tokens) for k in range(2)}
        if axes != {None} and len(axes) == 1 and 0 <= _first_row_axis(node, tokens) < rank - 2:
            return True
    other_inputs = [value for value in node.inputs[1:] if value is not None]
    is_transposed = attribute(node, "transA", 0) or attribute(node, "transBatchA", 0)
    return (
        0 <= _first_row_axis(node, tokens) < rank - 1
        and not is_transposed
        and all(_rows_axis(v, tokens) is None for v in other_inputs)
    )


def _check_reshape(node: ir.Node, tokens: Size) -> bool:
    """Accept a reshape that keeps the number of elements before the row axis."""
    before, after = dims(operand(node, 0)), dims(node.outputs[0])
    old, new = _rows_axis(operand(node, 0), tokens), _rows_axis(node.outputs[0], tokens)
    leading_before, leading_after = read_static_sizes(before[:old]), read_static_sizes(after[:new])
    return (
        leading_before is not None
        and leading_after is not None
        and math.prod(leading_before) == math.prod(leading_after)
    )


def _is_other_axis(node: ir.Node, tokens: Size, axis: int) -> bool:
    """Return whether the axis is not that of rows."""
    return axis % len(dims(operand(node, 0))) != _first_row_axis(node, tokens)


def _are_other_axes(node: ir.Node, tokens: Size, position: int) -> bool:
    """Return whether an input names axes none of which is that of rows."""
    axes = read_integers(node, position, "axes")
    return axes is not None and len(axes) > 0 and all(_is_other_axis(node, tokens, axis) for axis in axes)


def _check_concat(node: ir.Node, tokens: Size) -> bool:
    axis = attribute(node, "axis", 0) % len(dims(node.outputs[0]))
    return all(_rows_axis(operand(node, k), tokens) not in (None, axis) for k in range(len(node.inputs)))


def _check_gather(node: ir.Node, tokens: Size) -> bool:
    """Accept rows of a table by indices of rows, or slices of rows by indices that all rows share."""
    if _rows_axis(operand(node, 0), tokens) is None:
        return attribute(node, "axis", 0) == 0
    return _rows_axis(operand(node, 1), tokens) is None and _is_other_axis(node, tokens, attribute(node, "axis", 0))


def _check_gather_nd(node: ir.Node, tokens: Size) -> bool:
    """Accept GatherND of whole rows, by indices of axes before them."""
    depth = dims(operand(node, 1))[-1]
    return (
        _rows_axis(operand(node, 1), tokens) is None
        and isinstance(depth, int)
        and (attribute(node, "batch_dims", 0) + depth <= _first_row_axis(node, tokens))
    )


def _check_norm(node: ir.Node, tokens: Size) -> bool:
    return attribute(node, "axis", -1) % len(dims(operand(node, 0))) > _first_row_axis(node, tokens) >= 0


_RULES: dict[str, Callable[[ir.Node, Size], bool]] = {
    **dict.fromkeys(("MatMul", "Gemm", "MatMulNBits", "FusedMatMul"), _check_matmul),
    **dict.fromkeys(_RESHAPES, _check_reshape),
    **dict.fromkeys(_NORMS, _check_norm),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization", "TopK"),
                    lambda node, tokens: _is_other_axis(node, tokens, attribute(node, "axis", -1))),
    **dict.fromkeys(("Split", "ArgMax", "ArgMin"),
                    lambda node, tokens: _is_other_axis(node, tokens, attribute(node, "axis", 0))),
    "CumSum": lambda node, tokens: _are_other_axes(node, tokens, 1),
    **dict.fromkeys(("ReduceMean", "ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"),
                    lambda node, tokens: _are_other_axes(node, tokens, 1)),
    "Tile": lambda node, tokens: (times := read_integers(node, 1, "repeats")) is not None
                                 and times[_first_row_axis(node, tokens)] == 1,
    "Slice": lambda node, tokens: _are_other_axes(node, tokens, 3),
    "Transpose": lambda node, tokens: True,
    "OneHot": lambda node, tokens: True,  # rows stay where the new axis is another one
    **dict.fromkeys(("ScatterElements", "GatherElements"),
                    lambda node, tokens: _is_other_axis(node, tokens, attribute(node, "axis", 0))
                    and _first_row_axis(node, tokens) >= 0
                    and all(_rows_axis(operand(node, k), tokens) == _first_row_axis(node, tokens)
                            for k in range(1, len(node.inputs)))),
    "Expand": lambda node, tokens: len({_axis_from_back(v, tokens) for v in (operand(node, 0), node.outputs[0])}) == 1,
    **dict.fromkeys(("MoE", "QMoE"),
                    lambda node, tokens: _first_row_axis(node, tokens) in range(len(dims(operand(node, 0))) - 1)),
    "Concat": _check_concat,
    "Gather": _check_gather,
    "GatherBlockQuantized": lambda node, tokens: attribute(node, "gather_axis", 0) == 0,
    "GatherND": _check_gather_nd,
    "RotaryEmbedding": lambda node, tokens: True,
}  # fmt: skip
