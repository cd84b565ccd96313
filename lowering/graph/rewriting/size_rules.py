"""Rules for sizes: output shapes that depend on the contents of integer arrays, and those contents.

A rule raises UnknownSizeError, or an error of Python's arithmetic, if it needs a value that is not tracked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from .matching import Size, attribute, dims, operand, read_integers

# Arrays up to this many elements are tracked: shapes, axes, bounds and scalars.
MAX_TRACKED_ELEMENTS = 64

# Characters of an expression. Longer ones are not tracked: each step would take more time than the last.
_MAX_EXPRESSION_LENGTH = 256

# Sizes; None for an unknown one.
Shape = Sequence[Size | None]

BROADCAST_OPERATORS = frozenset(
    (
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"),
        *("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    )
)


class UnknownSizeError(Exception):
    """The error of a rule that needs an untracked value."""


class TrackedArrays(Protocol):
    """The tracked arrays."""

    def read_contents(self, value: ir.Value | None) -> np.ndarray:
        """Return the elements: ints, bools and SymbolicDims. Raise UnknownSizeError if they are not tracked."""


def canonicalize_size(size: Any) -> Any:
    """Return a size in the canonical form in which equal sizes compare equal."""
    if isinstance(size, (bool, np.bool_)):
        return bool(size)
    if isinstance(size, ir.SymbolicDim):
        if len(size.value or "") > _MAX_EXPRESSION_LENGTH:
            raise UnknownSizeError
        return (size + 0).evaluate({})
    return int(size)


def read_sizes(value: ir.Value) -> tuple[Size, ...]:
    if value.shape is None:
        raise UnknownSizeError
    return dims(value)


# -- shapes -----------------------------------------------------------------------------------------------------------


def broadcast_sizes(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    rank = max(len(s) for s in shapes)
    columns = zip(*((*(1 for _ in range(rank - len(s))), *s) for s in shapes))
    return [_broadcast_axis([size for size in column if size != 1]) for column in columns]


def _broadcast_axis(sizes: Sequence[Size]) -> Size:
    """Return the size that sizes other than 1 broadcast to."""
    return next((s for s in sizes if isinstance(s, int)), sizes[0]) if sizes else 1


def _multiply_sizes(sizes: Sequence[Size]) -> Any:
    return (
        math.prod(sizes)
        if all(isinstance(s, int) for s in sizes)
        else canonicalize_size(np.prod(np.array([1, *sizes], object)))
    )


def _read_vector(sizes: TrackedArrays, node: ir.Node, k: int) -> list[Any]:
    """Return the tracked elements of an input that contains sizes."""
    contents = sizes.read_contents(node.inputs[k])
    if contents.ndim != 1:  # the importer reports it
        raise UnknownSizeError
    return list(contents)


def _reshape(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    source, target = read_sizes(operand(node, 0)), _read_vector(sizes, node, 1)
    if not attribute(node, "allowzero", 0):
        target = [source[k] if isinstance(size, int) and size == 0 else size for k, size in enumerate(target)]
    if any(isinstance(size, int) and size == -1 for size in target):
        static_rest = [size for size in target if not (isinstance(size, int) and size == -1)]
        total, divisor = _multiply_sizes(source), _multiply_sizes(static_rest)
        missing = (
            total // divisor
            if isinstance(total, int) and isinstance(divisor, int)
            else canonicalize_size(total / divisor)
        )
        target = [missing if isinstance(size, int) and size == -1 else size for size in target]
    return [target]


def _expand(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    return [broadcast_sizes([read_sizes(operand(node, 0)), _read_vector(sizes, node, 1)])]


def _matmul(_: TrackedArrays, node: ir.Node) -> list[Shape | None] | None:
    a, b = (read_sizes(operand(node, k)) for k in (0, 1))
    if len(a) < 2 or len(b) < 2:
        return None
    return [[*broadcast_sizes([a[:-2], b[:-2]]), a[-2], b[-1]]]


def _conv(_: TrackedArrays, node: ir.Node) -> list[Shape | None] | None:
    """Infer a Conv without strides; ONNX's inference stops at a length that is an expression."""
    data, weight = read_sizes(operand(node, 0)), read_sizes(operand(node, 1))
    axes = len(data) - 2
    strides, dilations = (attribute(node, name, [1] * axes) for name in ("strides", "dilations"))
    pads, kernel = attribute(node, "pads", [0] * 2 * axes), weight[2:]
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or set(strides) != {1} or len(pads) != 2 * len(kernel):
        return None
    result: list[Size] = [data[0], weight[0]]
    for k, (size, taps) in enumerate(zip(data[2:], kernel, strict=True)):
        if not isinstance(taps, int):
            raise UnknownSizeError
        result.append(canonicalize_size(size + (pads[k] + pads[k + axes] - dilations[k] * (taps - 1))))
    return [result]


