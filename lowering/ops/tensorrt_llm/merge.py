"""Attention over two sets of keys, made one; and the rows of the result where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.kv_write import encoded_e4m3, rounded
from ...attention.parameters import int64
from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ..kernels import compute
from .requests import Requests

Read = Callable[..., Any]
Part = dict[str, Value]


def merged_lse(node: Node, one: Value, other: Value) -> Value:
    """log(exp(a) + exp(b)), -inf where both are."""

    def element(index: tuple[Expr, ...], a: Read, b: Read) -> Expr:
        top, low = tirx.max(a(*index), b(*index)), tirx.min(a(*index), b(*index))
        none = tirx.const(float("-inf"), "float32")
        return tirx.Select(tirx.EQ(low, none), top, top + tirx.log(tirx.const(1.0, "float32") + tirx.exp(low - top)))

    return compute(node, "merged_lse", element, [one, other], one.shape)


def context_of(
    node: Node, parts: list[Part], lse: Value | None, requests: Requests, shape: Shape, dtype: str, scale: Value | None
) -> Value:
    """[..., Hq * D] in that type: the attentions of the parts, weighted by what their sums are of the whole, whose lse
    is that; rows of padding are 0. With a scale they are float8_e4m3fn of so many times the values."""
    size, arrays = parts[0]["y"].shape[-1], {"packed": requests["packed"]}
    for k, part in enumerate(parts):
        arrays[f"y_{k}"] = part["y"]
        if lse is not None:
            arrays[f"lse_{k}"] = part["lse"]
    if lse is not None:
        arrays["lse"] = lse
    if scale is not None:
        arrays["scale"] = scale

    def element(index: tuple[Expr, ...], *given: Read) -> Expr:
        reads, column = dict(zip(arrays, given)), index[-1]
        packed = reads["packed"](_row(index, shape, given[len(arrays) :]))
        n, h, d = tirx.max(packed, int64(0)), tirx.floordiv(column, int64(size)), tirx.floormod(column, int64(size))
        zero = tirx.const(0.0, "float32")
        if lse is None:
            value = reads["y_0"](n, h, d).astype("float32")
        else:
            whole, none, value = reads["lse"](n, h), tirx.const(float("-inf"), "float32"), zero
            for k in range(len(parts)):
                share = reads[f"lse_{k}"](n, h)
                term = reads[f"y_{k}"](n, h, d).astype("float32") * tirx.exp(share - whole)
                value = value + tirx.Select(tirx.EQ(share, none), zero, term)
        value = tirx.if_then_else(packed < 0, zero, value)
        if scale is None:
            return value.astype(dtype)
        return encoded_e4m3(rounded(value, dtype) * reads["scale"](int64(0)))

    made, sizes = "float8_e4m3fn" if scale is not None else dtype, _rows_each(shape)
    return compute(node, "context", element, list(arrays.values()), shape, sizes, dtype=made)


def lse_of(node: Node, lse: Value, requests: Requests, shape: Shape) -> Value:
    """[..., Hq] float32, -inf in rows of padding."""

    def element(index: tuple[Expr, ...], lse: Read, packed: Read, *each: Expr) -> Expr:
        at = packed(_row(index, shape, each))
        none = tirx.const(float("-inf"), "float32")
        return tirx.if_then_else(at < 0, none, lse(tirx.max(at, int64(0)), index[-1]))

    return compute(node, "lse", element, [lse, requests["packed"]], shape, _rows_each(shape))


def _rows_each(shape: Shape) -> list[Size]:
    """What a kernel must be told to number rows of that shape."""
    return [shape[1]] if len(shape) == 3 else []


def _row(index: tuple[Expr, ...], shape: Shape, each: Sequence[Any]) -> Expr:
    """The number of the row, of all sequences."""
    return index[0] * each[0] + index[1] if len(shape) == 3 else index[0]
