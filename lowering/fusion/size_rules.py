"""What operators make of sizes: the shapes that depend on the contents of integer arrays, and those contents.

A rule raises UnknownError, or an error of Python's arithmetic, where something it needs is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from .matching import Size, attribute, dims, integers, operand

# Arrays up to this many elements are followed: shapes, axes, bounds and scalars.
FOLLOWED = 64

# Characters of an expression. Longer ones are not followed: each step would take more time than the last.
_LONGEST = 256

# Sizes, None where one is not known.
Shape = Sequence[Size | None]

BROADCAST = frozenset(
    (
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"),
        *("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    )
)


class UnknownError(Exception):
    """Something that a rule needs is not known."""


class Contents(Protocol):
    """The arrays that are followed."""

    def contents(self, value: ir.Value | None) -> np.ndarray:
        """The elements: ints, bools and SymbolicDims. Raises UnknownError."""


def settled(size: Any) -> Any:
    """A size in the one form in which equal ones compare equal."""
    if isinstance(size, (bool, np.bool_)):
        return bool(size)
    if isinstance(size, ir.SymbolicDim):
        if len(size.value or "") > _LONGEST:
            raise UnknownError
        return (size + 0).evaluate({})
    return int(size)


def sizes_of(value: ir.Value) -> tuple[Size, ...]:
    if value.shape is None:
        raise UnknownError
    return dims(value)


# -- shapes -----------------------------------------------------------------------------------------------------------


def broadcast(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    rank = max(len(s) for s in shapes)
    columns = zip(*((*(1 for _ in range(rank - len(s))), *s) for s in shapes))
    return [_widest([size for size in column if size != 1]) for column in columns]


def _widest(sizes: Sequence[Size]) -> Size:
    """The size that sizes other than 1 broadcast to."""
    return next((s for s in sizes if isinstance(s, int)), sizes[0]) if sizes else 1


def _prod(sizes: Sequence[Size]) -> Any:
    return (
        math.prod(sizes) if all(isinstance(s, int) for s in sizes) else settled(np.prod(np.array([1, *sizes], object)))
    )


def _vector(sizes: Contents, node: ir.Node, k: int) -> list[Any]:
    """What is known of an input that holds sizes."""
    contents = sizes.contents(node.inputs[k])
    if contents.ndim != 1:  # the importer has words for it
        raise UnknownError
    return list(contents)


def _reshape(sizes: Contents, node: ir.Node) -> list[Shape | None]:
    given, wanted = sizes_of(operand(node, 0)), _vector(sizes, node, 1)
    if not attribute(node, "allowzero", 0):
        wanted = [given[k] if isinstance(w, int) and w == 0 else w for k, w in enumerate(wanted)]
    if any(isinstance(w, int) and w == -1 for w in wanted):
        rest = [w for w in wanted if not (isinstance(w, int) and w == -1)]
        total, part = _prod(given), _prod(rest)
        missing = total // part if isinstance(total, int) and isinstance(part, int) else settled(total / part)
        wanted = [missing if isinstance(w, int) and w == -1 else w for w in wanted]
    return [wanted]


def _expand(sizes: Contents, node: ir.Node) -> list[Shape | None]:
    return [broadcast([sizes_of(operand(node, 0)), _vector(sizes, node, 1)])]


def _matmul(_: Contents, node: ir.Node) -> list[Shape | None] | None:
    a, b = (sizes_of(operand(node, k)) for k in (0, 1))
    if len(a) < 2 or len(b) < 2:
        return None
    return [[*broadcast([a[:-2], b[:-2]]), a[-2], b[-1]]]


def _conv(_: Contents, node: ir.Node) -> list[Shape | None] | None:
    """Without strides, which ONNX's inference gives up at where a length is an expression."""
    data, weight = sizes_of(operand(node, 0)), sizes_of(operand(node, 1))
    axes = len(data) - 2
    strides, dilations = (attribute(node, name, [1] * axes) for name in ("strides", "dilations"))
    pads, kernel = attribute(node, "pads", [0] * 2 * axes), weight[2:]
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or set(strides) != {1} or len(pads) != 2 * len(kernel):
        return None
    result: list[Size] = [data[0], weight[0]]
    for k, (size, taps) in enumerate(zip(data[2:], kernel, strict=True)):
        if not isinstance(taps, int):
            raise UnknownError
        result.append(settled(size + (pads[k] + pads[k + axes] - dilations[k] * (taps - 1))))
    return [result]


