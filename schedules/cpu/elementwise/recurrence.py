"""Recurrences (lowering/tensorir/recurrence.py) in vectors of units, rows of several batches at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.quantized_states import PackedDot
from lowering.tensorir.recurrence import ATTRIBUTE, BLOCK, Recurrence, RecurrenceEmitter, declare_recurrence

from ...tiles import Space, Tiles
from ...variant import Variant
from ..matmul.dot_int8 import dot, dot_signed, multiplies_signed
from ..primitives.vector import CpuFeatures, let, of_vectors, read_cpu_features
from .loops import split_among_threads

_PARALLEL_WORK = 1 << 18
"""Multiplications from which on threads share the batches."""


@dataclass(frozen=True)
class RecurrenceTiles(Tiles):
    """Tiles of `recurrence`."""

    rows: int
    """Batches for which a row of R is read once."""

    @classmethod
    def default(cls, problem: Recurrence, cpu: CpuFeatures) -> RecurrenceTiles:
        return RecurrenceTiles(4 if cpu.registers == 32 else 2)

    @classmethod
    def space(cls, problem: Recurrence, cpu: CpuFeatures) -> Space:
        return {"rows": (1, 2, 3, 4, 6)}

    def rules(self, problem: Recurrence, cpu: CpuFeatures) -> dict[str, bool]:
        return {f"rows = {self.rows} must be 1 to 8": self.rows in range(1, 9)}


def recurrence(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a function that has a Recurrence attribute."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem, cpu = Recurrence.from_json(str(func.attrs[ATTRIBUTE])), read_cpu_features(target)
    tiles = {"recurrence": RecurrenceTiles.default(problem, cpu)}
    return [Variant("vectors", problem, cpu, tiles, lambda t: _kernel(problem, cpu, t["recurrence"]))]


def _kernel(problem: Recurrence, cpu: CpuFeatures, tiles: RecurrenceTiles) -> tirx.PrimFunc:
    lanes = min(cpu.lanes("float32"), BLOCK)

    def function(name: str, x: Expr) -> Expr:
        value = of_vectors(f"tirx.{name}", [x])
        assert value is not None
        return value

    is_signed = multiplies_signed(cpu, problem.holds_lowest)
    multiply = PackedDot(partial(dot_signed if is_signed else dot, cpu=cpu), is_signed)
    with IRBuilder() as builder, T.prim_func(private=True):
        buffers = declare_recurrence(problem)
        L, B, _ = buffers["x"].shape
        groups = (B + (tiles.rows - 1)) // tiles.rows
        work = L * B * (problem.units * problem.units * problem.gates)

        def rows(group: Expr) -> None:
            first = let(group * tiles.rows)
            left = let(B - first)
            with T.If(left >= tiles.rows):
                with T.Then():
                    RecurrenceEmitter(problem, buffers, first, tiles.rows, lanes, function, multiply).emit()
                with T.Else(), T.serial(left) as row:
                    RecurrenceEmitter(problem, buffers, let(first + row), 1, lanes, function, multiply).emit()

        split_among_threads(groups, work, _PARALLEL_WORK, rows)
    return builder.get()
