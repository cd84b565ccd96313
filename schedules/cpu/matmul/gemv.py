"""GEMV and small-N kernels for matrices that are not stored in panels, where packing does not pay off.

Each element of the large matrix is used only a few times, so it is read once, in storage order:

    dots     k is its last axis: lanes are values of k, and several dot products are reduced across lanes at once
    streams  columns of B are its last axis: rows of B times elements of A go to a few rows of accumulators in L1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int, substitute

from ...reading.values import load_widened
from ...tiles import Space
from ..elementwise.loops import LoopTiles, split_among_threads
from ..primitives.vector import (
    CpuFeatures,
    Register,
    allocate_workspace,
    convert,
    let,
    load,
    splat,
    store,
    sum_vector_lanes,
)
from .operands import MatmulOperands
from .results import Values

_ZERO = tirx.const(0, "int64")

_Side: TypeAlias = tuple[tirx.Buffer, Expr, tirx.Var]
"""An operand in memory: its buffer, the offset of an element, and the variable of its row (A) or column (B)."""


@dataclass(frozen=True, kw_only=True)
class GemvTiles(LoopTiles):
    """Tiles of `emit_dots` and `emit_stream`."""

    few: int = 8
    """The maximum number of rows or columns that they serve: 1, 2, 4 or 8."""
    chunk: int = 256
    """Rows or columns of a task of `emit_dots`."""
    sums: int = 4096
    """Elements of C that stay in the nearest cache, in `emit_stream`."""
    depth: int = 8
    """Rows of B that `emit_stream` reads at a time, ..."""
    strip: int = 2
    """... for this number of rows of accumulators."""

    @classmethod
    def default(cls, problem: Any, cpu: CpuFeatures) -> GemvTiles:
        return GemvTiles(depth=8 if cpu.registers >= 32 else 4)

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {
            "few": (1, 2, 4, 8),
            "chunk": (64, 128, 256, 512),
            "sums": (1024, 2048, 4096, 8192),
            "depth": (2, 4, 8, 16),
            "strip": (1, 2, 4),
        }

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        needed = self.depth + 2 * self.strip
        return super().rules(problem, cpu) | {
            f"few = {self.few} must be 1, 2, 4 or 8": self.few in (1, 2, 4, 8),
            "chunk, depth and strip must be positive": min(self.chunk, self.depth, self.strip) > 0,
            f"sums = {self.sums} must be 1024 or more": self.sums >= 1024,
            f"{needed} registers are more than {cpu.registers}": needed <= cpu.registers,
        }


def list_gemv_kernels(o: MatmulOperands, tiles: GemvTiles) -> list[tuple[Expr, Callable[[], None]]]:
    """Return the GEMV and small-N kernels, each with the condition on sizes under which it is preferred."""
    kernels: list[tuple[Expr, Callable[[], None]]] = []
    max_small, lanes = min(tiles.few, o.results.lanes), o.results.lanes
    if is_int(o.stride(o.b_offset, o.k), 1):
        kernels.append(
            (tirx.all(o.results.rows <= max_small, o.depth >= lanes), lambda: emit_dots(o, tiles, few_rows=True))
        )
    if is_int(o.stride(o.a_offset, o.k), 1) and isinstance(o.results.columns, tirx.IntImm):
        kernels.append(
            (tirx.all(o.results.columns <= max_small, o.depth >= lanes), lambda: emit_dots(o, tiles, few_rows=False))
        )
    if is_int(o.stride(o.b_offset, o.results.j), 1) and o.is_linear(o.b_offset, o.k):
        kernels.append(
            (tirx.all(o.results.rows <= tiles.few, o.results.columns >= lanes), lambda: emit_stream(o, tiles))
        )
    return kernels


def is_gemv(o: MatmulOperands) -> bool:
    """Return whether N is too small for a kernel with vectors of columns, and `emit_dots` does not apply either."""
    columns, depth = o.results.columns, o.depth
    if not isinstance(columns, tirx.IntImm) or columns.value >= 4:
        return False
    short = isinstance(depth, tirx.IntImm) and depth.value < o.results.lanes
    return short or columns.value == 1 or not is_int(o.stride(o.a_offset, o.k), 1)


def emit_dots(o: MatmulOperands, tiles: GemvTiles, few_rows: bool) -> None:
    """Emit few rows of A, or few columns of B, times each column of B, or row of A, with k contiguous."""
    dots = _Dots(o, tiles, few_rows)
    work = o.results.batch * dots.few * dots.many * o.depth
    split_among_threads(o.results.batch * dots.chunks, work, tiles.parallel_work, dots.emit_task)


class _Dots:
    """The code of `emit_dots`: the few rows of the small side times each of the many rows of the large side."""

    def __init__(self, o: MatmulOperands, tiles: GemvTiles, few_rows: bool) -> None:
        self.o, self.few_rows, self.lanes, self.acc = o, few_rows, o.results.lanes, o.matmul.acc
        few, many = o.results.rows, o.results.columns
        sides = [(o.a, o.a_offset, o.results.m), (o.b, o.b_offset, o.results.j)]
        if not few_rows:
            few, many, sides = many, few, sides[::-1]
        self.few, self.many, (self.small, self.large) = few, many, sides
        self.in_place = is_int(o.stride(self.small[1], o.k), 1)
        self.max_few, self.chunk = min(tiles.few, self.lanes), tiles.chunk
        self.chunks = let((many + (self.chunk - 1)) // self.chunk)
        # Accumulators of a chunk [few, chunk] or [chunk, few]; duplicates are written after them.
        self.row = self.chunk + self.lanes if few_rows else self.max_few

    def emit_task(self, index: Expr) -> None:
        """Emit one chunk of the large side."""
        o, few, chunk = self.o, self.few, self.chunk
        values = o.results.bind_batch(index // self.chunks)
        first = let(index % self.chunks * chunk)
        count = let(tirx.min(tirx.const(chunk, "int64"), self.many - first))
        sizes: dict[str, tuple[int | Expr, str]] = {"sums": (self.max_few * (chunk + self.lanes), self.acc)}
        if not self.in_place:
            sizes["copy"] = (few * o.depth, self.acc)
        scratch = allocate_workspace(**sizes)
        accumulators, copy = scratch["sums"], scratch.get("copy")
        if copy is not None:
            self.copy_small(copy, values)
        kernel = _DotChunk(self, values, first, count, accumulators, copy)
        if isinstance(few, tirx.IntImm):
            kernel.emit(few.value)
        else:
            for height in (h for h in (1, 2, 4, 8) if h <= self.max_few):
                with T.If(tirx.all(few <= height, few > height // 2)), T.Then():
                    kernel.emit(height)
        with T.serial(few if self.few_rows else count) as r:
            c = o.results.c
            m, column, columns = (r, first + c, count) if self.few_rows else (first + r, c, few)
            o.results.store(o.memory, values, [(accumulators, let(r * self.row))], let(m), column, columns)

    def copy_small(self, copy: tirx.Buffer, values: Values) -> None:
        """Copy the small side, so that its k are contiguous."""
        small, offset, var = self.small
        with T.serial(self.few) as f, T.serial(self.o.depth) as k:
            element = load_widened(small, substitute(offset, {**values, var: f, self.o.k: k}))
            store(copy, element, f * self.o.depth + k)


@dataclass(frozen=True)
class _DotChunk:
    """`count` rows of the large side from `first` on, which are multiplied by the small side or its copy."""

    dots: _Dots
    values: Values
    first: Expr
    count: Expr
    accumulators: tirx.Buffer
    copy: tirx.Buffer | None

    def emit(self, height: int) -> None:
        """Emit `height` rows of the small side times the rows of the large side for whose results there are lanes.

        If there are fewer rows, the last one is repeated.
        """
        dots, o, lanes = self.dots, self.dots.o, self.dots.lanes
        width = lanes // height
        with T.serial((self.count + (width - 1)) // width) as group:
            n = let(group * width)
            x_starts, y_starts = self.find_starts(n, height)
            totals = [Register(splat(0.0, lanes, dots.acc)) for _ in range(height * width)]
            with T.serial(o.depth // lanes) as k:
                self.add_step(totals, x_starts, y_starts, k * lanes)
            rest = let(o.depth % lanes)
            with T.If(rest > 0), T.Then():  # the last vector, without the elements of the previous one
                is_new = T.ramp(T.int64(0), 1, lanes) >= T.broadcast(lanes - rest, lanes)
                self.add_step(totals, x_starts, y_starts, o.depth - lanes, is_new)
            unused = [splat(0.0, lanes, dots.acc)] * (lanes - height * width)
            reduced = Register(sum_vector_lanes([*(total.value for total in totals), *unused]))
            for f in range(height):
                for i in range(width):
                    offset = f * dots.row + n + i if dots.few_rows else (n + i) * dots.row + f
                    store(self.accumulators, reduced.buffer[f * width + i], offset)

    def find_starts(self, n: Expr, height: int) -> tuple[list[Expr], list[Expr]]:
        """Return the offsets of the first k of `height` rows of the small side, and of rows n and up of the large."""
        dots, o = self.dots, self.dots.o
        x_starts = [
            let(f * o.depth) if self.copy is not None else self.row_start(dots.small, f)
            for f in (tirx.min(dots.few - 1, f) for f in range(height))
        ]
        last = let(self.first + self.count - 1)
        width = dots.lanes // height
        y_starts = [self.row_start(dots.large, tirx.min(self.first + n + i, last)) for i in range(width)]
        return x_starts, y_starts

    def row_start(self, side: _Side, at: Expr | int) -> Expr:
        """Return the offset of the first k of a row of a side."""
        _, offset, var = side
        return let(substitute(offset, {**self.values, var: at, self.dots.o.k: _ZERO}))

    def add_step(
        self,
        totals: list[Register],
        x_starts: list[Expr],
        y_starts: list[Expr],
        k: Expr,
        is_new: Expr | None = None,
    ) -> None:
        """Accumulate a vector of values of k; only its new values if `is_new` tells which."""
        (small, *_), (large, *_), width = self.dots.small, self.dots.large, len(y_starts)
        x = [self.load_vector(small if self.copy is None else self.copy, start + k, is_new) for start in x_starts]
        for i, start in enumerate(y_starts):
            y = self.load_vector(large, start + k, is_new)
            for f, x_f in enumerate(x):
                totals[f * width + i].value += x_f * y

    def load_vector(self, memory: tirx.Buffer, start: Expr, is_new: Expr | None) -> Expr:
        """Load a vector in the accumulator type, with zeros for values that are not new."""
        lanes, acc = self.dots.lanes, self.dots.acc
        x = convert(load(memory, lanes, start), acc, self.dots.o.results.cpu)
        return T.bind(x if is_new is None else tirx.Select(is_new, x, splat(0.0, lanes, acc)))


def emit_stream(o: MatmulOperands, tiles: GemvTiles) -> None:
    """Emit few rows of A times B, whose rows are streamed, several at a time."""
    lanes, acc = o.results.lanes, o.matmul.acc
    unroll, strip = tiles.depth, tiles.strip
    vectors = let(o.results.columns // lanes)
    fitting = tirx.max(tiles.sums // lanes // tirx.max(o.results.rows, 1), 1)
    task_vectors = let(tirx.max(tirx.min(fitting, (vectors + 1) // 2), 1))  # vectors of a task; at least two tasks
    chunks = let((vectors + (task_vectors - 1)) // task_vectors)
    row = let((task_vectors + 1) * lanes)

    def task(index: Expr) -> None:
        values = o.results.bind_batch(index // chunks)
        chunk = let(index % chunks)
        first = let(chunk * task_vectors * lanes)
        # The last task also computes the columns that fill no vector, by a vector that overlaps the previous one.
        columns = let(tirx.Select(chunk == chunks - 1, o.results.columns - first, task_vectors * lanes))
        count = let((columns + (lanes - 1)) // lanes)
        accumulators = allocate_workspace(sums=(tiles.sums + tiles.few * lanes, acc))["sums"]
        with T.serial(o.results.rows) as m, T.serial(count) as v:
            store(accumulators, splat(0.0, lanes, acc), m * row + v * lanes)
        step = o.stride(o.b_offset, o.k)

        def add(k0: Expr, depth: int, m: Expr, height: int) -> None:
            """Emit rows m .. m + height of accumulators += A[.., k0 .. k0 + depth] B[k0 .. k0 + depth, ..]."""
            a = [
                [
                    let(load_widened(o.a, substitute(o.a_offset, {**values, o.results.m: m + i, o.k: k0 + k})))
                    for k in range(depth)
                ]
                for i in range(height)
            ]
            start = let(substitute(o.b_offset, {**values, o.k: k0, o.results.j: first}))
            with T.serial(count) as v:
                column = let(tirx.min(v * lanes, columns - lanes))
                c = [Register(load(accumulators, lanes, (m + i) * row + v * lanes)) for i in range(height)]
                for k in range(depth):
                    b = T.bind(convert(load(o.b, lanes, start + column + k * step), acc, o.results.cpu))
                    for i in range(height):
                        c[i].value += splat(a[i][k], lanes, acc) * b
                for i in range(height):
                    store(accumulators, c[i].value, (m + i) * row + v * lanes)

        def rows(k0: Expr, depth: int) -> None:
            with T.serial(o.results.rows // strip) as s:
                add(k0, depth, let(s * strip), strip)
            with T.serial(o.results.rows % strip) as s:
                add(k0, depth, let(o.results.rows - 1 - s), 1)

        with T.serial(o.depth // unroll) as k:
            rows(let(k * unroll), unroll)
        with T.serial(o.depth % unroll) as k:
            rows(let(o.depth - o.depth % unroll + k), 1)
        with T.serial(o.results.rows) as m:
            last = load(accumulators, lanes, m * row + (count - 1) * lanes)
            store(accumulators, last, m * row + columns - lanes)
            o.results.store(o.memory, values, [(accumulators, let(m * row))], m, first + o.results.c, columns)

    work = o.results.batch * o.results.rows * o.results.columns * o.depth
    split_among_threads(o.results.batch * chunks, work, tiles.parallel_work, task)
