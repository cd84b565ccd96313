"""ONNX DFT and STFT as matmuls with matrices of cosines and sines: constants where all sizes are static.

A complex signal has real and imaginary components next to each other in its last axis. So a transform is one real
matmul: [..., n * components] by [n * components, frequencies * 2].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, numpy_dtype, prod
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.contents import normalize_axis, read_sizes
from ..helpers.kernels import compute, let
from ..helpers.requirements import require_rank
from ..helpers.run_time import bind_sizes, compute_sizes
from ..tensor.reshape import reshape_to
from .matmul import emit_matmul, permute_axes, round_to

_MAX_LENGTH = 1 << 13  # of a transform, whose matrix has its square


@op("DFT", since=17)
def dft_17(node: Node, x: Value, length: Value | None = None) -> Value:
    return _emit_dft(node, x, length, node.attr("axis", 1))


@op("DFT", since=20)
def dft_20(node: Node, x: Value, length: Value | None = None, axis: Value | None = None) -> Value:
    if axis is not None and axis.constant is None:
        return _transform_runtime_axis(node, x, length, axis)
    return _emit_dft(node, x, length, -2 if axis is None or axis.constant is None else int(axis.constant.reshape(())))


def _emit_dft(node: Node, x: Value, length: Value | None, axis: int) -> Value:
    """Emit the transform of x [..., n, ..., components] with 1 or 2 components."""
    axis = normalize_axis(node, axis, x.rank)
    components = _read_components(node, "input", x)
    if axis == x.rank - 1:
        raise node.error(
            "dft.axis_unsupported", f"axis {axis} is the axis of real and imaginary parts.", "Use another axis."
        )
    kind = _Transform.read(node, components)
    length_in = x.shape[axis]
    count = _read_length(node, "dft_length", length, kind.default_length(length_in))
    if not isinstance(length_in, int) or not isinstance(count, int):
        outer, inner = prod(x.shape[:axis]), prod(x.shape[axis + 1 : -1])
        out_count = _bind_output_count(node, kind, count)
        x = require(
            node,
            x,
            symbolic.less_or_equal(0, count),
            "dft.length_negative",
            "the length of its transform is {}, and must not be negative.",
            count,
        )
        shape = (*x.shape[:axis], out_count, *x.shape[axis + 1 : -1])
        return _transform_runtime_sizes(node, x, kind, (outer, length_in, inner), (count, out_count), shape)
    order = [*(a for a in range(x.rank) if a not in (axis, x.rank - 1)), axis, x.rank - 1]
    rows = permute_axes(node, x, order)
    if count < length_in:
        rows = _truncate(node, rows, count)
    row_count = min(length_in, count)
    matrix = _make_matrix(row_count, count, kind).astype(numpy_dtype(x.dtype))
    y = _emit_transform(node, rows, node.constant(matrix), (kind.count_outputs(count), kind.out_components))
    return permute_axes(node, y, list(np.argsort(order)))


def _transform_runtime_axis(node: Node, x: Value, length: Value | None, axis: Value) -> Value:
    """Emit the transform along a dynamic axis.

    A kernel computes the sizes of x as [outer, n, inner, components].
    """
    kind = _Transform.read(node, _read_components(node, "input", x))
    dims, (max_length, zero) = x.shape[:-1], (tirx.const(n, "int64") for n in (_MAX_LENGTH, 0))
    count = None if length is None else _read_length(node, "dft_length", length, None)

    def sizes(axis: Any) -> list[Any]:
        position = axis[0].astype("int64")
        position = let(tirx.Select(position < 0, position + x.rank, position))
        axis_length = let(
            sum((tirx.Select(tirx.EQ(position, zero + k), zero + size, zero) for k, size in enumerate(dims)), zero)
        )
        length_of_transform = let(zero + (kind.default_length(axis_length) if count is None else count))
        out_count = let(kind.count_outputs(length_of_transform))
        outer, inner = (
            let(prod(tirx.Select(is_there(k), zero + size, zero + 1) for k, size in enumerate(dims)))
            for is_there in (lambda k: position > k, lambda k: position < k)
        )
        legal = let(
            tirx.all(
                position >= 0,
                position < len(dims),
                axis_length <= max_length,
                length_of_transform >= 0,
                length_of_transform <= max_length,
            )
        )
        shape = [tirx.Select(tirx.EQ(position, zero + k), out_count, zero + size) for k, size in enumerate(dims)]
        return [
            tirx.Select(legal, size, zero - 1)
            for size in (outer, axis_length, inner, length_of_transform, out_count, *shape)
        ]

    symbols = [size for size in (*dims, count) if size is not None and not isinstance(size, int)]
    size_table = compute_sizes(node, "transformed", 5 + len(dims), sizes, [reshape_to(node, axis, (1,))], symbols)
    outer, length_in, inner, count, out_count, *shape = bind_sizes(node, size_table, source=axis)
    return _transform_runtime_sizes(node, x, kind, (outer, length_in, inner), (count, out_count), tuple(shape))


def _bind_output_count(node: Node, kind: _Transform, count: Size) -> Size:
    """Return the number of outputs of a transform.

    It is a symbol of its own, since GPU kernels do not accept a quotient.
    """
    out_count = kind.count_outputs(count)
    if isinstance(out_count, int) or out_count is count:
        return out_count
    (symbol,) = bind_sizes(node, compute_sizes(node, "made", 1, lambda: [out_count], [], [count]))
    return symbol


def _transform_runtime_sizes(
    node: Node, x: Value, kind: _Transform, in_sizes: Shape, counts: tuple[Size, Size], shape: Shape
) -> Value:
    """Transform x, which is [outer, n, inner, components], into a result of that shape and components.

    counts is the length of the transform and the number of its outputs.
    """
    outer, length_in, inner = in_sizes
    rows = permute_axes(node, reshape_to(node, x, (outer, length_in, inner, kind.components)), [0, 2, 1, 3])
    matrix = _emit_matrix(node, length_in, counts, kind, x.dtype)
    y = _emit_transform(node, rows, matrix, (counts[1], kind.out_components))
    return reshape_to(node, permute_axes(node, y, [0, 2, 1, 3]), (*shape, kind.out_components))


@op("STFT", since=17)
def stft(
    node: Node, signal: Value, frame_step: Value, window: Value | None = None, frame_length: Value | None = None
) -> Value:
    """Emit [B, frames, frequencies, 2] of a signal [B, L, components], or [B, L]."""
    if signal.rank == 2:
        signal = reshape_to(node, signal, (*signal.shape, 1))
    require_rank(node, "signal", signal, "[batch, length, 1 or 2]", code="stft.rank_unsupported")
    default = None if window is None else _require_vector(node, window).shape[0]
    if default is None and frame_length is None:
        default = signal.shape[1]
    kind = _Transform(
        _read_components(node, "signal", signal), False, bool(node.attr("onesided", 1)) and signal.shape[2] == 1
    )
    count = _read_length(node, "frame_length", frame_length, default)
    batch, length, _ = signal.shape
    signal = require(
        node,
        signal,
        symbolic.less(0, count),
        "stft.frame_length_out_of_range",
        "frame_length is {}, and must be positive.",
        count,
    )
    fits, text = symbolic.less_or_equal(count, length), "a signal of {} elements is shorter than a frame of {}."
    signal = require(node, signal, fits, "stft.signal_too_short", text, length, count)
    step, frames = _read_frames(node, frame_step, length, count)
    weights = []
    if window is not None:
        window = assert_shape(node, window, (count,))
        weights = [window] if window.constant is None or not isinstance(count, int) else []
    out_count = _bind_output_count(node, kind, count)
    if isinstance(count, int):
        scale = np.ones(count) if window is None or window.constant is None else window.constant.astype(np.float64)
        numbers = _make_matrix(count, count, kind) * np.repeat(scale, kind.components)[:, None]
        matrix = node.constant(numbers.astype(numpy_dtype(signal.dtype)))
    else:
        matrix = _emit_matrix(node, count, (count, out_count), kind, signal.dtype)

    def element(index: tuple[Any, ...], x: Any, *window_and_step: Any) -> Any:
        b, frame, position, component = index
        *factors, step = window_and_step
        value = x(b, frame * step + position, component)
        return value * factors[0](position) if factors else value

    rows = compute(node, "frames", element, [signal, *weights], (batch, frames, count, kind.components), sizes=[step])
    return _emit_transform(node, rows, matrix, (out_count, kind.out_components))


def _read_frames(node: Node, frame_step: Value, length: Size, count: Size) -> tuple[Size, Size]:
    """Return the distance between frames, and their number."""
    static_step = read_sizes(reshape_to(node, frame_step, (1,)))
    if static_step is not None and isinstance(static_step[0], int):
        if static_step[0] < 1:
            raise node.error("stft.frame_step_out_of_range", f"frame_step is {static_step[0]}.", "Use a positive step.")
        between = symbolic.floor_divide(symbolic.subtract(length, count), static_step[0])
        return static_step[0], node.simplify(symbolic.add(between, 1))

    def sizes(step: Any) -> list[Any]:
        number = let(step[0].astype("int64"))
        safe = tirx.max(number, tirx.const(1, "int64"))
        frame_sizes = [number, tirx.floordiv(tirx.const(0, "int64") + length - count, safe) + 1]
        return [tirx.Select(number > 0, size, tirx.const(-1, "int64")) for size in frame_sizes]

    symbols = [size for size in (length, count) if not isinstance(size, int)]
    step, frames = bind_sizes(
        node, compute_sizes(node, "steps", 2, sizes, [reshape_to(node, frame_step, (1,))], symbols), source=frame_step
    )
    return step, frames


def _require_vector(node: Node, window: Value) -> Value:
    require_rank(node, "window", window, "[length]", code="node.vector_required")
    return window


def _read_components(node: Node, name: str, x: Value) -> int:
    if x.rank < 2 or x.shape[-1] not in (1, 2):
        shape = list(x.shape)
        raise node.error(
            "node.components_unsupported",
            f"input {name} has the shape {shape}.",
            "Use a last axis of 1 (real) or 2 (real and imaginary) elements.",
        )
    return int(x.shape[-1])


def _read_length(node: Node, name: str, value: Value | None, default: Size | None) -> Size:
    """Return a number, or the symbol of one that is bound at run time."""
    lengths = [default] if value is None else read_sizes(reshape_to(node, value, (1,)))
    if lengths is None:
        assert value is not None
        lengths = bind_sizes(node, reshape_to(node, value, (1,)), source=value)
    if isinstance(lengths[0], int) and not 0 <= lengths[0] <= _MAX_LENGTH:
        raise node.error("node.value_out_of_range", f"{name} is {lengths[0]}.", f"Use 0 to {_MAX_LENGTH}.")
    return lengths[0]


def _truncate(node: Node, rows: Value, count: int) -> Value:
    shape = (*rows.shape[:-2], count, rows.shape[-1])
    return compute(node, "cut", lambda index, x: x(*index), [rows], shape)


@dataclass(frozen=True)
class _Transform:
    """A transform: the number of components of its input, and the attributes inverse and onesided."""

    components: int
    inverse: bool
    onesided: bool

    @staticmethod
    def read(node: Node, components: int) -> _Transform:
        kind = _Transform(components, bool(node.attr("inverse", 0)), bool(node.attr("onesided", 0)))
        if kind.is_real and components == 1:
            raise node.error(
                "dft.complex_input_required",
                "a one-sided inverse needs real and imaginary parts.",
                "Give a complex input.",
            )
        return kind

    @property
    def is_real(self) -> bool:
        """Return whether it computes real numbers from the frequencies up to the half."""
        return self.inverse and self.onesided

    @property
    def out_components(self) -> int:
        return 1 if self.is_real else 2

    def default_length(self, in_length: Size) -> Size:
        """Return its default length."""
        return 2 * (in_length - 1) if self.is_real else in_length

    def count_outputs(self, count: Size) -> Size:
        """Return the number of its outputs."""
        return symbolic.floor_divide(count, 2) + 1 if self.onesided and not self.inverse else count


def _make_matrix(row_count: int, count: int, kind: _Transform) -> np.ndarray:
    """Return the first `row_count` rows of the matrix of a transform of length `count`."""
    components, out_count = kind.components, kind.count_outputs(count)
    if kind.is_real:
        k, t = np.arange(row_count), np.arange(count)
        half = count // 2 + 1
        angle = 2 * np.pi * np.outer(k, t) / max(count, 1)
        twice = np.where((k == 0) | ((count % 2 == 0) & (k == count // 2)), 1.0, 2.0) * (k < half) / max(count, 1)
        components_of_rows = np.stack([np.cos(angle) * twice[:, None], -np.sin(angle) * twice[:, None]], axis=1)
        return components_of_rows.reshape(row_count * 2, count)
    sign = 1.0 if kind.inverse else -1.0
    # Only the remainder of index times index matters, which floats represent exactly.
    angle = 2 * np.pi * (np.outer(np.arange(row_count), np.arange(out_count)) % max(count, 1)) / max(count, 1)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    real = np.stack([cos, sin], axis=2)  # of a real component: [position, frequency, component]
    matrix = real[:, None] if components == 1 else np.stack([real, np.stack([-sin, cos], axis=2)], axis=1)
    matrix = matrix / count if kind.inverse else matrix
    return matrix.reshape(row_count * components, out_count * 2)


def _emit_matrix(node: Node, row_length: Size, counts: tuple[Size, Size], kind: _Transform, dtype: str) -> Value:
    """Emit the same matrix for a dynamic length and number of outputs, followed by rows of zeros."""
    zero, unit, two = (tirx.const(n, "int64") for n in (0, 1, 2))

    def element(index: tuple[Any, ...], count: Any) -> Any:
        row, column = index
        k, component = tirx.floordiv(row, kind.components * unit), tirx.floormod(row, kind.components * unit)
        m, out_component = (
            tirx.floordiv(column, kind.out_components * unit),
            tirx.floormod(column, kind.out_components * unit),
        )
        length = tirx.max(zero + count, unit)
        rotation = tirx.floormod(k * m, length).astype("float64") / length.astype("float64")
        angle = rotation * tirx.const(2 * math.pi, "float64")
        cos, sin = tirx.cos(angle), tirx.sin(angle)
        if kind.is_real:
            is_unpaired = tirx.any(tirx.EQ(k, zero), tirx.EQ(k * two, count))
            twice = tirx.Select(is_unpaired, tirx.const(1.0, "float64"), tirx.const(2.0, "float64"))
            value = tirx.Select(tirx.EQ(component, zero), cos, -sin) * twice
            exists = tirx.all(k < count, k * two <= count)
        else:
            sin = sin if kind.inverse else -sin
            crossed = tirx.Select(component > out_component, -sin, sin)
            value = tirx.Select(tirx.EQ(component, out_component), cos, crossed)
            exists = k < count
        value = value / length.astype("float64") if kind.inverse else value
        return tirx.Select(exists, value, tirx.const(0.0, "float64")).astype(dtype)

    shape = (row_length * kind.components, counts[1] * kind.out_components)
    return compute(node, "waves", element, [], tuple(map(node.simplify, shape)), sizes=[counts[0]], dtype=dtype)


def _emit_transform(node: Node, rows: Value, matrix: Value, out_shape: Shape) -> Value:
    """Emit rows [..., n, components] times the matrix, [..., *out_shape]."""
    outer = rows.shape[:-2]
    flat = reshape_to(node, rows, (*outer, matrix.shape[0]))
    y = round_to(node, emit_matmul(node, flat, matrix), rows.dtype)
    return reshape_to(node, y, (*outer, *out_shape))
