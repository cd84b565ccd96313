"""Producer and consumers of one thread block: mbarrier rings and named barriers (PTX ISA 9.7.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .attention_tiles import WgmmaTiles
from .matmul_tiles import WgmmaMatmulTiles
from .ptx import let, registers, uniform

WARPGROUP = 128
"""Threads."""


@dataclass(frozen=True)
class Ring:
    """Slots in shared memory that TMA fills and consumers empty, in turn: fill n goes to slot n mod `slots`.

    Two mbarriers per slot, from barriers[first] on: one completes when the bytes of a fill have arrived, the other when
    all `consumers` have let go of it; either flips its parity with every round of the ring.
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
        """The first barrier behind those of the ring."""
        return self.first + 2 * self.slots

    def initialize(self) -> None:
        """By one thread, before a fence and a barrier of the block."""
        for slot in range(self.slots):
            for at, arrivals in (
                (self.first + slot, 1),
                (self.first + self.slots + slot, self.consumers * self.cluster),
            ):
                T.evaluate(T.ptx.mbarrier.init.shared.b64(self.barriers.ptr_to([at]), T.uint32(arrivals)))

    def slot(self, n: Expr) -> Expr:
        return tirx.truncmod(n, self.slots)

    def full(self, n: Expr) -> Expr:
        """The address of the barrier that fill n completes."""
        return self.barriers.ptr_to([self.first + self.slot(n)])

    def reserve(self, n: Expr, size: int) -> None:
        """The producer's one thread: waits until the slot of fill n is empty, and announces so many bytes."""
        T.evaluate(T.cuda.mbarrier_wait(self._empty(n), tirx.const(1, "int32") - self._parity(n)))
        T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(self.full(n), T.uint32(size)))

    def wait(self, n: Expr) -> None:
        """A consumer: waits until fill n has arrived."""
        T.evaluate(T.cuda.mbarrier_wait(self.full(n), self._parity(n)))

    def release(self, n: Expr, lane: Expr) -> None:
        """A consumer, by one of its warps, as often as `consumers` says: lets go of fill n, in each block."""
        with T.If(lane < self.cluster), T.Then():
            if self.cluster == 1:
                T.evaluate(T.ptx.mbarrier.arrive.shared.b64(self._empty(n)))
            else:
                there, here = registers(1, "uint32"), T.cuda.cvta_generic_to_shared(self._empty(n))
                # No .release.cluster: consumers wrote nothing, and ptxas puts a fence of the whole GPU before it, which
                # takes as long as half of a step.
                T.evaluate(T.ptx["mapa.shared::cluster.u32"](there[0], here, lane.astype("uint32")))
                T.evaluate(T.ptx["mbarrier.arrive.shared::cluster.b64"](there[0]))

    def _empty(self, n: Expr) -> Expr:
        return self.barriers.ptr_to([self.first + self.slots + self.slot(n)])

    def _parity(self, n: Expr) -> Expr:
        return tirx.truncmod(tirx.truncdiv(n, self.slots), 2)


def initialize(thread: Expr, rings: Iterable[Ring]) -> None:
    """Rings are ready behind the next barrier of the block."""
    with T.If(tirx.EQ(thread, 0)), T.Then():
        for ring in rings:
            ring.initialize()
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())


def specialize(
    tiles: WgmmaTiles | WgmmaMatmulTiles, thread: Expr, produce: Callable[[], None], consume: Callable[[Expr], None]
) -> None:
    """The first warpgroup lets one thread produce, the others consume; consume is given the consumer's number.

    Registers move from the producer to the consumers, unless these get no more than a thread has at launch: ptxas would
    ignore the request (C7508).
    """
    moved = tiles.consumer_registers > 65536 // tiles.threads // 8 * 8
    warpgroup = let(uniform(tirx.truncdiv(thread, WARPGROUP)))
    with T.If(tirx.EQ(warpgroup, 0)):
        with T.Then():
            if moved:
                T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](tiles.producer_registers))
            with T.If(tirx.EQ(thread, 0)), T.Then():
                produce()
        with T.Else():
            if moved:
                T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](tiles.consumer_registers))
            consume(let(warpgroup - 1))


def named_sync(barrier: Expr | int, threads: int) -> None:
    """Waits at a named barrier for so many threads, this one included, whole warps each."""
    T.evaluate(T.ptx["bar.sync"](_uint32(barrier), T.uint32(threads)))


def named_arrive(barrier: Expr | int, threads: int) -> None:
    """Arrives at a named barrier of so many threads and goes on."""
    T.evaluate(T.ptx["bar.arrive"](_uint32(barrier), T.uint32(threads)))


def _uint32(value: Expr | int) -> Expr:
    return T.uint32(value) if isinstance(value, int) else value.astype("uint32")
