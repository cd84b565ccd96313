"""Whether nodes compute each row from itself alone, so that rows of several sequences may lie side by side."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from ..errors import ModelError
from ..fusion.matching import Size, attribute, dims, integers, numbers, operand
from ..fusion.size_rules import settled

_BY_ELEMENT = {
    "Abs", "Add", "And", "BiasGelu", "Cast", "CastLike", "Ceil", "Clip", "Cos", "DequantizeLinear", "Div", "Dropout",
    "Elu", "Equal", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
    "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pow", "QuantizeLinear", "QuickGelu", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "Where", "Xor",
}  # fmt: skip

# Over the last axis or axes, which is where attribute axis begins.
_NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
_RESHAPES = ("Reshape", "Flatten", "Unsqueeze", "Squeeze")
_SKIPPING_NORMS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}


def check_row_wise(nodes: list[ir.Node], tokens: Size) -> None:
    """Raises ModelError for a node that mixes tokens, or of which that is not known. Sizes are known, `tokens`
    being that of the axis that is over tokens."""
    for node in nodes:
        if not _is_row_wise(node, tokens):
            given = [list(map(str, dims(v))) for v in node.inputs if v is not None]
            raise ModelError(
                f"serve: node '{node.name}' ({node.op_type}) of inputs {given} is not known to compute each token by "
                "itself, and tokens of several requests lie side by side. Only attention over a growing cache, and "
                "LinearAttention and CausalConvWithState with a state from call to call, may look at other tokens."
            )


def row_axis(value: ir.Value, tokens: Size) -> int | None:
    """The axis that is over tokens, None if there is none, or more than one."""
    axes = [axis for axis, size in enumerate(dims(value)) if size == tokens]
    return axes[0] if len(axes) == 1 else None


def _rows_axis(value: ir.Value, tokens: Size) -> int | None:
    """The axis that is over tokens, or over as many rows of each token; None if there is none, or more than one."""
    axes = [axis for axis, size in enumerate(dims(value)) if _rows_of_token(size, tokens)]
    return axes[0] if len(axes) == 1 else None


def _rows_of_token(size: Size, tokens: Size) -> int:
    """How many rows each token has along an axis of that size, 0 where they are not rows of tokens."""
    if size == tokens:
        return 1
    if isinstance(size, int) or isinstance(tokens, int) or str(tokens) not in str(size):
        return 0
    count = settled(size / tokens)
    return count if isinstance(count, int) else 0


def _is_row_wise(node: ir.Node, tokens: Size) -> bool:
    given = [value for value in node.inputs if value is not None]
    moved = [value for value in given if _rows_axis(value, tokens) is not None]
    outputs = [value for value in node.outputs if value.name]
    several = any(sum(_rows_of_token(size, tokens) > 0 for size in dims(value)) > 1 for value in (*given, *outputs))
    if several or not moved or any(_rows_axis(value, tokens) is None for value in outputs):
        return False
    operator = node.op_type
    counts = {_rows_of_token(dims(value)[_axis(value, tokens)], tokens) for value in (*moved, *outputs)}
    if len(counts) > 1 and operator not in _RESHAPES:
        return False
    if operator in _BY_ELEMENT:
        return len({_from_back(value, tokens) for value in (*moved, *outputs)}) == 1
    if operator in _SKIPPING_NORMS:
        return all(_from_back(value, tokens) != -1 for value in moved)
    rule = _RULES.get(operator)
    return rule is not None and rule(node, tokens)


def _axis(value: ir.Value, tokens: Size) -> int:
    axis = _rows_axis(value, tokens)
    assert axis is not None
    return axis


def _from_back(value: ir.Value, tokens: Size) -> int:
    return _axis(value, tokens) - len(dims(value))


def _own(node: ir.Node, tokens: Size) -> int:
    """The row axis of the first input, -1 where it has none."""
    axis = _rows_axis(operand(node, 0), tokens)
    return -1 if axis is None else axis


def _matmul(node: ir.Node, tokens: Size) -> bool:
    """Rows times a matrix without rows, or a matrix of each row times another of it."""
    rank = len(dims(operand(node, 0)))
    if node.op_type == "MatMul" and rank == len(dims(operand(node, 1))):
        axes = {_rows_axis(operand(node, k), tokens) for k in range(2)}
        if axes != {None} and len(axes) == 1 and 0 <= _own(node, tokens) < rank - 2:
            return True
    others = [value for value in node.inputs[1:] if value is not None]
    turned = attribute(node, "transA", 0) or attribute(node, "transBatchA", 0)
    return 0 <= _own(node, tokens) < rank - 1 and not turned and all(_rows_axis(v, tokens) is None for v in others)


def _reshape(node: ir.Node, tokens: Size) -> bool:
    """As many elements in front of the rows as there were."""
    before, after = dims(operand(node, 0)), dims(node.outputs[0])
    old, new = _rows_axis(operand(node, 0), tokens), _rows_axis(node.outputs[0], tokens)
    front, behind = numbers(before[:old]), numbers(after[:new])
    return front is not None and behind is not None and math.prod(front) == math.prod(behind)


def _along(node: ir.Node, tokens: Size, axis: int) -> bool:
    """Along an axis that is not that of rows."""
    return axis % len(dims(operand(node, 0))) != _own(node, tokens)


def _axes(node: ir.Node, tokens: Size, position: int) -> bool:
    """Along given axes, none of which is that of rows."""
    axes = integers(node, position, "axes")
    return axes is not None and len(axes) > 0 and all(_along(node, tokens, axis) for axis in axes)


def _concat(node: ir.Node, tokens: Size) -> bool:
    axis = attribute(node, "axis", 0) % len(dims(node.outputs[0]))
    return all(_rows_axis(operand(node, k), tokens) not in (None, axis) for k in range(len(node.inputs)))


def _gather(node: ir.Node, tokens: Size) -> bool:
    """Rows of a table by indices of rows, or parts of rows by indices that all rows share."""
    if _rows_axis(operand(node, 0), tokens) is None:
        return attribute(node, "axis", 0) == 0
    return _rows_axis(operand(node, 1), tokens) is None and _along(node, tokens, attribute(node, "axis", 0))


def _gather_parts(node: ir.Node, tokens: Size) -> bool:
    """GatherND of whole rows, by indices of axes in front of them."""
    depth = dims(operand(node, 1))[-1]
    return (
        _rows_axis(operand(node, 1), tokens) is None
        and isinstance(depth, int)
        and (attribute(node, "batch_dims", 0) + depth <= _own(node, tokens))
    )


def _norm(node: ir.Node, tokens: Size) -> bool:
    return attribute(node, "axis", -1) % len(dims(operand(node, 0))) > _own(node, tokens) >= 0


_RULES: dict[str, Callable[[ir.Node, Size], bool]] = {
    **dict.fromkeys(("MatMul", "Gemm", "MatMulNBits", "FusedMatMul"), _matmul),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization", "TopK"),
                    lambda node, tokens: _along(node, tokens, attribute(node, "axis", -1))),
    **dict.fromkeys(("Split", "ArgMax", "ArgMin"),
                    lambda node, tokens: _along(node, tokens, attribute(node, "axis", 0))),
    "CumSum": lambda node, tokens: _axes(node, tokens, 1),
    **dict.fromkeys(("ReduceMean", "ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"),
                    lambda node, tokens: _axes(node, tokens, 1)),
    "Tile": lambda node, tokens: (times := integers(node, 1, "repeats")) is not None and times[_own(node, tokens)] == 1,
    "Slice": lambda node, tokens: _axes(node, tokens, 3),
    "Transpose": lambda node, tokens: True,
    "OneHot": lambda node, tokens: True,  # rows stay where the new axis is another one
    **dict.fromkeys(("ScatterElements", "GatherElements"),
                    lambda node, tokens: _along(node, tokens, attribute(node, "axis", 0)) and _own(node, tokens) >= 0
                    and all(_rows_axis(operand(node, k), tokens) == _own(node, tokens)
                            for k in range(1, len(node.inputs)))),
    "Expand": lambda node, tokens: len({_from_back(v, tokens) for v in (operand(node, 0), node.outputs[0])}) == 1,
    **dict.fromkeys(("MoE", "QMoE"), lambda node, tokens: _own(node, tokens) in range(len(dims(operand(node, 0))) - 1)),
    "Concat": _concat,
    "Gather": _gather,
    "GatherBlockQuantized": lambda node, tokens: attribute(node, "gather_axis", 0) == 0,
    "GatherND": _gather_parts,
    "RotaryEmbedding": lambda node, tokens: True,
}  # fmt: skip
