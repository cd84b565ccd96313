"""Queries, and keys and values of this call, in the layout of the attention kernel: [rows, heads, size] without gaps.

Bias and rotation are computed in float32 and rounded once to the type of qkv. If the cache is quantized, keys and
values are quantized and dequantized in the phases that require it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.cache_elements import encode_e4m3, quantize_value, round_to_dtype
from ...attention.codegen.addressing import convert_quantized
from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Value
from ..helpers.kernels import compute
from .requests import GptRequests
from .settings import GptSettings, RotarySettings

Read = Callable[..., Any]


@dataclass(frozen=True)
class Projections:
    """qkv [rows, width], its bias [width], and angles by source row; bias, angles and logn may be None."""

    settings: GptSettings
    requests: GptRequests
    qkv: Value
    bias: Value | None
    angles: Value | None
    logn: Value | None

    def emit_queries(self, node: Node, dtype: str) -> Value:
        """Return queries [rows, Hq, D] in this type, which represents all values of the type of qkv."""
        rows = self._project(node, "queries", 0, self.settings.heads, dtype, self.angles, self.logn)
        if not self.settings.has_fp8_context:
            return rows
        quantized = self._map_elements(node, "queries", rows, lambda x: convert_quantized(encode_e4m3(x), "float32"))
        return self._select_by_phase(node, "queries", quantized, rows)

    def emit_keys(self, node: Node, dtype: str, factors: Value | None, scales: Value | None) -> Value:
        """Return keys [rows, Hkv, D] in this type; factors and scales [2] are those of the quantization, or None."""
        first = self.settings.heads * self.settings.size
        return self._emit_new(node, "keys", 0, first, dtype, self.angles, factors, scales)

    def emit_values(self, node: Node, dtype: str, factors: Value | None, scales: Value | None) -> Value:
        """Return values [rows, Hkv, D] in this type."""
        first = (self.settings.heads + self.settings.kv_heads) * self.settings.size
        return self._emit_new(node, "values", 1, first, dtype, None, factors, scales)

    def _emit_new(
        self,
        node: Node,
        name: str,
        kind: int,
        first: int,
        dtype: str,
        angles: Value | None,
        factors: Value | None,
        scales: Value | None,
    ) -> Value:
        settings, quantized_dtype, heads = self.settings, self.settings.quantized_dtype, self.settings.kv_heads
        rows = self._project(node, name, first, heads, dtype, angles)
        if (
            factors is None
            or scales is None
            or quantized_dtype is None
            or (settings.attends_unquantized and not settings.has_fp8_context)
        ):
            return rows
        is_late = settings.is_streaming and angles is not None  # keys are cached before rotation
        dequantized_rows = self._project(node, name, first, heads, dtype, None) if is_late else rows

        def quantize_and_dequantize(x: Expr, factors: Read, scales: Read) -> Expr:
            return convert_quantized(quantize_value(x * factors(int64(kind)), quantized_dtype), "float32") * scales(
                int64(kind)
            )

        dequantized_rows = self._map_elements(
            node, name, dequantized_rows, quantize_and_dequantize, (factors, scales), "float32" if is_late else dtype
        )
        if is_late:
            dequantized_rows = self._rotate(node, name, dequantized_rows, angles, dtype)
        return (
            self._select_by_phase(node, name, dequantized_rows, rows)
            if settings.attends_unquantized
            else dequantized_rows
        )

    # A step is a kernel of its own if the next step reads its elements more than once. Inlined, the quantization of
    # rotated rows would be expressions of thousands of operations.

    def _project(
        self,
        node: Node,
        name: str,
        first: int,
        heads: int,
        dtype: str,
        angles: Value | None,
        logn: Value | None = None,
    ) -> Value:
        """Return heads of qkv from column `first` on, rounded to the type of qkv and cast to dtype.

        Bias is added, the heads are rotated, and they are multiplied by logn.
        """
        requests, rotary, size = self.requests, self.settings.rotary, int64(self.settings.size)
        optional = {"source": requests["source"] if requests.is_padded else None, "bias": self.bias, "angles": angles}
        optional |= {"position": requests["position"] if logn is not None else None, "logn": logn}
        arrays = {"qkv": self.qkv} | {key: value for key, value in optional.items() if value is not None}
        sizes = [] if logn is None else [logn.shape[0]]

        def element(index: tuple[Expr, ...], *operands: Any) -> Expr:
            n, h, d = index
            reads = dict(zip(arrays, operands))
            source = reads["source"](n) if requests.is_padded else n

            def x(e: Expr) -> Expr:
                column = int64(first) + h * size + e
                value = reads["qkv"](source, column).astype("float32")
                return value + reads["bias"](column).astype("float32") if self.bias is not None else value

            value = x(d)
            if angles is not None and rotary is not None:
                value = rotate_element(rotary, x, lambda k, side: reads["angles"](source, k, side), d)
            if logn is not None:
                value = value * reads["logn"](_clamp(reads["position"](source), operands[-1]))
            return round_to_dtype(value, self.qkv.dtype).astype(dtype)

        shape = (requests.rows, heads, self.settings.size)
        return compute(node, name, element, list(arrays.values()), shape, sizes, dtype=dtype)

    def _map_elements(
        self,
        node: Node,
        name: str,
        rows: Value,
        function: Callable[..., Expr],
        arrays: tuple[Value, ...] = (),
        dtype: str | None = None,
    ) -> Value:
        """Return function(element as float32, *reads of the arrays) of each element."""
        dtype = dtype or rows.dtype

        def element(index: tuple[Expr, ...], rows: Read, *reads: Read) -> Expr:
            return function(rows(*index).astype("float32"), *reads).astype(dtype)

        return compute(node, f"{name}_coded", element, [rows, *arrays], rows.shape, dtype=dtype)

    def _rotate(self, node: Node, name: str, rows: Value, angles: Value | None, dtype: str) -> Value:
        requests, rotary = self.requests, self.settings.rotary
        assert rotary is not None and angles is not None
        sources = [requests["source"]] if requests.is_padded else []

        def element(index: tuple[Expr, ...], rows: Read, angles: Read, *source: Read) -> Expr:
            n, h, d = index
            row = source[0](n) if source else n
            return rotate_element(rotary, lambda e: rows(n, h, e), lambda k, side: angles(row, k, side), d).astype(
                dtype
            )

        return compute(node, f"{name}_turned", element, [rows, angles, *sources], rows.shape, dtype=dtype)

    def _select_by_phase(self, node: Node, name: str, rows: Value, generation_rows: Value) -> Value:
        """Return `rows` for context requests, and `generation_rows` for generation requests."""
        requests = self.requests
        tables = [requests[key] for key in ("sequence", "context", *(("source",) if requests.is_padded else ()))]

        def element(
            index: tuple[Expr, ...], rows: Read, generation_rows: Read, sequence: Read, context: Read, *source: Read
        ) -> Expr:
            row = source[0](index[0]) if source else index[0]
            return tirx.Select(context(sequence(row)) > int64(0), rows(*index), generation_rows(*index))

        return compute(node, f"{name}_of_phase", element, [rows, generation_rows, *tables], rows.shape)


def rotate_element(
    rotary: RotarySettings, x: Callable[[Expr], Expr], angle: Callable[[Expr, Expr], Expr], d: Expr
) -> Expr:
    """Return element d of a head x, rotated by cosine angle(k, 0) and sine angle(k, 1) of pair k.

    x(d) is element d of the head, float32.
    """
    half = int64(rotary.dim // 2)
    if rotary.is_interleaved:
        pair, is_first = tirx.floordiv(d, int64(2)), tirx.EQ(tirx.floormod(d, int64(2)), int64(0))
        partner = tirx.Select(is_first, d + 1, d - 1)
    else:
        pair, is_first = tirx.floormod(d, half), d < half
        partner = tirx.Select(is_first, d + half, d - half)
    is_rotated = d < int64(rotary.dim)
    pair, partner = (tirx.Select(is_rotated, e, int64(0)) for e in (pair, partner))
    cos, sin = (angle(pair, int64(side)) for side in (0, 1))
    sign = tirx.Select(is_first, tirx.const(-1.0, "float32"), tirx.const(1.0, "float32"))
    return tirx.Select(is_rotated, x(d) * cos + sign * x(partner) * sin, x(d))


def _clamp(index: Expr, size: Any) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))
