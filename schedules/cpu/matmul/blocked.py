"""One matmul by panels of B: addressing, packing of panels, and the micro-kernel (the loops: matmul.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, is_int, substitute, uses
from lowering.tensorir.facts import Facts

from ...reading.stages import Axis
from ...reading.values import load_widened
from ..elementwise.loops import emit_vector_loop
from ..primitives.vector import LINE, Register, convert, let, load, prefetch, splat, store, transpose
from .operands import MatmulOperands
from .packed_lanes import PackedLanes, choose_packing
from .panels import PanelTiles, is_panel_width
from .quantized_matmul import accumulate_quantized
from .results import Values
from .runs import StrideRuns, find_runs


class BlockedMatmul:
    """One matmul C = A B, blocked into panels of B.

    The free variables of the offsets are: batch axes as themselves, row m of M, step k, and column c of a panel. A step
    is `factor` values of k, one or those of a packed lane (packed_lanes.py); each has its own offset. Panels have nr
    columns. Elements of a row of A have a constant stride, over all steps or within runs of them. Runs arise, for
    example, in the rows of a convolution's window.
    """

    def __init__(self, operands: MatmulOperands, tiles: PanelTiles) -> None:
        self.tiles, self.lanes, self.acc = tiles, operands.results.lanes, operands.matmul.acc
        self.operands, self.matmul, self.results = operands, operands.matmul, operands.results
        self.cpu = self.results.cpu
        self.choose_panels()
        matmul = self.matmul
        self.a_offsets = self.step_offsets(
            matmul.a, [substitute(index, self.results.point) for index in matmul.a.indices]
        )
        self.a_step = self.operands.stride(self.a_offsets[0], self.k.var)
        self.runs: StrideRuns | None = None
        if matmul.quantization is None:
            self.choose_runs()
        if self.packing is not None or matmul.quantization is not None:
            apart = self.is_dense(self.a_offsets, self.k.var, self.k_per_lane)
        else:
            apart = not uses(self.a_step, {self.k.var})
        fits = self.packing is not None or matmul.a.ty == self.acc
        self.is_a_in_place: bool = fits and (apart or self.runs is not None)

    @property
    def facts(self) -> Facts:
        return self.results.facts

    def choose_panels(self) -> None:
        """Set nr, kc, the packing, and the addressing of B: packed panels if B is stored so, or the matrix to pack
        from."""
        matmul, lanes = self.matmul, self.lanes
        self.kc = self.tiles.kc
        if matmul.quantization is not None:
            self.nr, self.is_b_in_place, block = matmul.quantization.nr, True, matmul.quantization.block
            self.kc = max(self.kc // block, 1) * block if block else self.kc
            self.set_step(None)
            return
        packing = choose_packing(str(matmul.a.ty), str(matmul.b.ty), self.acc, self.cpu)
        steps = [packing] if self.acc == "int32" else [None, packing] if packing is not None else [None]
        panel_widths = [size.value for size in matmul.b.source.shape[-2:] if isinstance(size, tirx.IntImm)]
        facts = self.results.facts
        # Try each form in which B may be stored; the last one is the form to pack into if B is stored in neither.
        for step in steps:
            for nr in (*(size for size in panel_widths if is_panel_width(size, lanes)), self.tiles.vectors * lanes):
                # Copy the facts: those of a panel of one width are wrong for another.
                self.results.facts = facts.copy()
                self.set_step(step)
                self.nr = nr
                indices = self.index_b_panel(nr)
                self.b_offsets = self.step_offsets(matmul.b, indices)
                self.is_b_in_place = self.is_panel(indices)
                if self.is_b_in_place:
                    return

    def choose_runs(self) -> None:
        """Set the runs, if there are any; kc becomes a multiple of their length."""
        a, zero = self.matmul.a, tirx.const(0, "int64")
        # Subtract per index, because the symbolic sizes multiplied into an offset do not cancel.
        steps = [self.results.simplify(i - substitute(i, {self.matmul.k.var: zero})) for i in a.indices]
        values = [
            self.results.simplify(position) for position in self.expand_step(flatten_index(a.source.shape, steps))
        ]
        is_complete = self.packing is None or self.is_whole
        runs = None if self.depends_on_rows(values[0]) or not is_complete else find_runs(values, self.k, self.results)
        if runs is not None:
            n = runs.length
            length = n if n <= self.kc else max(m for m in range(1, self.kc + 1) if n % m == 0)
            self.runs, self.a_step = replace(runs, length=length), runs.step
            self.kc = max(self.kc // length, 1) * length

    def depends_on_rows(self, expr: Expr) -> bool:
        return uses(expr, {self.results.m, *(axis.var for axis in (*self.matmul.rows, *self.matmul.batch))})

    def set_step(self, packing: PackedLanes | None) -> None:
        """Set the step along k to one value, or to those of a packed lane."""
        k = self.matmul.k
        self.packing, self.k_per_lane = packing, 1 if packing is None else packing.k_per_lane
        n = self.k_per_lane
        self.k = k if n == 1 else Axis(tirx.Var("word", "int64"), self.results.simplify((k.extent + (n - 1)) // n))
        self.whole = k.extent // n  # complete steps
        self.rest = self.results.simplify(k.extent % n)  # values of the incomplete last step
        self.is_whole = is_int(self.results.simplify(self.k.extent - self.whole), 0)
        self.facts.bind(self.k.var, 0, self.k.extent)

    def expand_step(self, expr: Expr) -> list[Expr]:
        """Return an expression of the value of k, for each value of step k."""
        first = self.k.var * self.k_per_lane
        return [substitute(expr, {self.matmul.k.var: first + n}) for n in range(self.k_per_lane)]

    def step_offsets(self, operand: ir.TensorLoad, indices: list[Expr]) -> list[Expr]:
        """Return the offsets of the elements of step k."""
        return [
            self.results.simplify(position)
            for position in self.expand_step(flatten_index(operand.source.shape, indices))
        ]

    def is_dense(self, offsets: list[Expr], var: tirx.Var, step: int) -> bool:
        """Return whether elements of a step are consecutive, and `step` elements before those at var + 1."""
        return is_int(self.operands.stride(offsets[0], var), step) and all(
            is_int(self.results.simplify(position - offsets[0]), n) for n, position in enumerate(offsets)
        )

    def index_b_panel(self, nr: int) -> list[Expr]:
        """Return the indices of B at column c of a panel of nr columns."""
        columns = self.matmul.j.extent
        self.facts.bind(self.results.c, 0, tirx.const(nr, "int64"))
        self.facts.bind(self.results.panel, 0, (columns + nr - 1) // nr)
        j = {self.matmul.j.var: self.results.panel * nr + self.results.c}
        return [self.results.simplify(substitute(index, j)) for index in self.matmul.b.indices]

    def is_panel(self, indices: list[Expr]) -> bool:
        """Return whether the columns of a panel are consecutive, the last panel is padded, and panels have no gaps."""
        bounds = zip(indices, self.matmul.b.source.shape)
        return (
            self.is_dense(self.b_offsets, self.results.c, self.k_per_lane)
            and is_int(self.operands.stride(self.b_offsets[0], self.k.var), self.k_per_lane * self.nr)
            and all(self.facts.can_prove(last < extent) for index, extent in bounds for last in self.expand_step(index))
        )

    @property
    def column(self) -> Expr:
        """Column c of a panel as a column of C."""
        return self.results.panel * self.nr + self.results.c

    @property
    def panels(self) -> Expr:
        return (self.matmul.j.extent + (self.nr - 1)) // self.nr

    @property
    def k_blocks(self) -> Expr:
        return self.results.simplify(tirx.max((self.k.extent + (self.kc - 1)) // self.kc, 1))

    def count_columns(self, values: Values) -> Expr:
        """Return the number of columns of a panel."""
        nr, columns = self.nr, self.matmul.j.extent
        if is_int(self.results.simplify(columns % nr), 0):
            return tirx.const(nr, "int64")
        return let(tirx.min(tirx.const(nr, "int64"), columns - values[self.results.panel] * nr))

    def scratch_sizes(self) -> dict[str, int]:
        """Return the scratch elements, in the accumulator type, that `accumulate_panel` needs besides the tile."""
        sizes = {} if self.is_b_in_place else {"panel": self.kc * self.nr}
        return sizes if self.is_a_in_place else {**sizes, "strip": self.tiles.mr * self.kc}

    def accumulate_panel(
        self,
        values: Values,
        first: Expr,
        rows: Expr,
        columns: Expr,
        tile: tirx.Buffer,
        scratch: dict[str, tirx.Buffer],
        finish: Callable[[Expr, Expr], None] | None,
    ) -> None:
        """Accumulate a panel's columns for `rows` rows from `first` on, each in its row of the tile.

        finish(row, tile_row) receives a row as soon as it is accumulated, from row `tile_row` of the tile.
        """
        t, self.values = self.tiles, values
        panel = None if self.is_b_in_place else scratch["panel"]
        strip = None if self.is_a_in_place else scratch["strip"]
        unit = tirx.const(1, "int64")
        length = self.choose_k_block(rows)
        blocks = let(tirx.max((self.k.extent + (length - 1)) // length, unit))
        with T.serial(blocks) as k_block:
            k0 = let(k_block * length)
            depth = let(tirx.min(length, self.k.extent - k0))
            if panel is not None:
                self.pack_panel(panel, k0, depth, columns)
            # The heights of strips of rows differ by one at most: seven rows are four and three.
            strips = let(tirx.max((rows + (t.mr - 1)) // t.mr, 1))
            low, higher = let(rows // strips), let(rows % strips)
            with T.serial(strips) as i:
                height, row = let(low + tirx.Select(i < higher, unit, unit - 1)), let(i * low + tirx.min(i, higher))
                tile_row = row
                if finish is not None:
                    # Rows that need only one block of k share the first rows of the tile, in the nearest cache.
                    tile_row = let(tirx.Select(blocks <= 1, unit - 1, row))
                    self.results.prefetch_rows(
                        self.operands.memory, values, let(first + row), height, self.column, self.nr
                    )
                prefetch_next = self.plan_prefetch(k0, depth, i, strips)
                for h in range(t.mr, 0, -1):
                    with T.If(height == h), T.Then():
                        self.emit_micro_kernel(
                            h, let(first + row), tile_row, k0, depth, tile, panel, strip, prefetch_next
                        )
                if finish is not None:
                    with T.If(k_block == blocks - 1), T.Then(), T.serial(height) as r:
                        finish(row + r, tile_row + r)

    def choose_k_block(self, rows: Expr) -> Expr:
        """Return the number of steps of a block of k.

        With a few rows a matmul is bound by memory bandwidth, and its strips prefetch the next block. The block should
        be near, and the accumulators of few rows are cheap to store in between.
        """
        long = tirx.const(self.kc, "int64")
        if not self.has_prefetch or self.runs is not None or self.tiles.streamed_kc >= self.kc:
            return long
        return let(tirx.Select(rows <= self.tiles.streamed_rows, tirx.const(self.tiles.streamed_kc, "int64"), long))

    @property
    def has_prefetch(self) -> bool:
        """Whether strips prefetch the next block: not if panels are packed or quantized values are widened."""
        return self.is_b_in_place and self.matmul.quantization is None

    def plan_prefetch(self, k0: Expr, depth: Expr, number: Expr, strips: Expr) -> Callable[[Expr], None] | None:
        """Return a function that a strip calls at each step k to prefetch its share of the panel's next block.

        Memory is thus read at all times, however few strips there are: eight rows take no longer than one. Blocks of a
        panel are consecutive, and so are panels. Return None if there is nothing to prefetch.
        """
        if not self.has_prefetch:
            return None
        width = self.nr * self.k_per_lane
        elements_of_line = LINE // DataType(self.matmul.b.ty).itemsize
        size = let(depth * width)
        start = let(
            self.bind_offset(self.b_offsets[0], k=k0, c=tirx.const(0, "int64")) + size + number * size // strips
        )
        share, bits = let(tirx.const(1 << 8, "int64") // strips), tirx.const(8, "int64")  # a fixed-point number

        def prefetch_share(k: Expr) -> None:
            for element in range(0, width, elements_of_line):
                prefetch(self.operands.b, start + T.shift_right((k * width + element) * share, bits), level=2)

        return prefetch_share

    def bind_offset(self, position: Expr, **where: Expr) -> Expr:
        """Return an offset of A or B in this task, at m, k or c."""
        names = {"m": self.results.m, "c": self.results.c, "k": self.k.var}
        return substitute(
            position,
            {**self.values, **{names[name]: value for name, value in where.items()}},
        )

    def pack_panel(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """Pack columns of B into panel[k, c]; columns after the last one hold unused values."""
        if self.packing is None and is_int(self.operands.stride(self.b_offsets[0], self.k.var), 1):
            self.pack_panel_transposed(panel, k0, depth, columns)
            return

        def copy_row(k: Expr, _: Expr, complete: bool) -> None:
            def copy(c: Expr, lane: Expr) -> None:
                offsets = [self.bind_offset(position, k=k0 + k, c=c) for position in self.b_offsets]
                store(panel, self.load_step(self.operands.b, offsets, complete), k * self.nr + c)

            emit_vector_loop(columns, self.lanes, lambda width: copy)
            with T.serial(self.nr - columns) as c:
                store(panel, tirx.const(0, self.acc), k * self.nr + columns + c)

        self.emit_steps(k0, depth, copy_row)

    def pack_panel_transposed(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """Pack a panel if values of k are consecutive: squares of them are transposed in registers."""
        lanes, nr, memory = self.lanes, self.nr, self.operands.b
        with T.serial(nr // lanes) as v:
            # The last column is repeated after the end.
            panel_columns = [let(tirx.min(v * lanes + i, columns - 1)) for i in range(lanes)]
            starts = [let(self.bind_offset(self.b_offsets[0], k=k0, c=c)) for c in panel_columns]
            squares = let(depth // lanes)
            with T.serial(squares) as square:
                k = let(square * lanes)
                rows = [let(convert(load(self.operands.b, lanes, start + k), self.acc, self.cpu)) for start in starts]
                for i, row in enumerate(transpose(rows)):
                    store(panel, row, (k + i) * nr + v * lanes)
            with T.serial(depth - squares * lanes) as rest:
                k = let(squares * lanes + rest)
                for i, start in enumerate(starts):
                    store(panel, load_widened(memory, start + k), k * nr + v * lanes + i)

    def emit_steps(self, k0: Expr, depth: Expr, body: Callable[[Expr, Expr, bool], None]) -> None:
        """Emit body(k, distance of A's element from `row_start`, whether step k0 + k is complete) for k < depth.

        The last packed lane is incomplete if values are left over.
        """
        if self.runs is not None:
            with self.iterate_runs(k0, depth) as (first, distance), T.serial(self.runs.length) as n:
                body(first + n, distance + n * self.a_step, True)
            return
        whole = depth if self.is_whole else let(tirx.min(depth, self.whole - k0))
        with T.serial(whole) as k:
            body(k, k * self.a_step, True)
        if not self.is_whole:
            with T.If(whole < depth), T.Then():
                body(whole, whole * self.a_step, False)

    @contextmanager
    def iterate_runs(self, k0: Expr, depth: Expr) -> Iterator[tuple[Expr, Expr]]:
        """Emit a loop over the runs of a k block, and yield a run's first step and its distance from `row_start`."""
        assert self.runs is not None
        with T.serial(depth // self.runs.length) as number:
            first = let(number * self.runs.length)
            yield first, let(self.bind_offset(self.runs.distance, k=k0 + first))

    def row_start(self, row: Expr, k0: Expr) -> Expr:
        """Return the offset of A's row at the first step of a k block, or at step 0 if there are runs."""
        return let(self.bind_offset(self.a_offsets[0], m=row, k=k0 if self.runs is None else tirx.const(0, "int64")))

    def load_step(self, memory: tirx.Buffer, offsets: list[Expr], complete: bool) -> Expr:
        """Load the element or the packed lane of a step whose elements have these offsets."""
        if self.packing is None:
            return load_widened(memory, offsets[0])
        return self.pack_step([tirx.BufferLoad(memory, [position]) for position in offsets], complete)

    def pack_step(self, loads: list[Expr], complete: bool) -> Expr:
        """Pack a step's loads into one lane; for an incomplete step, load only the values that exist."""
        assert self.packing is not None
        if not complete and isinstance(self.rest, tirx.IntImm):
            loads = loads[: self.rest.value]
        elif not complete:
            zero = tirx.const(0, loads[0].ty)
            guarded = (tirx.if_then_else(n < self.rest, load, zero) for n, load in enumerate(loads[1:-1], 1))
            loads = [loads[0], *guarded]
        return self.packing.pack_values(loads)

    def emit_micro_kernel(
        self,
        height: int,
        row: Expr,
        tile_row: Expr,
        k0: Expr,
        depth: Expr,
        tile: tirx.Buffer,
        panel: tirx.Buffer | None,
        strip: tirx.Buffer | None,
        prefetch_next: Callable[[Expr], None] | None,
    ) -> None:
        """Emit tile[tile_row + i, c] += sum over k of A[row + i, k0 + k] B[k0 + k, c] for i < height, k < depth.

        The tile starts from zeros if k0 is 0. prefetch_next(k) is called at each step.
        """
        p = self.matmul
        vectors = range(0, self.nr, self.lanes)
        a = self.operands.a
        if strip is None:
            starts = [self.row_start(row + i, k0) for i in range(height)]
        else:
            self.fill_strip(strip, height, row, k0, depth)
            a, starts = strip, [tirx.const(i * self.kc, "int64") for i in range(height)]
        zero = splat(tirx.const(0, self.acc), self.lanes, self.acc)
        if p.quantization is not None:
            with T.If(k0 == 0), T.Then(), T.serial(height * (self.nr // self.lanes)) as v:
                store(tile, zero, tile_row * self.nr + v * self.lanes)
            accumulate_quantized(self, p.quantization, a, starts, tile_row, k0, depth, tile)
            return
        c = [[Register(zero) for _ in vectors] for _ in range(height)]
        with T.If(k0 > 0), T.Then():
            for i in range(height):
                for v, accumulator in zip(vectors, c[i]):
                    accumulator.value = load(tile, self.lanes, (tile_row + i) * self.nr + v)

        def add(k: Expr, distance: Expr, complete: bool) -> None:
            if prefetch_next is not None:
                prefetch_next(k)
            b = [self.load_b_vector(panel, k0, k, v) for v in vectors]
            for i in range(height):
                position = starts[i] + (distance if strip is None else k)
                if strip is not None or self.packing is None:
                    a_ik = a[position]
                elif complete:
                    a_ik = self.packing.pack_vector(load(a, self.k_per_lane, position))
                else:
                    a_ik = self.pack_step([a[position + n] for n in range(self.k_per_lane)], complete=False)
                a_ik = T.bind(splat(a_ik, self.lanes, self.acc))
                for accumulator, b_v in zip(c[i], b):
                    total = accumulator.value
                    accumulator.value = (
                        total + a_ik * b_v if self.packing is None else self.packing.dot(total, a_ik, b_v)
                    )

        self.emit_steps(k0, depth, add)
        for i in range(height):
            for v, accumulator in zip(vectors, c[i]):
                store(tile, accumulator.value, (tile_row + i) * self.nr + v)

    def load_b_vector(self, panel: tirx.Buffer | None, k0: Expr, k: Expr, v: int) -> Expr:
        """Load columns v and up of a panel at step k0 + k."""
        if panel is not None:
            return T.bind(load(panel, self.lanes, k * self.nr + v))
        start = let(self.bind_offset(self.b_offsets[0], k=k0 + k, c=tirx.const(0, "int64")))
        if self.packing is not None:
            n = self.k_per_lane
            return self.packing.pack_vector(load(self.operands.b, n * self.lanes, start + n * v))
        return convert(load(self.operands.b, self.lanes, start + v), self.acc, self.cpu)

    def fill_strip(self, strip: tirx.Buffer, height: int, first: Expr, k0: Expr, depth: Expr) -> None:
        """Emit strip[i, k] = step k0 + k of row first + i of A."""
        whole = depth if self.is_whole else let(tirx.min(depth, self.whole - k0))

        def fill_runs(i: int, length: int) -> None:
            start = self.row_start(first + i, k0)
            with self.iterate_runs(k0, depth) as (k, distance):
                emit_vector_loop(
                    tirx.const(length, "int64"),
                    self.lanes,
                    lambda width: (
                        lambda n, lane: store(
                            strip,
                            load_widened(self.operands.a, start + distance + n * self.a_step),
                            i * self.kc + k + n,
                        )
                    ),
                )

        def fill_row(i: int) -> None:
            def copy(k: Expr, complete: bool) -> None:
                offsets = [self.bind_offset(position, m=first + i, k=k0 + k) for position in self.a_offsets]
                store(strip, self.load_step(self.operands.a, offsets, complete), i * self.kc + k)

            emit_vector_loop(whole, self.lanes, lambda width: lambda k, lane: copy(k, True))
            if not self.is_whole:
                with T.If(whole < depth), T.Then():
                    copy(whole, False)

        for i in range(height):
            fill_row(i) if self.runs is None else fill_runs(i, self.runs.length)