def _concat(_: Contents, node: ir.Node) -> list[Shape | None]:
    shapes = [sizes_of(v) for v in node.inputs if v is not None]
    axis = attribute(node, "axis", 0) % len(shapes[0])
    result: list[Size] = [_widest(column) for column in zip(*shapes)]
    result[axis] = settled(sum(s[axis] for s in shapes[1:]) + shapes[0][axis])
    return [result]


def _split(sizes: Contents, node: ir.Node) -> list[Shape | None]:
    shape = list(sizes_of(operand(node, 0)))
    axis, count = attribute(node, "axis", 0) % len(shape), len(node.outputs)
    given = len(node.inputs) > 1 and node.inputs[1] is not None
    parts: Sequence[Size] | None = _vector(sizes, node, 1) if given else integers(node, 1, "split")
    if parts is None:
        size = shape[axis]
        if not isinstance(size, int):
            return [[*shape[:axis], settled(size / count), *shape[axis + 1 :]] for _ in range(count)]
        chunk = -(-size // count)
        parts = [min(chunk, size - k * chunk) for k in range(count)]
    return [[*shape[:axis], part, *shape[axis + 1 :]] for part in parts]


def _tile(sizes: Contents, node: ir.Node) -> list[Shape | None]:
    return [[settled(a * b) for a, b in zip(sizes_of(operand(node, 0)), _vector(sizes, node, 1))]]


def _slice(sizes: Contents, node: ir.Node) -> list[Shape | None]:
    result: list[Size | None] = list(sizes_of(operand(node, 0)))
    for axis, start, stop, step in _bounds(sizes, node, len(result)):
        size = result[axis]
        if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int):
            result[axis] = len(range(*slice(start, stop, step).indices(size)))
        elif not (isinstance(start, int) and start == 0 and step == 1):
            result[axis] = None
        elif not (stop == size or _is_end(stop)):
            result[axis] = stop if _is_within(stop, size) else None
    return [result]


def _is_within(stop: Any, size: Any) -> bool:
    """Whether a size that is an expression is a known number larger than another one."""
    if not isinstance(stop, ir.SymbolicDim) or not isinstance(size, ir.SymbolicDim):
        return False
    left = settled(size - stop)
    return isinstance(left, int) and left >= 0


def _is_end(stop: Any) -> bool:
    return isinstance(stop, int) and stop >= 2**31 - 1


def _bounds(sizes: Contents, node: ir.Node, rank: int) -> list[tuple[int, Any, Any, int]]:
    """(axis, start, stop, step) of a Slice; starts and stops may be expressions."""
    if len(node.inputs) == 1:  # before opset 10
        starts, stops = list(attribute(node, "starts", ())), list(attribute(node, "ends", ()))
        axes: Sequence[Any] = attribute(node, "axes", range(len(starts)))
        steps: Sequence[Any] = [1] * len(starts)
    else:
        starts, stops = list(sizes.contents(node.inputs[1])), list(sizes.contents(node.inputs[2]))
        optional = [node.inputs[k] if len(node.inputs) > k else None for k in (3, 4)]
        axes = range(len(starts)) if optional[0] is None else list(sizes.contents(optional[0]))
        steps = [1] * len(starts) if optional[1] is None else list(sizes.contents(optional[1]))
    return [(a % rank, start, stop, step) for a, start, stop, step in zip(axes, starts, stops, steps)]


def _range(sizes: Contents, node: ir.Node) -> list[Shape | None] | None:
    start, stop, step = (sizes.contents(v).reshape(-1)[0] for v in node.inputs)
    return [[settled(stop - start)]] if isinstance(step, int) and step == 1 else None


