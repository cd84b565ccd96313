"""A kernel that reads memory and does nothing else: how fast that can be is what decoding is measured by."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.records import decode
from schedules.cuda.primitives.ptx import WARP, alloc_registers, let, reduce_warp, store_element, unrolled

WORDS = 4  # of a chunk of 16 bytes
THREADS = 256  # per block


SM_COUNT = 132  # of an H100 and an H200


@dataclass(frozen=True)
class Read:
    """warps is the number of results; those of warps that a launch has not are 0."""

    warps: int

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("data", "found")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Read:
        """Read the text of `to_json`."""
        return decode(Read, json.loads(text), "the read")

    def function(self, blocks: int = 8 * SM_COUNT, ahead: int = 4) -> tirx.PrimFunc:
        """data int32 [chunks, WORDS], found int32 [warps]: return the kernel that folds all reads of each warp by xor.

        blocks are those of the launch, whose warps must divide those of the record; ahead chunks of a thread are in
        flight at a time.
        """
        step = blocks * THREADS  # chunks between those of a thread
        with IRBuilder() as builder, T.prim_func():
            chunks = tirx.Var("chunks", "int64")
            data = T.arg("data", T.Buffer((chunks, WORDS), "int32"))
            folds = T.arg("found", T.Buffer((self.warps,), "int32"))
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", THREADS) as thread,
            ):
                first = let((block * THREADS + thread).astype("int64"))
                lanes, folded = alloc_registers(WORDS * ahead, "int32"), alloc_registers(1, "int32")
                store_element(folded, 0, T.int32(0))
                rounds = let(tirx.ceildiv(chunks, T.int64(step * ahead)))
                with T.serial(T.int64(0), rounds) as iteration:
                    with unrolled(ahead) as n:
                        chunk = let((iteration * ahead + n.astype("int64")) * step + first)
                        lane = tirx.Ramp(n * WORDS, 1, WORDS)
                        is_inside = chunk < chunks
                        with T.If(is_inside):
                            with T.Then():
                                T.buffer_store(lanes, tirx.BufferLoad(data, [chunk, tirx.Ramp(0, 1, WORDS)]), [lane])
                            with T.Else():
                                T.buffer_store(lanes, tirx.Broadcast(T.int32(0), WORDS), [lane])
                    with unrolled(WORDS * ahead) as n:
                        store_element(folded, 0, folded[0] ^ lanes[n])
                result = let(reduce_warp(folded[0], lambda a, b: a ^ b))
                with T.If(tirx.truncmod(thread, WARP) == 0), T.Then():
                    warp = let(tirx.truncdiv(block * THREADS + thread, WARP))
                    store_element(folds, warp, result)
                    with T.serial(1, self.warps * WARP // step) as other:
                        store_element(folds, warp + other * (step // WARP), T.int32(0))
        return builder.get()
