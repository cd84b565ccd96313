"""The first elements of a row in their order on GPUs, by a bitonic sorting network (Batcher 1968) over their indices.

Indices are sorted; elements stay in memory and are compared there. Each row is padded to a power of two by indices
after its end, which come last. Steps of the network between close positions are done in shared memory by the block that
has both; each other step is a launch.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Top, is_less, read_along_rows
from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr

from ...reading.values import flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.host import bind_on_host
from ..primitives.ptx import alloc_registers, let, store_element, synchronize
from ..primitives.threads import ThreadTiles, launch_threads

THREADS = 512
_BITS = 10
SPAN = 1 << _BITS
"""Positions of a block: two for each of its threads."""

_ONE = tirx.const(1, "int64")


def top_k(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for TopK (lowering/tensorir/along_rows.py); None for anything else."""
    top = read_along_rows(func)
    if not isinstance(top, Top):
        return None
    tiles = {"threads": ThreadTiles()}
    return [Variant("network", None, device(target), tiles, lambda tiles: _kernels(func, top, tiles["threads"]))]


def _kernels(func: tirx.PrimFunc, top: Top, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, values, indices = (param for param in func.params if tirx.is_buffer_var(param))
    outer, k, inner = values.shape
    with IRBuilder() as builder, T.prim_func():
        network = _Network(x, top, tiles)
        read, chosen, index_output = flat_view(x), flat_view(values), flat_view(indices)
        with T.If(outer * k * inner > 0), T.Then():
            network.sort()
            with launch_threads(bind_on_host(outer * k * inner), tiles) as number:
                row, rank = let(tirx.truncdiv(number, k)), let(tirx.truncmod(number, k))
                index = let(network.order[row * network.padded + rank])
                o, j = let(tirx.truncdiv(row, inner)), let(tirx.truncmod(row, inner))
                at = let((o * k + rank) * inner + j)
                store_element(index_output, at, index)
                store_element(chosen, at, read[let(network.element(row, index))])
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


class _Network:
    """The sorting network: `order` [rows, padded] has the indices of each row, sorted after `sort`."""

    def __init__(self, x: tirx.Buffer, top: Top, tiles: ThreadTiles) -> None:
        outer, self.n, self.inner = x.shape
        self.x, self.top, self.tiles = flat_view(x), top, tiles
        bits = tirx.const(64, "int64") - T.clz(tirx.max(self.n - 1, _ONE)).astype("int64")
        self.bits = bind_on_host(bits)
        self.padded = bind_on_host(_ONE << self.bits)
        self.total = bind_on_host(outer * self.inner * self.padded)
        self.order = T.alloc_buffer((tirx.max(self.total, _ONE),), "int64")

    def element(self, row: Expr, index: Expr) -> Expr:
        """Return the offset in memory of an element of a row."""
        return (tirx.truncdiv(row, self.inner) * self.n + index) * self.inner + tirx.truncmod(row, self.inner)

    def sort(self) -> None:
        """Emit the launches.

        After the step of `size`, runs of 2^size indices are sorted, in alternating order.
        """
        self._sort_in_blocks(T.int64(1), tirx.min(self.bits, T.int64(_BITS)), is_first=True)
        with T.serial(tirx.max(self.bits - _BITS, T.int64(0))) as more:
            size = more + (_BITS + 1)
            with T.serial(more + 1) as step:
                distance = _ONE << (size - 1 - step)
                with launch_threads(tirx.truncdiv(self.total, T.int64(2)), self.tiles) as pair:
                    self._step(self.order, T.int64(0), pair, let(distance), let(size))
            self._sort_in_blocks(size, size, is_first=False)

    def _sort_in_blocks(self, smallest: Expr, largest: Expr, is_first: bool) -> None:
        """Launch all steps of these sizes, given as powers of two, between positions closer than SPAN."""
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(self.total, SPAN)) as block,
            T.launch_thread("threadIdx.x", THREADS) as thread,
        ):
            first, thread = let(block.astype("int64") * SPAN), thread.astype("int64")
            shared = T.alloc_buffer((SPAN,), "int64", scope="shared")
            with T.serial(2) as half:
                own = let(half * THREADS + thread)
                with T.If(first + own < self.total), T.Then():
                    index = tirx.bitwise_and(first + own, self.padded - 1) if is_first else self.order[first + own]
                    store_element(shared, own, index)
            synchronize()
            with T.serial(largest - smallest + 1) as more:
                size = let(smallest + more)
                close = let(tirx.min(size, T.int64(_BITS)))
                with T.serial(close) as step:
                    distance = let(_ONE << (close - 1 - step))
                    # If one row has fewer positions than a block, a thread may have no pair.
                    with T.If(first + 2 * thread < self.total), T.Then():
                        self._step(shared, first, thread, distance, size)
                    synchronize()
            with T.serial(2) as half:
                own = let(half * THREADS + thread)
                with T.If(first + own < self.total), T.Then():
                    store_element(self.order, first + own, shared[own])

    def _step(self, memory: tirx.Buffer, first: Expr, pair: Expr, distance: Expr, size: Expr) -> None:
        """Order the two indices of a pair, `distance` apart. memory begins with position `first` of all."""
        low = let(2 * (pair - tirx.bitwise_and(pair, distance - 1)) + tirx.bitwise_and(pair, distance - 1))
        a, b = let(memory[low]), let(memory[low + distance])
        row = let(tirx.truncdiv(first + low, self.padded))
        position = let(tirx.bitwise_and(first + low, self.padded - 1))
        backwards = tirx.NE(tirx.bitwise_and(tirx.shift_right(position, size), _ONE), T.int64(0))
        with T.If(tirx.NE(self._before(row, b, a), backwards)), T.Then():
            store_element(memory, low, b)
            store_element(memory, low + distance, a)

    def _before(self, row: Expr, a: Expr, b: Expr) -> Expr:
        """Return whether index a of a row comes before index b."""
        result = alloc_registers(1, "bool")
        store_element(result, 0, a < b)
        with T.If(tirx.all(a < self.n, b < self.n)), T.Then():
            x, y = (let(self.x[self.element(row, index)]) for index in (a, b))
            earlier, later = (is_less(y, x), is_less(x, y)) if self.top.largest else (is_less(x, y), is_less(y, x))
            store_element(result, 0, tirx.Or(earlier, tirx.And(tirx.Not(later), a < b)))
        return result[0]
