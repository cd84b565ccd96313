"""Tiles of a tensor that is read along another axis than it is written along, transposed in registers.

If an output is written along one axis and an input is read along another, either the loads or the stores of a loop
would be strided. In a square tile of both axes the input is read in vectors along its own axis, transposed, and stored
where the program of an element finds vectors along the output's axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, children, is_int, loads, rewrite, substitute, uses
from lowering.tensorir.facts import Facts
from lowering.tensorir.moves import read_moved_value

from ...half_precision import is_half
from ...reading.stages import Axis, count_points, unravel
from ...reading.values import Program
from ...tiles import Space
from ..primitives.vector import CpuFeatures, element_type, let, load, prefetch, reinterpret, store, transpose
from .loop_body import hoist_before_loop, is_vectorizable
from .loops import LoopTiles, split_among_threads
from .sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class SweepTiles(LoopTiles):
    """Tiles of element-wise functions."""

    version: ClassVar[int] = 3

    chunk: int = 1 << 13
    """Elements of a task, if a contiguous output is swept."""
    height: int = 64
    """Elements of a task along the axis that is read along, if an input is transposed, ..."""
    width: int = 256
    """... and along the axis that is written along."""
    least: int = 4
    """The minimum side of a square for which transposing it in registers pays off."""

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {
            "chunk": tuple(1 << n for n in range(10, 17)),
            "height": (16, 32, 64, 128),
            "width": (64, 128, 256, 512),
            "least": (2, 4, 8),
        }

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        return super().rules(problem, cpu) | {
            "chunk, height and width must be positive": min(self.chunk, self.height, self.width) > 0,
            f"least = {self.least} must be 2 or more": self.least >= 2,
        }


_STACK = 512  # bytes; TVM's limit is below 1024
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")


@dataclass(frozen=True, eq=False)
class Transposition:
    """A sweep along `last`, with loads whose consecutive elements lie along the outer axis `first`."""

    sweep: Sweep
    first: Axis
    last: Axis
    program: Program
    loads: list[ir.TensorLoad]
    side: int
    tiles: SweepTiles

    @property
    def rows(self) -> int:
        """The rows of one slice of a tile: TVM would allocate larger slices from the heap, at each task."""
        widest = max(DataType(element_type(_bits(node))).itemsize for node in self.loads)
        return max(1, min(self.side, _STACK // (self.side * widest)))

    @property
    def applies(self) -> Expr:
        """Whether there is a whole tile, which the others can overlap."""
        return Analyzer().simplify(tirx.all(self.first.extent >= self.side, self.last.extent >= self.side))

    def emit(self, body: Callable[[list[Expr]], None]) -> None:
        """Emit body(results of the program) for each element, in vectors along `last`."""
        side, first, last = self.side, self.first, self.last
        outer_axes = [axis for axis in self.sweep.outer if axis is not first]
        height, width = self.tiles.height, self.tiles.width
        rows, strips = ((axis.extent + (n - 1)) // n for axis, n in ((first, height), (last, width)))

        def task(index: Expr) -> None:
            point = unravel(index, [*outer_axes, Axis(last.var, strips), Axis(first.var, rows)])
            *outer, strip, row = (let(i) for i in point)
            values = {axis.var: value for axis, value in zip(outer_axes, outer)}
            tiles = [
                [T.alloc_buffer((self.rows * side,), str(_bits(node).ty)) for _ in range(side // self.rows)]
                for node in self.loads
            ]
            low, high = let(strip * width), let(tirx.min(strip * width + width, last.extent))
            top, bottom = let(row * height), let(tirx.min(row * height + height, first.extent))
            with T.serial((bottom - top + (side - 1)) // side) as i, T.serial((high - low + (side - 1)) // side) as j:
                i0 = let(tirx.min(top + i * side, first.extent - side))
                j0 = let(tirx.min(low + j * side, last.extent - side))
                self._tile(values, i0, j0, tiles, body)

        work = self.sweep.extent * self.sweep.work * count_points(self.sweep.outer)
        split_among_threads(count_points(outer_axes) * strips * rows, work, self.tiles.parallel_work, task)

    def _tile(
        self,
        values: Mapping[tirx.Var, Expr],
        i0: Expr,
        j0: Expr,
        tiles: list[list[tirx.Buffer]],
        body: Callable[[list[Expr]], None],
    ) -> None:
        side, i, j = self.side, self.first.var, self.last.var
        for node, slices in zip(self.loads, tiles):
            (position,) = node.indices
            starts = [let(substitute(position, {**values, i: i0, j: j0 + k})) for k in range(side)]
            for start in starts:
                prefetch(node.source, start + side)
            columns = transpose([T.bind(_bits(load(node.source, side, start))) for start in starts])
            for k, column in enumerate(columns):
                store(slices[k // self.rows], column, k % self.rows * side)
        for index in range(side // self.rows):
            with T.serial(self.rows) as row:
                self._row(
                    {**values, i: i0 + (index * self.rows + row)}, row, j0, [slices[index] for slices in tiles], body
                )

    def _row(
        self,
        values: Mapping[tirx.Var, Expr],
        row: Expr,
        j0: Expr,
        tiles: list[tirx.Buffer],
        body: Callable[[list[Expr]], None],
    ) -> None:
        """Emit the results of a vector, whose loads are a row of these slices of tiles."""
        side, j = self.side, self.last.var

        def from_tile(node: Expr) -> Expr | None:
            # The tile contains half-precision bits: TVM 0.27 fails if a vector is reinterpreted back and forth.
            value = read_moved_value(node)
            for transposed, tile in zip(self.loads, tiles):
                if transposed.same_as(node if value is None else value):
                    element = tirx.BufferLoad(tile, [row * side - j0 + j])
                    return tirx.reinterpret(node.ty, element) if is_half(node.ty) else element
            return None

        bindings = [(var, rewrite(expr, from_tile)) for var, expr in self.program.bindings]
        program = Program(bindings, [rewrite(result, from_tile) for result in self.program.results])
        write = hoist_before_loop(program, j, values)(side)
        with T.vectorized(tirx.const(side, "int64")) as lane:
            body(write(j0 + lane, lane))


def read_transposition(sweep: Sweep, facts: Facts, cpu: CpuFeatures, tiles: SweepTiles) -> Transposition | None:
    """Return the sweep in tiles, if one of its loads profits from transposition."""
    if len(sweep.segments) != 1 or not is_vectorizable(sweep.segments[0].program, sweep.segments[0].index):
        return None
    program, last = sweep.segments[0].program, Axis(sweep.segments[0].index, sweep.extent)
    axes = {last.var, *(axis.var for axis in sweep.outer)}

    def stride(node: ir.TensorLoad, axis: Axis) -> Expr:
        (position,) = node.indices
        return facts.simplify(substitute(position, {axis.var: axis.var + 1}) - position)

    data = {var for var, _ in program.bindings}  # positions that depend on data are bound in the program only
    strided = []
    for node in itertools.chain.from_iterable(map(_unguarded, program.expressions)):
        if node.ty == "bool" or loads(node.indices[0]) or uses(node.indices[0], data):
            continue
        step = stride(node, last)
        if not (is_int(step, 0) or is_int(step, 1) or uses(step, axes)):
            strided.append(node)
    for first in sweep.outer:
        contiguous = [node for node in strided if is_int(stride(node, first), 1)]
        if contiguous and (side := _side(contiguous, (first, last), cpu)) >= tiles.least:
            return Transposition(sweep, first, last, program, contiguous, side, tiles)
    return None


def _unguarded(expr: Expr) -> Iterator[ir.TensorLoad]:
    """Yield the loads that run whatever the conditions in `expr` are."""
    if isinstance(expr, ir.TensorLoad):
        yield expr
    if not (isinstance(expr, ir.Call) and expr.op.same_as(_IF_THEN_ELSE)):
        for operand in children(expr):
            yield from _unguarded(operand)


def _side(loads: list[ir.TensorLoad], axes: tuple[Axis, Axis], cpu: CpuFeatures) -> int:
    """Return a power of two: a vector of the widest elements, or less to fit the axes."""
    sides = [cpu.lanes("float32"), *(cpu.lanes(str(node.ty)) for node in loads)]
    sides += [2 ** int(math.log2(axis.extent.value)) for axis in axes if isinstance(axis.extent, tirx.IntImm)]
    return min(sides)


def _bits(value: Expr) -> Expr:
    """Return half precision as integers, which TVM can bind and shuffle."""
    return reinterpret(value, "uint16") if is_half(element_type(value)) else value
