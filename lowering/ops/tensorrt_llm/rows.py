"""Rows as attention sees them: queries, and the keys and values of this call, [rows, heads, size] without gaps.

Bias and rotation are computed in float32 and rounded once to the type of qkv. Where the cache holds codes, and in
phases that ask for it, keys and values take the way through a code and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.append import code, encoded_e4m3, rounded
from ...attention.parameters import int64
from ...attention.places import decoded
from ...importing.node import Node
from ...importing.values import Size, Value
from ..kernels import compute
from .requests import Requests
from .settings import RotarySettings, Settings

Read = Callable[..., Any]
Reads = Mapping[str, Any]
Element = Callable[[Expr], Expr]
Turn = Callable[[Element], Expr]


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
        settings = self.settings

        def row(source: Expr, x: Element, turn: Turn, reads: Reads) -> Expr:
            value = turn(x)
            if self.logn is not None:
                value = value * reads["logn"](_nearest(reads["position"](source), reads["positions"]))
            value = rounded(value, self.qkv.dtype)
            if not settings.fp8_context:
                return value
            return self._in_context(source, reads, decoded(encoded_e4m3(value), "float32"), value)

        arrays = {} if self.logn is None else {"position": self.requests["position"], "logn": self.logn}
        sizes = {} if self.logn is None else {"positions": self.logn.shape[0]}
        return self._rows(node, "queries", 0, settings.heads, dtype, self.angles, row, arrays, sizes)

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
        settings = self.settings
        coded = factors is not None and (not settings.unquantised or settings.fp8_context)

        def row(source: Expr, x: Element, turn: Turn, reads: Reads) -> Expr:
            value = rounded(turn(x), self.qkv.dtype)
            if not coded or settings.codes is None:
                return value
            codes, at = settings.codes, int64(part)

            def through(value: Expr) -> Expr:
                return decoded(code(value * reads["factors"](at), codes), "float32") * reads["scales"](at)

            def unturned(e: Expr) -> Expr:
                return through(rounded(x(e), self.qkv.dtype))

            known = turn(unturned) if settings.streaming else through(value)
            return self._in_context(source, reads, known, value) if settings.unquantised else known

        arrays = {"factors": factors, "scales": scales} if coded else {}
        present = {name: value for name, value in arrays.items() if value is not None}
        return self._rows(node, name, first, settings.kv_heads, dtype, angles, row, present, {})

    def _in_context(self, source: Expr, reads: Reads, value: Expr, otherwise: Expr) -> Expr:
        return tirx.Select(reads["context"](reads["sequence"](source)) > int64(0), value, otherwise)

    def _rows(
        self,
        node: Node,
        name: str,
        first: int,
        heads: int,
        dtype: str,
        angles: Value | None,
        row: Callable[[Expr, Element, Turn, Reads], Expr],
        more: Mapping[str, Value],
        sizes: Mapping[str, Size],
    ) -> Value:
        """row(source row, the element e of the head with its bias, what turns such a head, reads) at each element."""
        requests, rotary, size = self.requests, self.settings.rotary, int64(self.settings.size)
        arrays = {"qkv": self.qkv, "sequence": requests["sequence"], "context": requests["context"], **more}
        optional = {"source": requests["source"] if requests.padded else None, "bias": self.bias, "angles": angles}
        arrays |= {key: value for key, value in optional.items() if value is not None}

        def element(index: tuple[Expr, ...], *given: Any) -> Expr:
            n, h, d = index
            reads = dict(zip((*arrays, *sizes), given))
            source = reads["source"](n) if requests.padded else n

            def x(e: Expr) -> Expr:
                column = int64(first) + h * size + e
                value = reads["qkv"](source, column).astype("float32")
                return value + reads["bias"](column).astype("float32") if self.bias is not None else value

            def turn(x: Element) -> Expr:
                if angles is None or rotary is None:
                    return x(d)
                return turned(rotary, x, lambda k, side: reads["angles"](source, k, side), d)

            return row(source, x, turn, reads).astype(dtype)

        shape = (requests.rows, heads, self.settings.size)
        return compute(node, name, element, list(arrays.values()), shape, list(sizes.values()), dtype=dtype)


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
