"""Mask values that a row does not see: values that are not finite must not reach it, as 0 * NaN = NaN.

Where some row of a query tile does not see some key of a key tile, the consumers scan the tile of V in shared memory
before they use it. Elements that are not finite become 0, and their keys are marked. A row that gives weight to a
marked key does see it, so it becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives.pipeline import named_sync
from ..primitives.ptx import WARP, alloc_registers, let, store_element
from ..primitives.tma import CHUNKS, TensorMap, count_panels, fence_async

EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}


class FiniteValues:
    """The code for tiles of V in a ring of `slots` slots, scanned by `threads` threads that meet at a barrier.

    A mark is the number of the last fill of the ring, counted from 1, in which it was set, so no mark is ever reset.
    """

    def __init__(self, memory: tirx.Buffer, dtype: str, values: TensorMap, slots: int, threads: int) -> None:
        self.memory, self.dtype, self.values, self.slots, self.threads = memory, dtype, values, slots, threads
        self.warps = threads // WARP
        marks = slots * (values.rows + self.warps)
        self.keys = T.alloc_buffer((marks,), "int32", scope="shared", align=4)  # by key, then whether a warp set any

    def initialize(self, thread: Expr, threads: int) -> None:
        """Initialize the marks by `threads` threads of the block, before their barrier."""
        count = int(self.keys.shape[0])
        with T.serial(-(-count // threads)) as iteration:
            at = iteration * threads + thread
            with T.If(at < count), T.Then():
                store_element(self.keys, at, 0)

    def clean(self, at: Expr, slot: Expr, fill: Expr, thread: Expr, barrier: int) -> None:
        """Make the tile at memory[at:] (32-bit words) finite, by all threads, which then meet at the barrier.

        The tile is fill number `fill`, in slot `slot`.
        """
        rows, chunks = self.values.rows, self.values.rows * CHUNKS
        first = let(tirx.truncdiv(at, 4))
        with T.serial(-(-chunks // self.threads)) as iteration:
            chunk = let(iteration * self.threads + thread)  # a warp has whole rows, so it sets their marks alone
            with T.If(chunk < chunks), T.Then(), T.serial(count_panels(self.values.dim)) as panel:
                has_marks = self.clean_chunk(let(first + panel * chunks + chunk))
                with T.If(has_marks), T.Then():
                    store_element(self.keys, slot * rows + tirx.truncdiv(chunk, CHUNKS), fill + 1)
                    store_element(self.keys, self.warp_marks_offset(slot) + tirx.truncdiv(thread, WARP), fill + 1)
        fence_async()
        named_sync(barrier, self.threads)

    def clean_chunk(self, chunk: Expr) -> Expr:
        """Zero the elements of a chunk that are not finite, and return whether there were any.

        A chunk is eight elements in four registers.
        """
        packed, non_finite = alloc_registers(4, "uint32"), alloc_registers(4, "uint32")
        with T.vectorized(4) as n:
            store_element(packed, n, self.memory[chunk * 4 + n])
        for n in range(4):
            # An exponent of ones, and only that, overflows into the sign.
            exponents = T.bitwise_and(packed[n], T.uint32(EXPONENT[self.dtype] * 0x10001))
            overflow = exponents + T.uint32((0x8000 - EXPONENT[self.dtype]) * 0x10001)
            store_element(non_finite, n, T.bitwise_and(overflow >> T.uint32(15), T.uint32(0x10001)) * T.uint32(0xFFFF))
        any_non_finite = T.bitwise_or(
            T.bitwise_or(non_finite[0], non_finite[1]), T.bitwise_or(non_finite[2], non_finite[3])
        )
        has_non_finite = tirx.NE(let(any_non_finite), T.uint32(0))
        with T.If(has_non_finite), T.Then():
            for n in range(4):
                store_element(self.memory, chunk * 4 + n, T.bitwise_and(packed[n], T.bitwise_not(non_finite[n])))
        return has_non_finite

    def read_marks(self, slot: Expr, fill: Expr) -> tuple[Expr, Callable[[Expr], Expr]]:
        """Return whether a key of the fill is marked, and a function from a key's index in the tile to its mark, after
        `clean`.
        """
        any_warp = [tirx.EQ(self.keys[self.warp_marks_offset(slot) + warp], fill + 1) for warp in range(self.warps)]
        return tirx.any(*any_warp), lambda key: tirx.EQ(self.keys[slot * self.values.rows + key], fill + 1)

    def warp_marks_offset(self, slot: Expr) -> Expr:
        return self.slots * self.values.rows + slot * self.warps
