"""Concatenation of tensors along an axis, by copies.

    for each chunk of a row of the output, of about equal length     among threads
        overlap of each tensor with the chunk -> output              in vectors

A row is all elements at one index of the axes before the concatenated one: in it the tensors follow each other, each
without gaps. So all threads copy a cache that grows by a token, at memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.concat import Concatenation, read_concatenation
from ...reading.values import flat_view
from ...tiles import Space
from ...variant import Variant
from ..primitives.vector import CpuFeatures, let, read_cpu_features
from .loops import LoopTiles, emit_vector_loop, split_among_threads

_ONE = tirx.const(1, "int64")


@dataclass(frozen=True, kw_only=True)
class ConcatTiles(LoopTiles):
    """Tiles of concatenations."""

    chunk: int = 1 << 14
    """The maximum number of elements of a task."""

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {"chunk": tuple(1 << n for n in range(10, 19, 2))}

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        return super().rules(problem, cpu) | {"chunk must be positive": self.chunk > 0}


def concat(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a concatenation as vector copies among threads; return None for anything else."""
    concatenation = read_concatenation(func)
    if concatenation is None:
        return None
    cpu = read_cpu_features(target)
    tiles = {"copies": ConcatTiles.default(concatenation, cpu)}
    return [
        Variant("copies", concatenation, cpu, tiles, lambda tiles: _emit(func, concatenation, cpu, tiles["copies"]))
    ]


def _emit(func: tirx.PrimFunc, concatenation: Concatenation, cpu: CpuFeatures, tiles: ConcatTiles) -> tirx.PrimFunc:
    lanes = cpu.vector_bytes // max(DataType(concatenation.output.dtype).itemsize, 1)
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        chunks = let(tirx.max((concatenation.row + (tiles.chunk - 1)) // tiles.chunk, 1))
        chunk_length = let((concatenation.row + (chunks - 1)) // chunks)

        def task(index: Expr) -> None:
            row, low = let(index // chunks), let(index % chunks * chunk_length)
            high = let(tirx.min(low + chunk_length, concatenation.row))
            for source, start, length in concatenation.sources:
                first = let(tirx.max(low, start))
                count = let(tirx.max(tirx.min(high, start + length) - first, 0))
                begin, end = let(row * length + (first - start)), let(row * concatenation.row + first)
                emit_vector_loop(count, lanes, _copy(memory[source], begin, memory[concatenation.output], end))

        split_among_threads(
            concatenation.rows * chunks, concatenation.rows * concatenation.row, tiles.parallel_work, task
        )
    return func.with_body(builder.get().body)


def _copy(
    source: tirx.Buffer, begin: Expr, output: tirx.Buffer, end: Expr
) -> Callable[[int], Callable[[Expr, Expr], None]]:
    return lambda width: lambda i, lane: T.buffer_store(output, source[begin + i], [end + i])
