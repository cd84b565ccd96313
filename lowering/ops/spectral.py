"""ONNX DFT and STFT as matmuls with matrices of cosines and sines: constants where all sizes are numbers.

A complex signal has real and imaginary parts side by side in its last axis, so that a transform is one real matmul:
[..., n * parts] by [n * parts, frequencies * 2].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ..importing import symbolic
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, numpy_dtype, prod
from . import op
from .asserted import asserted, required
from .contents import sizes as contents_of
from .contents import static_axis
from .kernels import compute, let
from .matmul import emit_matmul, permuted, rounded
from .reshape import reshape_to
from .run_time import bind, compute_sizes

_LARGEST = 1 << 13  # places of a transform, whose matrix has its square


@op("DFT", since=17)
def dft_17(node: Node, x: Value, length: Value | None = None) -> Value:
    return _dft(node, x, length, node.attr("axis", 1))


@op("DFT", since=20)
def dft_20(node: Node, x: Value, length: Value | None = None, axis: Value | None = None) -> Value:
    if axis is not None and axis.constant is None:
        return _along_axis_of_run(node, x, length, axis)
    return _dft(node, x, length, -2 if axis is None or axis.constant is None else int(axis.constant.reshape(())))


def _dft(node: Node, x: Value, length: Value | None, axis: int) -> Value:
    """x [..., n, ..., parts] with 1 or 2 parts."""
    axis = static_axis(node, axis, x.rank)
    parts = _parts(node, "input", x)
    if axis == x.rank - 1:
        raise node.error(f"axis {axis} is that of real and imaginary parts.", "Use another one.")
    kind = _Kind.of(node, parts)
    given = x.shape[axis]
    count = _whole(node, "dft_length", length, kind.places(given))
    if not isinstance(given, int) or not isinstance(count, int):
        outer, inner = prod(x.shape[:axis]), prod(x.shape[axis + 1 : -1])
        made = _made(node, kind, count)
        x = required(node, x, symbolic.less_or_equal(0, count), "its transform has {} places.", count)
        shape = (*x.shape[:axis], made, *x.shape[axis + 1 : -1])
        return _of_run(node, x, kind, (outer, given, inner), (count, made), shape)
    order = [*(a for a in range(x.rank) if a not in (axis, x.rank - 1)), axis, x.rank - 1]
    rows = permuted(node, x, order)
    if count < given:
        rows = _cut(node, rows, count)
    taken = min(given, count)
    matrix = _matrix(taken, count, kind).astype(numpy_dtype(x.dtype))
    y = _matmul(node, rows, node.constant(matrix), (kind.made(count), kind.parts_made))
    return permuted(node, y, list(np.argsort(order)))


def _along_axis_of_run(node: Node, x: Value, length: Value | None, axis: Value) -> Value:
    """The same along an axis that the run tells: x [outer, n, inner, parts], whose sizes it computes."""
    kind = _Kind.of(node, _parts(node, "input", x))
    dims, (most, zero) = x.shape[:-1], (tirx.const(n, "int64") for n in (_LARGEST, 0))
    count = None if length is None else _whole(node, "dft_length", length, None)

    def sizes(axis: Any) -> list[Any]:
        at = axis[0].astype("int64")
        at = let(tirx.Select(at < 0, at + x.rank, at))
        along = let(sum((tirx.Select(tirx.EQ(at, zero + k), zero + size, zero) for k, size in enumerate(dims)), zero))
        places = let(zero + (kind.places(along) if count is None else count))
        made = let(kind.made(places))
        outer, inner = (
            let(prod(tirx.Select(is_there(k), zero + size, zero + 1) for k, size in enumerate(dims)))
            for is_there in (lambda k: at > k, lambda k: at < k)
        )
        legal = let(tirx.all(at >= 0, at < len(dims), along <= most, places >= 0, places <= most))
        shape = [tirx.Select(tirx.EQ(at, zero + k), made, zero + size) for k, size in enumerate(dims)]
        return [tirx.Select(legal, size, zero - 1) for size in (outer, along, inner, places, made, *shape)]

    symbols = [size for size in (*dims, count) if size is not None and not isinstance(size, int)]
    places = compute_sizes(node, "transformed", 5 + len(dims), sizes, [reshape_to(node, axis, (1,))], symbols)
    outer, given, inner, count, made, *shape = bind(node, places, of=axis)
    return _of_run(node, x, kind, (outer, given, inner), (count, made), tuple(shape))


def _made(node: Node, kind: _Kind, count: Size) -> Size:
    """Return how many places come of a transform: a symbol of their own, since kernels of GPUs take no quotient."""
    made = kind.made(count)
    if isinstance(made, int) or made is count:
        return made
    (symbol,) = bind(node, compute_sizes(node, "made", 1, lambda: [made], [], [count]))
    return symbol


def _of_run(node: Node, x: Value, kind: _Kind, around: Shape, counts: tuple[Size, Size], shape: Shape) -> Value:
    """Transform x, which is [outer, n, inner, parts], into a result of that shape, and parts. counts is of how many
    places the transform is, and how many come of it."""
    outer, given, inner = around
    rows = permuted(node, reshape_to(node, x, (outer, given, inner, kind.parts)), [0, 2, 1, 3])
    matrix = _matrix_of_run(node, given, counts, kind, x.dtype)
    y = _matmul(node, rows, matrix, (counts[1], kind.parts_made))
    return reshape_to(node, permuted(node, y, [0, 2, 1, 3]), (*shape, kind.parts_made))


@op("STFT", since=17)
def stft(
    node: Node, signal: Value, frame_step: Value, window: Value | None = None, frame_length: Value | None = None
) -> Value:
    """[B, frames, frequencies, 2] of a signal [B, L, parts], or [B, L]."""
    if signal.rank == 2:
        signal = reshape_to(node, signal, (*signal.shape, 1))
    if signal.rank != 3:
        raise node.error(f"input signal has rank {signal.rank}.", "Make it [batch, length, 1 or 2].")
    default = None if window is None else _of_one_axis(node, window).shape[0]
    if default is None and frame_length is None:
        default = signal.shape[1]
    kind = _Kind(_parts(node, "signal", signal), False, bool(node.attr("onesided", 1)) and signal.shape[2] == 1)
    count = _whole(node, "frame_length", frame_length, default)
    batch, length, _ = signal.shape
    signal = required(node, signal, symbolic.less(0, count), "frame_length is {}, and must be positive.", count)
    fits, text = symbolic.less_or_equal(count, length), "a signal of {} places has no frame of {}."
    signal = required(node, signal, fits, text, length, count)
    step, frames = _frames(node, frame_step, length, count)
    weights = []
    if window is not None:
        window = asserted(node, window, (count,))
        weights = [window] if window.constant is None or not isinstance(count, int) else []
    made = _made(node, kind, count)
    if isinstance(count, int):
        scale = np.ones(count) if window is None or window.constant is None else window.constant.astype(np.float64)
        numbers = _matrix(count, count, kind) * np.repeat(scale, kind.parts)[:, None]
        matrix = node.constant(numbers.astype(numpy_dtype(signal.dtype)))
    else:
        matrix = _matrix_of_run(node, count, (count, made), kind, signal.dtype)

    def element(index: tuple[Any, ...], x: Any, *others: Any) -> Any:
        b, frame, place, part = index
        *weigh, step = others
        value = x(b, frame * step + place, part)
        return value * weigh[0](place) if weigh else value

    rows = compute(node, "frames", element, [signal, *weights], (batch, frames, count, kind.parts), sizes=[step])
    return _matmul(node, rows, matrix, (made, kind.parts_made))


def _frames(node: Node, frame_step: Value, length: Size, count: Size) -> tuple[Size, Size]:
    """Return how far frames lie apart, and how many there are."""
    known = contents_of(reshape_to(node, frame_step, (1,)))
    if known is not None and isinstance(known[0], int):
        if known[0] < 1:
            raise node.error(f"frame_step is {known[0]}.", "Make it positive.")
        between = symbolic.floor_divide(symbolic.subtract(length, count), known[0])
        return known[0], node.simplify(symbolic.add(between, 1))

    def sizes(step: Any) -> list[Any]:
        number = let(step[0].astype("int64"))
        safe = tirx.max(number, tirx.const(1, "int64"))
        found = [number, tirx.floordiv(tirx.const(0, "int64") + length - count, safe) + 1]
        return [tirx.Select(number > 0, size, tirx.const(-1, "int64")) for size in found]

    symbols = [size for size in (length, count) if not isinstance(size, int)]
    step, frames = bind(
        node, compute_sizes(node, "steps", 2, sizes, [reshape_to(node, frame_step, (1,))], symbols), of=frame_step
    )
    return step, frames


def _of_one_axis(node: Node, window: Value) -> Value:
    if window.rank != 1:
        raise node.error(f"input window has rank {window.rank}.", "Make it 1.")
    return window


def _parts(node: Node, name: str, x: Value) -> int:
    if x.rank < 2 or x.shape[-1] not in (1, 2):
        shape = list(x.shape)
        raise node.error(f"input {name} is {shape}.", "Its last axis has 1 part, the real one, or 2.")
    return int(x.shape[-1])


def _whole(node: Node, name: str, value: Value | None, default: Size | None) -> Size:
    """A number, or the symbol of one that the run tells."""
    known = [default] if value is None else contents_of(reshape_to(node, value, (1,)))
    if known is None:
        assert value is not None
        known = bind(node, reshape_to(node, value, (1,)), of=value)
    if isinstance(known[0], int) and not 0 <= known[0] <= _LARGEST:
        raise node.error(f"{name} is {known[0]}.", f"Use 0 to {_LARGEST}.")
    return known[0]


def _cut(node: Node, rows: Value, count: int) -> Value:
    shape = (*rows.shape[:-2], count, rows.shape[-1])
    return compute(node, "cut", lambda index, x: x(*index), [rows], shape)


@dataclass(frozen=True)
class _Kind:
    """A transform: of how many parts its input is, and the attributes inverse and onesided."""

    parts: int
    inverse: bool
    onesided: bool

    @staticmethod
    def of(node: Node, parts: int) -> _Kind:
        kind = _Kind(parts, bool(node.attr("inverse", 0)), bool(node.attr("onesided", 0)))
        if kind.is_real and parts == 1:
            raise node.error("a one-sided inverse needs real and imaginary parts.", "Give a complex input.")
        return kind

    @property
    def is_real(self) -> bool:
        """Whether it makes real numbers of the frequencies up to the half."""
        return self.inverse and self.onesided

    @property
    def parts_made(self) -> int:
        return 1 if self.is_real else 2

    def places(self, given: Size) -> Size:
        """Return of how many places it is by default."""
        return 2 * (given - 1) if self.is_real else given

    def made(self, count: Size) -> Size:
        """Return how many places come of it."""
        return symbolic.floor_divide(count, 2) + 1 if self.onesided and not self.inverse else count


def _matrix(taken: int, count: int, kind: _Kind) -> np.ndarray:
    """Return the matrix of the first `taken` of `count` places."""
    parts, made = kind.parts, kind.made(count)
    if kind.is_real:
        k, t = np.arange(taken), np.arange(count)
        half = count // 2 + 1
        angle = 2 * np.pi * np.outer(k, t) / max(count, 1)
        twice = np.where((k == 0) | ((count % 2 == 0) & (k == count // 2)), 1.0, 2.0) * (k < half) / max(count, 1)
        both = np.stack([np.cos(angle) * twice[:, None], -np.sin(angle) * twice[:, None]], axis=1)
        return both.reshape(taken * 2, count)
    sign = 1.0 if kind.inverse else -1.0
    # Of the matmul of indices only the remainder counts, which floats hold exactly.
    angle = 2 * np.pi * (np.outer(np.arange(taken), np.arange(made)) % max(count, 1)) / max(count, 1)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    real = np.stack([cos, sin], axis=2)  # of a real part: [place, frequency, part]
    every = real[:, None] if parts == 1 else np.stack([real, np.stack([-sin, cos], axis=2)], axis=1)
    every = every / count if kind.inverse else every
    return every.reshape(taken * parts, made * 2)


def _matrix_of_run(node: Node, given: Size, counts: tuple[Size, Size], kind: _Kind, dtype: str) -> Value:
    """Emit the same matrix for counts of places and of what comes of them, with rows of zeros behind the former."""
    zero, one, two = (tirx.const(n, "int64") for n in (0, 1, 2))

    def element(index: tuple[Any, ...], count: Any) -> Any:
        row, column = index
        k, part = tirx.floordiv(row, kind.parts * one), tirx.floormod(row, kind.parts * one)
        m, made_part = tirx.floordiv(column, kind.parts_made * one), tirx.floormod(column, kind.parts_made * one)
        length = tirx.max(zero + count, one)
        turn = tirx.floormod(k * m, length).astype("float64") / length.astype("float64")
        angle = turn * tirx.const(2 * math.pi, "float64")
        cos, sin = tirx.cos(angle), tirx.sin(angle)
        if kind.is_real:
            alone = tirx.any(tirx.EQ(k, zero), tirx.EQ(k * two, count))
            twice = tirx.Select(alone, tirx.const(1.0, "float64"), tirx.const(2.0, "float64"))
            value = tirx.Select(tirx.EQ(part, zero), cos, -sin) * twice
            is_there = tirx.all(k < count, k * two <= count)
        else:
            sin = sin if kind.inverse else -sin
            crossed = tirx.Select(part > made_part, -sin, sin)
            value = tirx.Select(tirx.EQ(part, made_part), cos, crossed)
            is_there = k < count
        value = value / length.astype("float64") if kind.inverse else value
        return tirx.Select(is_there, value, tirx.const(0.0, "float64")).astype(dtype)

    shape = (given * kind.parts, counts[1] * kind.parts_made)
    return compute(node, "waves", element, [], tuple(map(node.simplify, shape)), sizes=[counts[0]], dtype=dtype)


def _matmul(node: Node, rows: Value, matrix: Value, made: Shape) -> Value:
    """rows [..., n, parts] by the matrix, [..., *made]."""
    outer = rows.shape[:-2]
    flat = reshape_to(node, rows, (*outer, matrix.shape[0]))
    y = rounded(node, emit_matmul(node, flat, matrix), rows.dtype)
    return reshape_to(node, y, (*outer, *made))
