"""ONNX DFT and STFT as products with matrices of cosines and sines, which numbers of places make constants.

A complex signal has real and imaginary parts side by side in its last axis, so that a transform is one real product:
[..., n * parts] by [n * parts, frequencies * 2].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..importing import symbolic
from ..importing.compute import number
from ..importing.node import Node
from ..importing.values import Size, Value, numpy_dtype
from . import op
from .asserted import asserted, required
from .contents import sizes as contents_of
from .contents import static_axis
from .kernels import compute
from .matmul import matrix_product, permuted, rounded
from .reshape import reshape_to

_LARGEST = 1 << 13  # places of a transform, whose matrix has its square


@op("DFT", since=17)
def dft_17(node: Node, x: Value, length: Value | None = None) -> Value:
    return _dft(node, x, length, node.attr("axis", 1))


@op("DFT", since=20)
def dft_20(node: Node, x: Value, length: Value | None = None, axis: Value | None = None) -> Value:
    if axis is not None and axis.constant is None:
        raise node.error("input axis is computed at run time.", "Make it a constant.")
    return _dft(node, x, length, -2 if axis is None or axis.constant is None else int(axis.constant.reshape(())))


def _dft(node: Node, x: Value, length: Value | None, axis: int) -> Value:
    """x [..., n, ..., parts] with 1 or 2 parts."""
    axis = static_axis(node, axis, x.rank)
    parts = _parts(node, "input", x)
    if axis == x.rank - 1:
        raise node.error(f"axis {axis} is that of real and imaginary parts.", "Use another one.")
    inverse, onesided = bool(node.attr("inverse", 0)), bool(node.attr("onesided", 0))
    if inverse and onesided and parts == 1:
        raise node.error("a one-sided inverse needs real and imaginary parts.", "Give a complex input.")
    given = number(node, f"dimension {axis} of input", x.shape[axis])
    count = _whole(node, "dft_length", length, 2 * (given - 1) if inverse and onesided else given)
    order = [*(a for a in range(x.rank) if a not in (axis, x.rank - 1)), axis, x.rank - 1]
    rows = permuted(node, x, order)
    if count < given:
        rows = _cut(node, rows, count)
    taken = min(given, count)
    matrix, made = _matrix(taken, count, parts, inverse, onesided)
    y = _product(node, rows, matrix.astype(numpy_dtype(x.dtype)), made)
    return permuted(node, y, list(np.argsort(order)))


@op("STFT", since=17)
def stft(
    node: Node, signal: Value, frame_step: Value, window: Value | None = None, frame_length: Value | None = None
) -> Value:
    """[B, frames, frequencies, 2] of a signal [B, L, parts], or [B, L]."""
    if signal.rank == 2:
        signal = reshape_to(node, signal, (*signal.shape, 1))
    if signal.rank != 3:
        raise node.error(f"input signal has rank {signal.rank}.", "Make it [batch, length, 1 or 2].")
    parts, step = _parts(node, "signal", signal), _whole(node, "frame_step", frame_step, 0)
    default = None if window is None else window.shape[0]
    if default is None and frame_length is None:
        default = signal.shape[1]
    count = _whole(node, "frame_length", frame_length, default)
    if step < 1 or count < 1:
        raise node.error(f"frame_step is {step} and frame_length {count}.", "Make both positive.")
    batch, length, _ = signal.shape
    signal = required(
        node, signal, symbolic.less_or_equal(count, length), f"a signal of {{}} places has no frame of {count}.", length
    )
    frames = node.simplify(symbolic.add(symbolic.floor_divide(symbolic.subtract(length, count), step), 1))
    weights = np.ones(count, np.float64)
    computed = None
    if window is not None:
        window = asserted(node, _of_one_axis(node, window), (count,))
        if window.constant is not None:
            weights = window.constant.astype(np.float64)
        else:
            computed = window
    onesided = bool(node.attr("onesided", 1)) and parts == 1
    matrix, made = _matrix(count, count, parts, inverse=False, onesided=onesided)
    matrix = matrix * np.repeat(weights, parts)[:, None]

    def element(index: tuple[Any, ...], x: Any, *window: Any) -> Any:
        b, frame, place, part = index
        value = x(b, frame * step + place, part)
        return value * window[0](place) if window else value

    given = [signal] if computed is None else [signal, computed]
    rows = compute(node, "frames", element, given, (batch, frames, count, parts))
    return _product(node, rows, matrix.astype(numpy_dtype(signal.dtype)), made)


def _of_one_axis(node: Node, window: Value) -> Value:
    if window.rank != 1:
        raise node.error(f"input window has rank {window.rank}.", "Make it 1.")
    return window


def _parts(node: Node, name: str, x: Value) -> int:
    if x.rank < 2 or x.shape[-1] not in (1, 2):
        shape = list(x.shape)
        raise node.error(f"input {name} is {shape}.", "Its last axis has 1 part, the real one, or 2.")
    return int(x.shape[-1])


def _whole(node: Node, name: str, value: Value | None, default: Size | None) -> int:
    """A number that is known now."""
    known = [default] if value is None else contents_of(reshape_to(node, value, (1,)))
    if known is None or not isinstance(known[0], int):
        raise node.error(f"{name} is not known before the run.", "Make it a number.")
    if not 0 <= known[0] <= _LARGEST:
        raise node.error(f"{name} is {known[0]}.", f"Use 0 to {_LARGEST}.")
    return known[0]


def _cut(node: Node, rows: Value, count: int) -> Value:
    shape = (*rows.shape[:-2], count, rows.shape[-1])
    return compute(node, "cut", lambda index, x: x(*index), [rows], shape)


def _matrix(taken: int, count: int, parts: int, inverse: bool, onesided: bool) -> tuple[np.ndarray, tuple[int, int]]:
    """The matrix of the first `taken` of `count` places, and how many places and parts come of it."""
    if inverse and onesided:  # real places of the frequencies up to the half of them
        k, t = np.arange(taken), np.arange(count)
        half = count // 2 + 1
        angle = 2 * np.pi * np.outer(k, t) / max(count, 1)
        twice = np.where((k == 0) | ((count % 2 == 0) & (k == count // 2)), 1.0, 2.0) * (k < half) / max(count, 1)
        both = np.stack([np.cos(angle) * twice[:, None], -np.sin(angle) * twice[:, None]], axis=1)
        return both.reshape(taken * 2, count), (count, 1)
    made = count // 2 + 1 if onesided else count
    sign = 1.0 if inverse else -1.0
    # Of the product of indices only the remainder counts, which floats hold exactly.
    angle = 2 * np.pi * (np.outer(np.arange(taken), np.arange(made)) % max(count, 1)) / max(count, 1)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    real = np.stack([cos, sin], axis=2)  # of a real part: [place, frequency, part]
    every = real[:, None] if parts == 1 else np.stack([real, np.stack([-sin, cos], axis=2)], axis=1)
    every = every / count if inverse else every
    return every.reshape(taken * parts, made * 2), (made, 2)


def _product(node: Node, rows: Value, matrix: np.ndarray, made: tuple[int, int]) -> Value:
    """rows [..., n, parts] by the matrix, [..., *made]."""
    outer = rows.shape[:-2]
    flat = reshape_to(node, rows, (*outer, matrix.shape[0]))
    y = rounded(node, matrix_product(node, flat, node.constant(matrix)), rows.dtype)
    return reshape_to(node, y, (*outer, *made))
