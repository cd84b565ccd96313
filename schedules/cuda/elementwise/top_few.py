"""The first few elements of short rows in their order on GPUs, such as the experts of a token: a warp for each row.

Each lane has every 32nd element in registers. For each rank, the first remaining element, of the lane and by shuffles
of the warp, is stored and removed.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Top, is_less, read_along_rows
from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr

from ...half_precision import is_half
from ...reading.values import flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, let, shuffle_xor, store_element
from ..primitives.threads import ThreadTiles, launch_threads

MAX_ROW_LENGTH = 1024
"""Maximum number of elements of a row: 32 per lane."""

MAX_RANKS = 32
"""Maximum number of requested elements."""

_NONE = MAX_ROW_LENGTH  # the index of no element


def top_few(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for TopK (lowering/tensorir/along_rows.py) of few elements of short rows; None for anything
    else.
    """
    top = read_along_rows(func)
    if not isinstance(top, Top):
        return None
    x, values, _ = (param for param in func.params if tirx.is_buffer_var(param))
    n, k = x.shape[1], values.shape[1]
    if (
        not isinstance(n, tirx.IntImm)
        or not isinstance(k, tirx.IntImm)
        or n.value > MAX_ROW_LENGTH
        or k.value > MAX_RANKS
    ):
        return None
    tiles = {"rows": ThreadTiles(128)}
    return [Variant("rows", None, device(target), tiles, lambda tiles: _kernel(func, top, tiles["rows"]))]


def _kernel(func: tirx.PrimFunc, top: Top, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, values, order = (param for param in func.params if tirx.is_buffer_var(param))
    (outer, n, inner), k = x.shape, values.shape[1]
    with IRBuilder() as builder, T.prim_func():
        read, chosen, indices = map(flat_view, (x, values, order))
        with launch_threads(bind_on_host(outer * inner * WARP), tiles) as number:
            warp = T.int64(WARP)
            row, lane = let(tirx.truncdiv(number, warp)), let(tirx.truncmod(number, warp).astype("int32"))
            o, j = let(tirx.truncdiv(row, inner)), let(tirx.truncmod(row, inner))
            remaining = _RemainingRow(read, (o * n * inner + j, inner), int(n.value), lane, top)
            with T.serial(k) as rank:
                index = remaining.take_first()
                with T.If(tirx.EQ(lane, 0)), T.Then():
                    at = let((o * k + rank) * inner + j)
                    store_element(indices, at, index.astype("int64"))
                    store_element(chosen, at, read[let((o * n + index.astype("int64")) * inner + j)])
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


class _RemainingRow:
    """The remaining elements of a row of n elements with stride `step`; a lane has every 32nd one in registers."""

    def __init__(self, read: tirx.Buffer, where: tuple[Expr, Expr], n: int, lane: Expr, top: Top) -> None:
        first, step = where
        self.top, self.lane, self.count = top, lane, -(-n // WARP)
        self.dtype = _comparison_type(str(read.dtype))
        self.elements, self.remaining = alloc_registers(self.count, self.dtype), alloc_registers(1, "uint32")
        store_element(self.remaining, 0, T.uint32(0))
        for m in range(self.count):
            with T.If(m * WARP + lane < n), T.Then():
                index = let((m * WARP + lane).astype("int64"))
                store_element(self.elements, m, read[let(first + index * step)].astype(self.dtype))
                store_element(self.remaining, 0, tirx.bitwise_or(self.remaining[0], T.uint32(1 << m)))

    def take_first(self) -> Expr:
        """Return the index of the first one, int32, and remove it."""
        best, index = alloc_registers(1, self.dtype), alloc_registers(1, "int32")
        store_element(best, 0, self.elements[0])
        store_element(index, 0, T.int32(_NONE))
        for m in range(self.count):
            is_left = tirx.NE(tirx.bitwise_and(self.remaining[0], T.uint32(1 << m)), T.uint32(0))
            self._select_first(
                best, index, self.elements[m], tirx.Select(is_left, m * WARP + self.lane, T.int32(_NONE))
            )
        for lanes in (16, 8, 4, 2, 1):
            other = let(shuffle_xor(best[0], lanes)), let(shuffle_xor(index[0], lanes))
            self._select_first(best, index, *other)
        first = let(index[0])
        with T.If(tirx.EQ(tirx.truncmod(first, WARP), self.lane)), T.Then():
            bit = T.shift_left(T.uint32(1), tirx.truncdiv(first, WARP).astype("uint32"))
            store_element(self.remaining, 0, tirx.bitwise_and(self.remaining[0], tirx.bitwise_not(bit)))
        return first

    def _select_first(self, best: tirx.Buffer, index: tirx.Buffer, other: Expr, other_index: Expr) -> None:
        """Replace best and its index by the other element and its index, where that precedes it."""
        other_index = let(other_index)
        earlier, later = is_less(best[0], other), is_less(other, best[0])
        if not self.top.largest:
            earlier, later = later, earlier
        comes_before = tirx.any(earlier, tirx.all(tirx.Not(later), other_index < index[0]))
        with T.If(tirx.all(other_index < _NONE, tirx.any(tirx.EQ(index[0], _NONE), comes_before))), T.Then():
            store_element(best, 0, other)
            store_element(index, 0, other_index)


def _comparison_type(dtype: str) -> str:
    """Return the type in which elements are compared: shuffles move 32 or 64 bits."""
    if is_half(dtype):
        return "float32"
    return dtype if tvm.DataType(dtype).bits >= 32 else "int32"
