"""Tensors one behind the other along an axis, copied into one.

    for each part of a row of the output, of about equal length      among threads
        what each tensor has of it -> output                         in vectors

A row is everything behind one index of the axes in front of the joined one: in it the tensors follow each other, each
without gaps. So a cache that grows by a token is copied by all threads, at the rate of memory.
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

from ..reading.concat import Concatenation, read_concatenation
from ..reading.values import flat_view
from ..tiles import Space
from ..variant import Variant
from .loops import LoopTiles, split_among_threads, vector_loop
from .vector import Machine, let, machine

_ONE = tirx.const(1, "int64")


@dataclass(frozen=True, kw_only=True)
class ConcatTiles(LoopTiles):
    """Tiles of concatenations."""

    chunk: int = 1 << 14
    """The most elements of a task."""

    @classmethod
    def space(cls, problem: Any, machine: Machine) -> Space:
        return super().space(problem, machine) | {"chunk": tuple(1 << n for n in range(10, 19, 2))}

    def rules(self, problem: Any, machine: Machine) -> dict[str, bool]:
        return super().rules(problem, machine) | {"chunk must be positive": self.chunk > 0}


def concat(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Vector copies among threads for a concatenation; None for anything else."""
    joined = read_concatenation(func)
    if joined is None:
        return None
    cpu = machine(target)
    tiles = {"copies": ConcatTiles.default(joined, cpu)}
    return [Variant("copies", joined, cpu, tiles, lambda tiles: _emit(func, joined, cpu, tiles["copies"]))]


def _emit(func: tirx.PrimFunc, joined: Concatenation, cpu: Machine, tiles: ConcatTiles) -> tirx.PrimFunc:
    lanes = cpu.vector_bytes // max(DataType(joined.output.dtype).itemsize, 1)
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        chunks = let(tirx.max((joined.row + (tiles.chunk - 1)) // tiles.chunk, 1))
        each = let((joined.row + (chunks - 1)) // chunks)

        def task(index: Expr) -> None:
            row, low = let(index // chunks), let(index % chunks * each)
            high = let(tirx.min(low + each, joined.row))
            for source, start, length in joined.parts:
                first = let(tirx.max(low, start))
                count = let(tirx.max(tirx.min(high, start + length) - first, 0))
                begin, end = let(row * length + (first - start)), let(row * joined.row + first)
                vector_loop(count, lanes, _copy(memory[source], begin, memory[joined.output], end))

        split_among_threads(joined.rows * chunks, joined.rows * joined.row, tiles.parallel_work, task)
    return func.with_body(builder.get().body)


def _copy(
    source: tirx.Buffer, begin: Expr, output: tirx.Buffer, end: Expr
) -> Callable[[int], Callable[[Expr, Expr], None]]:
    return lambda width: lambda i, lane: T.buffer_store(output, source[begin + i], [end + i])
