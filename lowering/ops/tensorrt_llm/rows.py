"""Rows as attention sees them: queries, and the keys and values of this call, [rows, heads, size] without gaps.

Bias and rotation are computed in float32 and rounded once to the type of qkv. Where the cache holds codes, and in
phases that ask for it, keys and values take the way through a code and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.addressing import decoded
from ...attention.kv_write import code, encoded_e4m3, rounded
from ...attention.parameters import int64
from ...importing.node import Node
from ...importing.values import Value
from ..kernels import compute
from .requests import Requests
from .settings import RotarySettings, Settings

Read = Callable[..., Any]


@dataclass(frozen=True)
class Projections:
    """qkv [rows, width] of type dtype, bias [width], and angles by source row; those that there are."""

    settings: Settings
    requests: Requests
    qkv: Value
    bias: Value | None
    angles: Value | None
    logn: Value | None

    def queries(self, node: Node, dtype: str) -> Value:
        """[rows, Hq, D] in that type, which holds what the type of qkv does."""
        rows = self._projected(node, "queries", 0, self.settings.heads, dtype, self.angles, self.logn)
        if not self.settings.fp8_context:
            return rows
        coded = self._each(node, "queries", rows, lambda x: decoded(encoded_e4m3(x), "float32"))
        return self._in_context(node, "queries", coded, rows)

    def keys(self, node: Node, dtype: str, factors: Value | None, scales: Value | None) -> Value:
        """[rows, Hkv, D] likewise; factors and scales [2] are those of codes, None if there are none."""
        first = self.settings.heads * self.settings.size
        return self._new(node, "keys", 0, first, dtype, self.angles, factors, scales)

    def values(self, node: Node, dtype: str, factors: Value | None, scales: Value | None) -> Value:
        """[rows, Hkv, D] likewise."""
        first = (self.settings.heads + self.settings.kv_heads) * self.settings.size
        return self._new(node, "values", 1, first, dtype, None, factors, scales)

    def _new(
        self,
        node: Node,
        name: str,
        part: int,
        first: int,
        dtype: str,
        angles: Value | None,
        factors: Value | None,
        scales: Value | None,
    ) -> Value:
        settings, codes, heads = self.settings, self.settings.codes, self.settings.kv_heads
        rows = self._projected(node, name, first, heads, dtype, angles)
        if factors is None or scales is None or codes is None or (settings.unquantized and not settings.fp8_context):
            return rows
        late = settings.streaming and angles is not None  # what is cached has not turned yet
        known = self._projected(node, name, first, heads, dtype, None) if late else rows

        def through(x: Expr, factors: Read, scales: Read) -> Expr:
            return decoded(code(x * factors(int64(part)), codes), "float32") * scales(int64(part))

        known = self._each(node, name, known, through, (factors, scales), "float32" if late else dtype)
        if late:
            known = self._turned(node, name, known, angles, dtype)
        return self._in_context(node, name, known, rows) if settings.unquantized else known

    # Steps are kernels of their own where an element of the one before is read more than once: written out in place
    # of it, codes of turned rows are expressions of thousands of operations.

    def _projected(
        self,
        node: Node,
        name: str,
        first: int,
        heads: int,
        dtype: str,
        angles: Value | None,
        logn: Value | None = None,
    ) -> Value:
        """Heads of qkv from column `first` on, with bias, turned, times logn, and rounded to the type of qkv."""
        requests, rotary, size = self.requests, self.settings.rotary, int64(self.settings.size)
        optional = {"source": requests["source"] if requests.padded else None, "bias": self.bias, "angles": angles}
        optional |= {"position": requests["position"] if logn is not None else None, "logn": logn}
        arrays = {"qkv": self.qkv} | {key: value for key, value in optional.items() if value is not None}
        sizes = [] if logn is None else [logn.shape[0]]

        def element(index: tuple[Expr, ...], *given: Any) -> Expr:
            n, h, d = index
            reads = dict(zip(arrays, given))
            source = reads["source"](n) if requests.padded else n

            def x(e: Expr) -> Expr:
                column = int64(first) + h * size + e
                value = reads["qkv"](source, column).astype("float32")
                return value + reads["bias"](column).astype("float32") if self.bias is not None else value

            value = x(d)
            if angles is not None and rotary is not None:
                value = turned(rotary, x, lambda k, side: reads["angles"](source, k, side), d)
            if logn is not None:
                value = value * reads["logn"](_nearest(reads["position"](source), given[-1]))
            return rounded(value, self.qkv.dtype).astype(dtype)

        shape = (requests.rows, heads, self.settings.size)
        return compute(node, name, element, list(arrays.values()), shape, sizes, dtype=dtype)

    def _each(
        self,
        node: Node,
        name: str,
        rows: Value,
        function: Callable[..., Expr],
        arrays: tuple[Value, ...] = (),
        dtype: str | None = None,
    ) -> Value:
        """function(element as float32, *reads of the arrays) of each."""
        dtype = dtype or rows.dtype

        def element(index: tuple[Expr, ...], rows: Read, *reads: Read) -> Expr:
            return function(rows(*index).astype("float32"), *reads).astype(dtype)

        return compute(node, f"{name}_coded", element, [rows, *arrays], rows.shape, dtype=dtype)

    def _turned(self, node: Node, name: str, rows: Value, angles: Value | None, dtype: str) -> Value:
        requests, rotary = self.requests, self.settings.rotary
        assert rotary is not None and angles is not None
        sources = [requests["source"]] if requests.padded else []

        def element(index: tuple[Expr, ...], rows: Read, angles: Read, *source: Read) -> Expr:
            n, h, d = index
            at = source[0](n) if source else n
            return turned(rotary, lambda e: rows(n, h, e), lambda k, side: angles(at, k, side), d).astype(dtype)

        return compute(node, f"{name}_turned", element, [rows, angles, *sources], rows.shape, dtype=dtype)

    def _in_context(self, node: Node, name: str, rows: Value, others: Value) -> Value:
        """Those of context requests, and others of generation requests."""
        requests = self.requests
        tables = [requests[key] for key in ("sequence", "context", *(("source",) if requests.padded else ()))]

        def element(
            index: tuple[Expr, ...], rows: Read, others: Read, sequence: Read, context: Read, *source: Read
        ) -> Expr:
            at = source[0](index[0]) if source else index[0]
            return tirx.Select(context(sequence(at)) > int64(0), rows(*index), others(*index))

        return compute(node, f"{name}_of_phase", element, [rows, others, *tables], rows.shape)


def turned(rotary: RotarySettings, x: Callable[[Expr], Expr], angle: Callable[[Expr, Expr], Expr], d: Expr) -> Expr:
    """Element d of a head with elements x(d), float32, turned by cosine angle(k, 0) and sine angle(k, 1) of pair k."""
    half = int64(rotary.dim // 2)
    if rotary.interleaved:
        pair, is_first = tirx.floordiv(d, int64(2)), tirx.EQ(tirx.floormod(d, int64(2)), int64(0))
        partner = tirx.Select(is_first, d + 1, d - 1)
    else:
        pair, is_first = tirx.floormod(d, half), d < half
        partner = tirx.Select(is_first, d + half, d - half)
    turns = d < int64(rotary.dim)
    pair, partner = (tirx.Select(turns, e, int64(0)) for e in (pair, partner))
    cos, sin = (angle(pair, int64(side)) for side in (0, 1))
    sign = tirx.Select(is_first, tirx.const(-1.0, "float32"), tirx.const(1.0, "float32"))
    return tirx.Select(turns, x(d) * cos + sign * x(partner) * sin, x(d))


def _nearest(index: Expr, size: Any) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))
