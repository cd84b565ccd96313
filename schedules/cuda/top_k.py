"""The first elements of a row in their order on GPUs, by a bitonic sorting network (Batcher 1968) over their places.

Addressing are sorted, and elements compared where they lie. Each row is padded to a power of two by places behind its
end, which come last. Steps of the network between places that are close are done in shared memory by the block that has
both; those between others are a launch each.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Top, less, read_along_rows
from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr

from ..reading.values import flat_view
from ..variant import Variant
from .device import device
from .host import on_host
from .ptx import let, put, registers, synchronize
from .threads import ThreadTiles, each

THREADS = 512
_BITS = 10
SPAN = 1 << _BITS
"""Places of a block: two for each of its threads."""

_ONE = tirx.const(1, "int64")


def top_k(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """TopK (lowering/tensorir/along_rows.py); None for anything else."""
    what = read_along_rows(func)
    if not isinstance(what, Top):
        return None
    tiles = {"threads": ThreadTiles()}
    return [Variant("network", None, device(target), tiles, lambda tiles: _kernels(func, what, tiles["threads"]))]


def _kernels(func: tirx.PrimFunc, what: Top, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, values, indices = (param for param in func.params if tirx.is_buffer_var(param))
    outer, k, inner = values.shape
    with IRBuilder() as builder, T.prim_func():
        network = _Network(x, what, tiles)
        read, chosen, places = flat_view(x), flat_view(values), flat_view(indices)
        with T.If(outer * k * inner > 0), T.Then():
            network.sort()
            with each(on_host(outer * k * inner), tiles) as number:
                row, rank = let(tirx.truncdiv(number, k)), let(tirx.truncmod(number, k))
                place = let(network.order[row * network.padded + rank])
                o, j = let(tirx.truncdiv(row, inner)), let(tirx.truncmod(row, inner))
                at = let((o * k + rank) * inner + j)
                put(places, at, place)
                put(chosen, at, read[let(network.element(row, place))])
    return func.with_body(builder.get().body).without_attr(FORM)


class _Network:
    """`order` [rows, padded] holds the places of each row, sorted after `sort`."""

    def __init__(self, x: tirx.Buffer, what: Top, tiles: ThreadTiles) -> None:
        outer, self.n, self.inner = x.shape
        self.x, self.what, self.tiles = flat_view(x), what, tiles
        bits = tirx.const(64, "int64") - T.clz(tirx.max(self.n - 1, _ONE)).astype("int64")
        self.bits = on_host(bits)
        self.padded = on_host(_ONE << self.bits)
        self.all = on_host(outer * self.inner * self.padded)
        self.order = T.alloc_buffer((tirx.max(self.all, _ONE),), "int64")

    def element(self, row: Expr, place: Expr) -> Expr:
        """Where an element of a row is in memory."""
        return (tirx.truncdiv(row, self.inner) * self.n + place) * self.inner + tirx.truncmod(row, self.inner)

    def sort(self) -> None:
        """The launches: after the step of `size` runs of so many places are sorted, forwards and backwards in turn."""
        self._in_blocks(T.int64(1), tirx.min(self.bits, T.int64(_BITS)), is_first=True)
        with T.serial(tirx.max(self.bits - _BITS, T.int64(0))) as more:
            size = more + (_BITS + 1)
            with T.serial(more + 1) as step:
                distance = _ONE << (size - 1 - step)
                with each(tirx.truncdiv(self.all, T.int64(2)), self.tiles) as pair:
                    self._step(self.order, T.int64(0), pair, let(distance), let(size))
            self._in_blocks(size, size, is_first=False)

    def _in_blocks(self, smallest: Expr, largest: Expr, is_first: bool) -> None:
        """The launch that does all steps of these sizes, given as powers of two, between places closer than SPAN."""
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(self.all, SPAN)) as block,
            T.launch_thread("threadIdx.x", THREADS) as thread,
        ):
            first, thread = let(block.astype("int64") * SPAN), thread.astype("int64")
            shared = T.alloc_buffer((SPAN,), "int64", scope="shared")
            with T.serial(2) as half:
                own = let(half * THREADS + thread)
                with T.If(first + own < self.all), T.Then():
                    place = tirx.bitwise_and(first + own, self.padded - 1) if is_first else self.order[first + own]
                    put(shared, own, place)
            synchronize()
            with T.serial(largest - smallest + 1) as more:
                size = let(smallest + more)
                close = let(tirx.min(size, T.int64(_BITS)))
                with T.serial(close) as step:
                    distance = let(_ONE << (close - 1 - step))
                    # Of one row whose places are fewer than those of a block there may be no pair for a thread.
                    with T.If(first + 2 * thread < self.all), T.Then():
                        self._step(shared, first, thread, distance, size)
                    synchronize()
            with T.serial(2) as half:
                own = let(half * THREADS + thread)
                with T.If(first + own < self.all), T.Then():
                    put(self.order, first + own, shared[own])

    def _step(self, memory: tirx.Buffer, first: Expr, pair: Expr, distance: Expr, size: Expr) -> None:
        """Puts the two places of a pair, `distance` apart, in order. memory begins with place `first` of all."""
        low = let(2 * (pair - tirx.bitwise_and(pair, distance - 1)) + tirx.bitwise_and(pair, distance - 1))
        a, b = let(memory[low]), let(memory[low + distance])
        row = let(tirx.truncdiv(first + low, self.padded))
        here = let(tirx.bitwise_and(first + low, self.padded - 1))
        backwards = tirx.NE(tirx.bitwise_and(tirx.shift_right(here, size), _ONE), T.int64(0))
        with T.If(tirx.NE(self._before(row, b, a), backwards)), T.Then():
            put(memory, low, b)
            put(memory, low + distance, a)

    def _before(self, row: Expr, a: Expr, b: Expr) -> Expr:
        """Whether place a of a row comes before place b."""
        found = registers(1, "bool")
        put(found, 0, a < b)
        with T.If(tirx.all(a < self.n, b < self.n)), T.Then():
            x, y = (let(self.x[self.element(row, place)]) for place in (a, b))
            earlier, later = (less(y, x), less(x, y)) if self.what.largest else (less(x, y), less(y, x))
            put(found, 0, tirx.Or(earlier, tirx.And(tirx.Not(later), a < b)))
        return found[0]