SHAPES: dict[str, Callable[[Contents, ir.Node], list[Shape | None] | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "MatMul": _matmul,
    "Concat": _concat,
    "Conv": _conv,
    "Split": _split,
    "Tile": _tile,
    "Slice": _slice,
    "Range": _range,
    "ConstantOfShape": lambda sizes, node: [_vector(sizes, node, 0)],
}


# -- contents ---------------------------------------------------------------------------------------------------------


def _shape_contents(_: Contents, node: ir.Node) -> np.ndarray:
    shape = sizes_of(operand(node, 0))
    return np.array(shape, object)[attribute(node, "start", 0) : attribute(node, "end", len(shape))]


def _gather_contents(sizes: Contents, node: ir.Node) -> Any:
    data, index = sizes.contents(node.inputs[0]), sizes.contents(node.inputs[1]).astype(np.int64)
    return np.take(data, index, axis=attribute(node, "axis", 0))


def _slice_contents(sizes: Contents, node: ir.Node) -> np.ndarray:
    data = sizes.contents(node.inputs[0])
    ((_, start, stop, step),) = _bounds(sizes, node, data.ndim)
    return data[start:stop:step]


def _concat_contents(sizes: Contents, node: ir.Node) -> np.ndarray:
    return np.concatenate([sizes.contents(v) for v in node.inputs], axis=attribute(node, "axis", 0))


def _reshaped_contents(sizes: Contents, node: ir.Node) -> np.ndarray:
    """Squeeze, Unsqueeze and Reshape: the shape is known, the order stays."""
    shape = [size for size in sizes_of(node.outputs[0]) if isinstance(size, int)]
    if len(shape) != len(dims(node.outputs[0])):
        raise UnknownError
    return sizes.contents(node.inputs[0]).reshape(shape)


def _cast_contents(sizes: Contents, node: ir.Node) -> np.ndarray:
    if node.outputs[0].dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        raise UnknownError
    return sizes.contents(node.inputs[0])


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Contents, ir.Node], Any]:
    return lambda sizes, node: function(sizes.contents(node.inputs[0]), sizes.contents(node.inputs[1]))


def _quotient(a: np.ndarray, b: np.ndarray) -> Any:
    if any(isinstance(x, int) and x < 0 for x in [*a.flat, *b.flat]):
        raise UnknownError  # ONNX rounds toward zero
    return a // b


def _equal_contents(sizes: Contents, node: ir.Node) -> Any:
    """Two expressions are equal or different when that holds for all sizes; a size is never negative."""
    a, b = np.broadcast_arrays(sizes.contents(node.inputs[0]), sizes.contents(node.inputs[1]))
    return np.array([_same(x, y) for x, y in zip(a.flat, b.flat)] + [None], object)[:-1].reshape(a.shape)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, ir.SymbolicDim) != isinstance(b, ir.SymbolicDim):
        constant = b if isinstance(a, ir.SymbolicDim) else a
        if constant < 0:
            return False
        raise UnknownError
    if a != b and isinstance(a, ir.SymbolicDim):
        raise UnknownError
    return bool(a == b)


def _where_contents(sizes: Contents, node: ir.Node) -> Any:
    condition, a, b = np.broadcast_arrays(*(sizes.contents(v) for v in node.inputs))
    return np.where(condition.astype(bool), a, b)


def _filled_contents(sizes: Contents, node: ir.Node) -> np.ndarray:
    shape = [int(s) for s in sizes.contents(node.inputs[0])]
    tensor = attribute(node, "value", None)
    if tensor is None or math.prod(shape) > FOLLOWED:
        raise UnknownError
    return np.full(shape, tensor.numpy().item(), object)


CONTENTS: dict[str, Callable[[Contents, ir.Node], Any]] = {
    "Shape": _shape_contents,
    "Gather": _gather_contents,
    "Slice": _slice_contents,
    "Concat": _concat_contents,
    "Squeeze": _reshaped_contents,
    "Unsqueeze": _reshaped_contents,
    "Reshape": _reshaped_contents,
    "Identity": lambda sizes, node: sizes.contents(node.inputs[0]),
    "Cast": _cast_contents,
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _arithmetic(_quotient),
    "Equal": _equal_contents,
    "Where": _where_contents,
    "ConstantOfShape": _filled_contents,
}
