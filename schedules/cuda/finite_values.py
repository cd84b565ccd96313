"""What a row does not see must not reach it: values that are not finite, as 0 * NaN = NaN.

Where some row of a query tile does not see some key of a key tile, the consumers look through the tile of V in shared
memory before they use it: elements that are not finite become 0, and their keys are marked. A row that gives weight to
a marked key does see it: it becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .pipeline import named_sync
from .ptx import WARP, let, put, registers
from .tma import CHUNKS, TensorMap, fence_async, panels

EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}


class FiniteValues:
    """The code for tiles of V in a ring of so many slots, looked through by so many threads that meet at a barrier.

    A mark is the number of the last fill of the ring, counted from 1, in which it was set: no mark is ever taken back.
    """

    def __init__(self, memory: tirx.Buffer, dtype: str, values: TensorMap, slots: int, threads: int) -> None:
        self.memory, self.dtype, self.values, self.slots, self.threads = memory, dtype, values, slots, threads
        self.warps = threads // WARP
        marks = slots * (values.rows + self.warps)
        self.keys = T.alloc_buffer((marks,), "int32", scope="shared", align=4)  # ..., then whether a warp set any

    def initialize(self, thread: Expr, threads: int) -> None:
        """By so many threads of the block, before they meet."""
        count = int(self.keys.shape[0])
        with T.serial(-(-count // threads)) as turn:
            at = turn * threads + thread
            with T.If(at < count), T.Then():
                put(self.keys, at, 0)

    def clean(self, at: Expr, slot: Expr, fill: Expr, thread: Expr, barrier: int) -> None:
        """The tile at memory[at:] (words), which is a fill in that slot, made finite by all threads; they meet then."""
        rows, chunks = self.values.rows, self.values.rows * CHUNKS
        first = let(tirx.truncdiv(at, 4))
        with T.serial(-(-chunks // self.threads)) as turn:
            chunk = let(turn * self.threads + thread)  # a warp has whole rows, and so their marks to itself
            with T.If(chunk < chunks), T.Then(), T.serial(panels(self.values.dim)) as panel:
                found = self.clean_chunk(let(first + panel * chunks + chunk))
                with T.If(found), T.Then():
                    put(self.keys, slot * rows + tirx.truncdiv(chunk, CHUNKS), fill + 1)
                    put(self.keys, self.by_warp(slot) + tirx.truncdiv(thread, WARP), fill + 1)
        fence_async()
        named_sync(barrier, self.threads)

    def clean_chunk(self, chunk: Expr) -> Expr:
        """Eight elements in four words: those that are not finite := 0; whether there were any."""
        words, wrong = registers(4, "uint32"), registers(4, "uint32")
        with T.vectorized(4) as n:
            put(words, n, self.memory[chunk * 4 + n])
        for n in range(4):
            # An exponent of ones, and only that, overflows into the sign.
            exponents = T.bitwise_and(words[n], T.uint32(EXPONENT[self.dtype] * 0x10001))
            overflow = exponents + T.uint32((0x8000 - EXPONENT[self.dtype]) * 0x10001)
            put(wrong, n, T.bitwise_and(overflow >> T.uint32(15), T.uint32(0x10001)) * T.uint32(0xFFFF))
        any_wrong = T.bitwise_or(T.bitwise_or(wrong[0], wrong[1]), T.bitwise_or(wrong[2], wrong[3]))
        found = tirx.NE(let(any_wrong), T.uint32(0))
        with T.If(found), T.Then():
            for n in range(4):
                put(self.memory, chunk * 4 + n, T.bitwise_and(words[n], T.bitwise_not(wrong[n])))
        return found

    def marked(self, slot: Expr, fill: Expr) -> tuple[Expr, Callable[[Expr], Expr]]:
        """After `clean`: whether a key of the fill is marked, and whether one is, by its place in the tile."""
        any_warp = [tirx.EQ(self.keys[self.by_warp(slot) + warp], fill + 1) for warp in range(self.warps)]
        return tirx.any(*any_warp), lambda key: tirx.EQ(self.keys[slot * self.values.rows + key], fill + 1)

    def by_warp(self, slot: Expr) -> Expr:
        return self.slots * self.values.rows + slot * self.warps
