"""The first few elements of short rows in their order on GPUs, such as the experts of a token: a warp for each row.

each lane keeps every 32nd element in registers
for each rank
    the first of what is left, of the lane and by shuffles of the warp, is stored and left no more
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Top, less, read_along_rows
from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr

from ..half_precision import is_half
from ..reading.values import flat_view
from ..variant import Variant
from .device import device
from .host import on_host
from .ptx import WARP, let, put, registers, shuffle_xor
from .threads import ThreadTiles, each

LONGEST = 1024
"""Elements of a row: 32 of a lane."""

MOST = 32
"""Elements that are asked for."""

_NONE = LONGEST  # the place of no element


def top_few(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """TopK (lowering/tensorir/along_rows.py) of few elements of short rows; None for anything else."""
    what = read_along_rows(func)
    if not isinstance(what, Top):
        return None
    x, values, _ = (param for param in func.params if tirx.is_buffer_var(param))
    n, k = x.shape[1], values.shape[1]
    if not isinstance(n, tirx.IntImm) or not isinstance(k, tirx.IntImm) or n.value > LONGEST or k.value > MOST:
        return None
    tiles = {"rows": ThreadTiles(128)}
    return [Variant("rows", None, device(target), tiles, lambda tiles: _kernel(func, what, tiles["rows"]))]


def _kernel(func: tirx.PrimFunc, what: Top, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, values, places = (param for param in func.params if tirx.is_buffer_var(param))
    (outer, n, inner), k = x.shape, values.shape[1]
    with IRBuilder() as builder, T.prim_func():
        read, chosen, indices = map(flat_view, (x, values, places))
        with each(on_host(outer * inner * WARP), tiles) as number:
            warp = T.int64(WARP)
            row, lane = let(tirx.truncdiv(number, warp)), let(tirx.truncmod(number, warp).astype("int32"))
            o, j = let(tirx.truncdiv(row, inner)), let(tirx.truncmod(row, inner))
            left = _Row(read, (o * n * inner + j, inner), int(n.value), lane, what)
            with T.serial(k) as rank:
                place = left.take()
                with T.If(tirx.EQ(lane, 0)), T.Then():
                    at = let((o * k + rank) * inner + j)
                    put(indices, at, place.astype("int64"))
                    put(chosen, at, read[let((o * n + place.astype("int64")) * inner + j)])
    return func.with_body(builder.get().body).without_attr(FORM)


class _Row:
    """What is left of a row of n elements, `step` apart from the first on: of a lane every 32nd in registers."""

    def __init__(self, read: tirx.Buffer, where: tuple[Expr, Expr], n: int, lane: Expr, what: Top) -> None:
        first, step = where
        self.what, self.lane, self.count = what, lane, -(-n // WARP)
        self.dtype = _compared(str(read.dtype))
        self.elements, self.left = registers(self.count, self.dtype), registers(1, "uint32")
        put(self.left, 0, T.uint32(0))
        for m in range(self.count):
            with T.If(m * WARP + lane < n), T.Then():
                place = let((m * WARP + lane).astype("int64"))
                put(self.elements, m, read[let(first + place * step)].astype(self.dtype))
                put(self.left, 0, tirx.bitwise_or(self.left[0], T.uint32(1 << m)))

    def take(self) -> Expr:
        """Return the place of the first one, int32, which is left no more."""
        best, place = registers(1, self.dtype), registers(1, "int32")
        put(best, 0, self.elements[0])
        put(place, 0, T.int32(_NONE))
        for m in range(self.count):
            is_left = tirx.NE(tirx.bitwise_and(self.left[0], T.uint32(1 << m)), T.uint32(0))
            self._keep_first(best, place, self.elements[m], tirx.Select(is_left, m * WARP + self.lane, T.int32(_NONE)))
        for lanes in (16, 8, 4, 2, 1):
            other = let(shuffle_xor(best[0], lanes)), let(shuffle_xor(place[0], lanes))
            self._keep_first(best, place, *other)
        found = let(place[0])
        with T.If(tirx.EQ(tirx.truncmod(found, WARP), self.lane)), T.Then():
            bit = T.shift_left(T.uint32(1), tirx.truncdiv(found, WARP).astype("uint32"))
            put(self.left, 0, tirx.bitwise_and(self.left[0], tirx.bitwise_not(bit)))
        return found

    def _keep_first(self, best: tirx.Buffer, place: tirx.Buffer, other: Expr, at: Expr) -> None:
        """best and place become the other element and its place, where that comes before."""
        at = let(at)
        earlier, later = less(best[0], other), less(other, best[0])
        if not self.what.largest:
            earlier, later = later, earlier
        comes_before = tirx.any(earlier, tirx.all(tirx.Not(later), at < place[0]))
        with T.If(tirx.all(at < _NONE, tirx.any(tirx.EQ(place[0], _NONE), comes_before))), T.Then():
            put(best, 0, other)
            put(place, 0, at)


def _compared(dtype: str) -> str:
    """The type in which elements are compared: shuffles move 32 or 64 bits."""
    if is_half(dtype):
        return "float32"
    return dtype if tvm.DataType(dtype).bits >= 32 else "int32"
