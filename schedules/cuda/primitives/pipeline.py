"""Producer and consumers of one thread block: mbarrier rings and named barriers (PTX ISA 9.7.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..attention.attention_tiles import WgmmaTiles
from ..matmul.matmul_tiles import WgmmaMatmulTiles
from .ptx import alloc_registers, let, uniform

WARPGROUP = 128
"""Threads of a warpgroup."""


@dataclass(frozen=True)
class MbarrierRing:
    """Slots in shared memory that TMA fills and consumers empty in order: fill n goes to slot n mod `slots`.

    There are two mbarriers per slot, from barriers[first] on. One completes when the bytes of a fill have arrived, the
    other when all `consumers` have released it. Both flip their parity with every round of the ring.
    """

    barriers: tirx.Buffer
    first: Expr | int
    slots: int
    consumers: int
    """Arrivals that empty a slot, from each block."""
    cluster: int = 1
    """Blocks of the cluster, all of which empty a slot, as copies of each go to all."""

    @property
    def end(self) -> Expr | int:
        """The first barrier after those of the ring."""
        return self.first + 2 * self.slots

    def init_barriers(self) -> None:
        """Initialize the barriers by one thread, before a fence and a barrier of the block."""
        for slot in range(self.slots):
            for at, arrivals in (
                (self.first + slot, 1),
                (self.first + self.slots + slot, self.consumers * self.cluster),
            ):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(self.barriers.ptr_to([at]), T.uint32(arrivals)))

    def slot(self, n: Expr) -> Expr:
        return tirx.truncmod(n, self.slots)

    def full(self, n: Expr) -> Expr:
        """Return the address of the barrier that fill n completes."""
        return self.barriers.ptr_to([self.first + self.slot(n)])

    def reserve(self, n: Expr, size: int) -> None:
        """Wait, in the producer's one thread, until the slot of fill n is empty, and announce so many bytes."""
        T.evaluate(T.cuda.mbarrier_wait(self._empty(n), tirx.const(1, "int32") - self._parity(n)))
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.full(n), T.uint32(size)))

    def wait(self, n: Expr) -> None:
        """Wait, in a consumer, until fill n has arrived."""
        T.evaluate(T.cuda.mbarrier_wait(self.full(n), self._parity(n)))

    def release(self, n: Expr, lane: Expr) -> None:
        """Release fill n in each block, by one warp of a consumer, as often as `consumers` says."""
        with T.If(lane < self.cluster), T.Then():
            if self.cluster == 1:
                T.evaluate(T.ptx.mbarrier.arrive.shared.b64(self._empty(n)))
            else:
                remote, local = alloc_registers(1, "uint32"), T.cuda.cvta_generic_to_shared(self._empty(n))
                # No .release.cluster: consumers wrote nothing, and ptxas puts a fence of the whole GPU before it, which
                # takes as long as half of a step.
                T.evaluate(T.ptx["mapa.shared::cluster.u32"](remote[0], local, lane.astype("uint32")))
                T.evaluate(T.ptx["mbarrier.arrive.shared::cluster.b64"](remote[0]))

    def _empty(self, n: Expr) -> Expr:
        return self.barriers.ptr_to([self.first + self.slots + self.slot(n)])

    def _parity(self, n: Expr) -> Expr:
        return tirx.truncmod(tirx.truncdiv(n, self.slots), 2)


def initialize_rings(thread: Expr, rings: Iterable[MbarrierRing]) -> None:
    """Initialize rings, which are ready after the next barrier of the block."""
    with T.If(tirx.EQ(thread, 0)), T.Then():
        for ring in rings:
            ring.init_barriers()
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())


def specialize_warpgroups(
    tiles: WgmmaTiles | WgmmaMatmulTiles, thread: Expr, produce: Callable[[], None], consume: Callable[[Expr], None]
) -> None:
    """Let one thread of the first warpgroup produce and the other warpgroups consume; `consume` gets the consumer's
    index.

    Registers move from the producer to the consumers, unless these get no more than a thread has at launch: ptxas would
    ignore the request (C7508).
    """
    moves_registers = tiles.consumer_registers > 65536 // tiles.threads // 8 * 8
    warpgroup = let(uniform(tirx.truncdiv(thread, WARPGROUP)))
    with T.If(tirx.EQ(warpgroup, 0)):
        with T.Then():
            if moves_registers:
                T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](tiles.producer_registers))
            with T.If(tirx.EQ(thread, 0)), T.Then():
                produce()
        with T.Else():
            if moves_registers:
                T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](tiles.consumer_registers))
            consume(let(warpgroup - 1))


def named_sync(barrier: Expr | int, threads: int) -> None:
    """Wait at a named barrier for so many threads, this one included, whole warps each."""
    T.evaluate(T.ptx["bar.sync"](_uint32(barrier), T.uint32(threads)))


def named_arrive(barrier: Expr | int, threads: int) -> None:
    """Arrive at a named barrier of so many threads, without waiting."""
    T.evaluate(T.ptx["bar.arrive"](_uint32(barrier), T.uint32(threads)))


def _uint32(value: Expr | int) -> Expr:
    return T.uint32(value) if isinstance(value, int) else value.astype("uint32")