def _concat(_: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    shapes = [read_sizes(v) for v in node.inputs if v is not None]
    axis = attribute(node, "axis", 0) % len(shapes[0])
    result: list[Size] = [_broadcast_axis(column) for column in zip(*shapes)]
    result[axis] = canonicalize_size(sum(s[axis] for s in shapes[1:]) + shapes[0][axis])
    return [result]


def _split(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    shape = list(read_sizes(operand(node, 0)))
    axis, count = attribute(node, "axis", 0) % len(shape), len(node.outputs)
    has_sizes = len(node.inputs) > 1 and node.inputs[1] is not None
    lengths: Sequence[Size] | None = _read_vector(sizes, node, 1) if has_sizes else read_integers(node, 1, "split")
    if lengths is None:
        size = shape[axis]
        if not isinstance(size, int):
            return [[*shape[:axis], canonicalize_size(size / count), *shape[axis + 1 :]] for _ in range(count)]
        chunk = -(-size // count)
        lengths = [min(chunk, size - k * chunk) for k in range(count)]
    return [[*shape[:axis], length, *shape[axis + 1 :]] for length in lengths]


def _tile(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    return [[canonicalize_size(a * b) for a, b in zip(read_sizes(operand(node, 0)), _read_vector(sizes, node, 1))]]


def _slice(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None]:
    result: list[Size | None] = list(read_sizes(operand(node, 0)))
    for axis, start, stop, step in _read_bounds(sizes, node, len(result)):
        size = result[axis]
        if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int):
            result[axis] = len(range(*slice(start, stop, step).indices(size)))
        elif not (isinstance(start, int) and start == 0 and step == 1):
            result[axis] = None
        elif not (stop == size or _is_end(stop)):
            result[axis] = stop if _is_within(stop, size) else None
    return [result]


def _is_within(stop: Any, size: Any) -> bool:
    """Return whether an expression is smaller than another one, or equal, by a constant."""
    if not isinstance(stop, ir.SymbolicDim) or not isinstance(size, ir.SymbolicDim):
        return False
    difference = canonicalize_size(size - stop)
    return isinstance(difference, int) and difference >= 0


def _is_end(stop: Any) -> bool:
    return isinstance(stop, int) and stop >= 2**31 - 1


def _read_bounds(sizes: TrackedArrays, node: ir.Node, rank: int) -> list[tuple[int, Any, Any, int]]:
    """Return (axis, start, stop, step) for each axis of a Slice; starts and stops may be expressions."""
    if len(node.inputs) == 1:  # before opset 10
        starts, stops = list(attribute(node, "starts", ())), list(attribute(node, "ends", ()))
        axes: Sequence[Any] = attribute(node, "axes", range(len(starts)))
        steps: Sequence[Any] = [1] * len(starts)
    else:
        starts, stops = list(sizes.read_contents(node.inputs[1])), list(sizes.read_contents(node.inputs[2]))
        optional = [node.inputs[k] if len(node.inputs) > k else None for k in (3, 4)]
        axes = range(len(starts)) if optional[0] is None else list(sizes.read_contents(optional[0]))
        steps = [1] * len(starts) if optional[1] is None else list(sizes.read_contents(optional[1]))
    return [(a % rank, start, stop, step) for a, start, stop, step in zip(axes, starts, stops, steps)]


def _range(sizes: TrackedArrays, node: ir.Node) -> list[Shape | None] | None:
    start, stop, step = (sizes.read_contents(v).reshape(-1)[0] for v in node.inputs)
    return [[canonicalize_size(stop - start)]] if isinstance(step, int) and step == 1 else None


SHAPE_RULES: dict[str, Callable[[TrackedArrays, ir.Node], list[Shape | None] | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "MatMul": _matmul,
    "Concat": _concat,
    "Conv": _conv,
    "Split": _split,
    "Tile": _tile,
    "Slice": _slice,
    "Range": _range,
    "ConstantOfShape": lambda sizes, node: [_read_vector(sizes, node, 0)],
}


# -- contents ---------------------------------------------------------------------------------------------------------


def _shape_contents(_: TrackedArrays, node: ir.Node) -> np.ndarray:
    shape = read_sizes(operand(node, 0))
    return np.array(shape, object)[attribute(node, "start", 0) : attribute(node, "end", len(shape))]


def _gather_contents(sizes: TrackedArrays, node: ir.Node) -> Any:
    data, index = sizes.read_contents(node.inputs[0]), sizes.read_contents(node.inputs[1]).astype(np.int64)
    return np.take(data, index, axis=attribute(node, "axis", 0))


def _slice_contents(sizes: TrackedArrays, node: ir.Node) -> np.ndarray:
    data = sizes.read_contents(node.inputs[0])
    ((_, start, stop, step),) = _read_bounds(sizes, node, data.ndim)
    return data[start:stop:step]


def _concat_contents(sizes: TrackedArrays, node: ir.Node) -> np.ndarray:
    return np.concatenate([sizes.read_contents(v) for v in node.inputs], axis=attribute(node, "axis", 0))


def _reshaped_contents(sizes: TrackedArrays, node: ir.Node) -> np.ndarray:
    """Return the contents of Squeeze, Unsqueeze and Reshape: static shape, unchanged order."""
    shape = [size for size in read_sizes(node.outputs[0]) if isinstance(size, int)]
    if len(shape) != len(dims(node.outputs[0])):
        raise UnknownSizeError
    return sizes.read_contents(node.inputs[0]).reshape(shape)


def _cast_contents(sizes: TrackedArrays, node: ir.Node) -> np.ndarray:
    if node.outputs[0].dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        raise UnknownSizeError
    return sizes.read_contents(node.inputs[0])


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[TrackedArrays, ir.Node], Any]:
    return lambda sizes, node: function(sizes.read_contents(node.inputs[0]), sizes.read_contents(node.inputs[1]))


def _divide_sizes(a: np.ndarray, b: np.ndarray) -> Any:
    if any(isinstance(x, int) and x < 0 for x in [*a.flat, *b.flat]):
        raise UnknownSizeError  # ONNX rounds toward zero
    return a // b


def _equal_contents(sizes: TrackedArrays, node: ir.Node) -> Any:
    """Compare expressions: equal or different if they are for all sizes; a size is never negative."""
    a, b = np.broadcast_arrays(sizes.read_contents(node.inputs[0]), sizes.read_contents(node.inputs[1]))
    return np.array([_is_equal(x, y) for x, y in zip(a.flat, b.flat)] + [None], object)[:-1].reshape(a.shape)


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, ir.SymbolicDim) != isinstance(b, ir.SymbolicDim):
        constant = b if isinstance(a, ir.SymbolicDim) else a
        if constant < 0:
            return False
        raise UnknownSizeError
    if a != b and isinstance(a, ir.SymbolicDim):
        raise UnknownSizeError
    return bool(a == b)


def _where_contents(sizes: TrackedArrays, node: ir.Node) -> Any:
    condition, a, b = np.broadcast_arrays(*(sizes.read_contents(v) for v in node.inputs))
    return np.where(condition.astype(bool), a, b)


def _filled_contents(sizes: TrackedArrays, node: ir.Node) -> np.ndarray:
    shape = [int(s) for s in sizes.read_contents(node.inputs[0])]
    tensor = attribute(node, "value", None)
    if tensor is None or math.prod(shape) > MAX_TRACKED_ELEMENTS:
        raise UnknownSizeError
    return np.full(shape, tensor.numpy().item(), object)


CONTENT_RULES: dict[str, Callable[[TrackedArrays, ir.Node], Any]] = {
    "Shape": _shape_contents,
    "Gather": _gather_contents,
    "Slice": _slice_contents,
    "Concat": _concat_contents,
    "Squeeze": _reshaped_contents,
    "Unsqueeze": _reshaped_contents,
    "Reshape": _reshaped_contents,
    "Identity": lambda sizes, node: sizes.read_contents(node.inputs[0]),
    "Cast": _cast_contents,
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _arithmetic(_divide_sizes),
    "Equal": _equal_contents,
    "Where": _where_contents,
    "ConstantOfShape": _filled_contents,
}
