"""Merge of attentions over two sets of keys, and the order of the result's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.cache_elements import encode_e4m3, round_to_dtype
from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ..helpers.kernels import compute
from .requests import GptRequests

Read = Callable[..., Any]
PartialAttention = dict[str, Value]


def merge_lse(node: Node, lse_a: Value, lse_b: Value) -> Value:
    """Return log(exp(a) + exp(b)), -inf where both are -inf."""

    def element(index: tuple[Expr, ...], a: Read, b: Read) -> Expr:
        top, low = tirx.max(a(*index), b(*index)), tirx.min(a(*index), b(*index))
        minus_inf = tirx.const(float("-inf"), "float32")
        return tirx.Select(
            tirx.EQ(low, minus_inf), top, top + tirx.log(tirx.const(1.0, "float32") + tirx.exp(low - top))
        )

    return compute(node, "merged_lse", element, [lse_a, lse_b], lse_a.shape)


def merge_context(
    node: Node,
    partials: list[PartialAttention],
    lse: Value | None,
    requests: GptRequests,
    shape: Shape,
    dtype: str,
    scale: Value | None,
) -> Value:
    """Return context [..., Hq * D] of this type: the sum of the partial attentions, weighted by exp(their lse - lse).

    Rows of padding are 0. With a scale, the result is float8_e4m3fn of the values times the scale.
    """
    size, arrays = partials[0]["y"].shape[-1], {"packed": requests["packed"]}
    for k, partial in enumerate(partials):
        arrays[f"y_{k}"] = partial["y"]
        if lse is not None:
            arrays[f"lse_{k}"] = partial["lse"]
    if lse is not None:
        arrays["lse"] = lse
    if scale is not None:
        arrays["scale"] = scale

    def element(index: tuple[Expr, ...], *operands: Read) -> Expr:
        reads, column = dict(zip(arrays, operands)), index[-1]
        packed = reads["packed"](_number_row(index, shape, operands[len(arrays) :]))
        n, h, d = tirx.max(packed, int64(0)), tirx.floordiv(column, int64(size)), tirx.floormod(column, int64(size))
        zero = tirx.const(0.0, "float32")
        if lse is None:
            value = reads["y_0"](n, h, d).astype("float32")
        else:
            total_lse, minus_inf, value = reads["lse"](n, h), tirx.const(float("-inf"), "float32"), zero
            for k in range(len(partials)):
                partial_lse = reads[f"lse_{k}"](n, h)
                term = reads[f"y_{k}"](n, h, d).astype("float32") * tirx.exp(partial_lse - total_lse)
                value = value + tirx.Select(tirx.EQ(partial_lse, minus_inf), zero, term)
        value = tirx.if_then_else(packed < 0, zero, value)
        if scale is None:
            return value.astype(dtype)
        return encode_e4m3(round_to_dtype(value, dtype) * reads["scale"](int64(0)))

    out_dtype, sizes = "float8_e4m3fn" if scale is not None else dtype, _list_row_sizes(shape)
    return compute(node, "context", element, list(arrays.values()), shape, sizes, dtype=out_dtype)


def unpack_lse(node: Node, lse: Value, requests: GptRequests, shape: Shape) -> Value:
    """Return lse [..., Hq] float32, -inf in rows of padding."""

    def element(index: tuple[Expr, ...], lse: Read, packed: Read, *sizes: Expr) -> Expr:
        packed_row = packed(_number_row(index, shape, sizes))
        minus_inf = tirx.const(float("-inf"), "float32")
        return tirx.if_then_else(packed_row < 0, minus_inf, lse(tirx.max(packed_row, int64(0)), index[-1]))

    return compute(node, "lse", element, [lse, requests["packed"]], shape, _list_row_sizes(shape))


def _list_row_sizes(shape: Shape) -> list[Size]:
    """Return the sizes that a kernel needs to number rows of this shape."""
    return [shape[1]] if len(shape) == 3 else []


def _number_row(index: tuple[Expr, ...], shape: Shape, sizes: Sequence[Any]) -> Expr:
    """Return the index of the row among the rows of all sequences."""
    return index[0] * sizes[0] + index[1] if len(shape) == 3 else index[0]
