"""One matmul by panels of B: where panels lie, how they are made, and the micro-kernel (the loops: matmul.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int, offset, substitute, uses
from lowering.tensorir.facts import Facts

from ..reading.stages import Axis
from ..reading.values import read
from .loops import vector_loop
from .operands import Operands
from .panels import PanelTiles, is_width
from .quantized_matmul import accumulate_codes
from .results import Values
from .runs import Runs, find_runs
from .vector import LINE, Register, convert, let, load, prefetch, splat, store, transpose
from .words import Words, words_for


class Blocked:
    """The free variables of the offsets below: batch axes as themselves, row m of M, step k, and column c of a panel.

    A step is `together` values of k, one or those of a word (words.py); each has an offset of its own. Panels have nr
    columns. Elements of a row of A are equally far apart, for all steps or within runs of them, such as the places that
    a row of a convolution's window covers.
    """

    def __init__(self, operands: Operands, tiles: PanelTiles) -> None:
        self.tiles, self.lanes, self.acc = tiles, operands.results.lanes, operands.matmul.acc
        self.operands, self.matmul, self.results = operands, operands.matmul, operands.results
        self.cpu = self.results.cpu
        self.choose_panels()
        matmul = self.matmul
        self.a_offsets = self.offsets(matmul.a, [substitute(index, self.results.point) for index in matmul.a.indices])
        self.a_step = self.operands.stride(self.a_offsets[0], self.k.var)
        self.runs: Runs | None = None
        if matmul.codes is None:
            self.choose_runs()
        if self.words is not None or matmul.codes is not None:
            apart = self.is_dense(self.a_offsets, self.k.var, self.together)
        else:
            apart = not uses(self.a_step, {self.k.var})
        fits = self.words is not None or matmul.a.ty == self.acc
        self.a_in_place: bool = fits and (apart or self.runs is not None)

    @property
    def facts(self) -> Facts:
        return self.results.facts

    def choose_panels(self) -> None:
        """Sets nr, kc, words, and where B lies: in panels as it is stored, or else where they are made from."""
        matmul, lanes = self.matmul, self.lanes
        self.kc = self.tiles.kc
        if matmul.codes is not None:
            self.nr, self.b_in_place, block = matmul.codes.nr, True, matmul.codes.block
            self.kc = max(self.kc // block, 1) * block if block else self.kc
            self.set_step(None)
            return
        words = words_for(str(matmul.a.ty), str(matmul.b.ty), self.acc, self.cpu)
        steps = [words] if self.acc == "int32" else [None, words] if words is not None else [None]
        stored = [size.value for size in matmul.b.source.shape[-2:] if isinstance(size, tirx.IntImm)]
        known = self.results.facts
        # Whichever form B is stored in; the last is what is made where it is in neither.
        for step in steps:
            for nr in (*(size for size in stored if is_width(size, lanes)), self.tiles.vectors * lanes):
                # Facts of its own: what is known of a panel of one width is wrong for another.
                self.results.facts = known.copy()
                self.set_step(step)
                self.nr = nr
                indices = self.b_panel(nr)
                self.b_offsets = self.offsets(matmul.b, indices)
                self.b_in_place = self.is_panel(indices)
                if self.b_in_place:
                    return

    def choose_runs(self) -> None:
        """Sets runs, if there are any; kc becomes a multiple of their length."""
        a, zero = self.matmul.a, tirx.const(0, "int64")
        # By index: what is behind a matmul with a symbolic size does not cancel.
        steps = [self.results.simplify(i - substitute(i, {self.matmul.k.var: zero})) for i in a.indices]
        values = [self.results.simplify(at) for at in self.of_step(offset(a.source.shape, steps))]
        whole = self.words is None or self.is_whole
        runs = None if self.uses_rows(values[0]) or not whole else find_runs(values, self.k, self.results)
        if runs is not None:
            n = runs.length
            length = n if n <= self.kc else max(m for m in range(1, self.kc + 1) if n % m == 0)
            self.runs, self.a_step = replace(runs, length=length), runs.step
            self.kc = max(self.kc // length, 1) * length

    def uses_rows(self, expr: Expr) -> bool:
        return uses(expr, {self.results.m, *(axis.var for axis in (*self.matmul.rows, *self.matmul.batch))})

    def set_step(self, words: Words | None) -> None:
        """Steps along k of one value, or of those of a word."""
        k = self.matmul.k
        self.words, self.together = words, 1 if words is None else words.together
        n = self.together
        self.k = k if n == 1 else Axis(tirx.Var("word", "int64"), self.results.simplify((k.extent + (n - 1)) // n))
        self.whole = k.extent // n  # steps that are complete
        self.rest = self.results.simplify(k.extent % n)  # values of the step behind them
        self.is_whole = is_int(self.results.simplify(self.k.extent - self.whole), 0)
        self.facts.bind(self.k.var, 0, self.k.extent)

    def of_step(self, expr: Expr) -> list[Expr]:
        """An expression of the value of k, for each value of step k."""
        first = self.k.var * self.together
        return [substitute(expr, {self.matmul.k.var: first + n}) for n in range(self.together)]

    def offsets(self, operand: ir.TensorLoad, indices: list[Expr]) -> list[Expr]:
        """Where the elements of step k lie."""
        return [self.results.simplify(position) for position in self.of_step(offset(operand.source.shape, indices))]

    def is_dense(self, offsets: list[Expr], var: tirx.Var, step: int) -> bool:
        """Whether elements of a step are neighbors, and `step` elements from those at var + 1."""
        return is_int(self.operands.stride(offsets[0], var), step) and all(
            is_int(self.results.simplify(position - offsets[0]), n) for n, position in enumerate(offsets)
        )

    def b_panel(self, nr: int) -> list[Expr]:
        """Indices of B at column c of a panel of nr columns."""
        columns = self.matmul.j.extent
        self.facts.bind(self.results.c, 0, tirx.const(nr, "int64"))
        self.facts.bind(self.results.panel, 0, (columns + nr - 1) // nr)
        j = {self.matmul.j.var: self.results.panel * nr + self.results.c}
        return [self.results.simplify(substitute(index, j)) for index in self.matmul.b.indices]

    def is_panel(self, indices: list[Expr]) -> bool:
        """Whether the columns of a panel are consecutive, the last panel is padded, and panels have no gaps."""
        bounds = zip(indices, self.matmul.b.source.shape)
        return (
            self.is_dense(self.b_offsets, self.results.c, self.together)
            and is_int(self.operands.stride(self.b_offsets[0], self.k.var), self.together * self.nr)
            and all(self.facts.can_prove(last < extent) for index, extent in bounds for last in self.of_step(index))
        )

    @property
    def column(self) -> Expr:
        """Column c of a panel as one of C."""
        return self.results.panel * self.nr + self.results.c

    @property
    def panels(self) -> Expr:
        return (self.matmul.j.extent + (self.nr - 1)) // self.nr

    @property
    def k_blocks(self) -> Expr:
        return self.results.simplify(tirx.max((self.k.extent + (self.kc - 1)) // self.kc, 1))

    def columns_of(self, values: Values) -> Expr:
        """How many columns a panel has."""
        nr, columns = self.nr, self.matmul.j.extent
        if is_int(self.results.simplify(columns % nr), 0):
            return tirx.const(nr, "int64")
        return let(tirx.min(tirx.const(nr, "int64"), columns - values[self.results.panel] * nr))

    def scratch(self) -> dict[str, int]:
        """Elements of the sums' type that `sum_up` needs beside the tile."""
        sizes = {} if self.b_in_place else {"panel": self.kc * self.nr}
        return sizes if self.a_in_place else {**sizes, "strip": self.tiles.mr * self.kc}

    def sum_up(
        self,
        values: Values,
        first: Expr,
        rows: Expr,
        columns: Expr,
        tile: tirx.Buffer,
        scratch: dict[str, tirx.Buffer],
        finish: Callable[[Expr, Expr], None] | None,
    ) -> None:
        """The sums of a panel's columns for `rows` rows from `first` on, each in its row of the tile.

        finish(row, place) takes a row as soon as it is summed up, from row `place` of the tile.
        """
        t, self.values = self.tiles, values
        panel = None if self.b_in_place else scratch["panel"]
        strip = None if self.a_in_place else scratch["strip"]
        one = tirx.const(1, "int64")
        length = self.block_for(rows)
        blocks = let(tirx.max((self.k.extent + (length - 1)) // length, one))
        with T.serial(blocks) as k_block:
            k0 = let(k_block * length)
            depth = let(tirx.min(length, self.k.extent - k0))
            if panel is not None:
                self.pack(panel, k0, depth, columns)
            # Strips of rows whose heights differ by one at most: seven rows are four and three.
            strips = let(tirx.max((rows + (t.mr - 1)) // t.mr, 1))
            low, higher = let(rows // strips), let(rows % strips)
            with T.serial(strips) as i:
                height, row = let(low + tirx.Select(i < higher, one, one - 1)), let(i * low + tirx.min(i, higher))
                place = row
                if finish is not None:
                    # Rows that wait for no other block of k stay where they are, in the nearest cache.
                    place = let(tirx.Select(blocks <= 1, one - 1, row))
                    self.results.ask(self.operands.memory, values, let(first + row), height, self.column, self.nr)
                ask = self.ask_for_next(k0, depth, i, strips)
                for h in range(t.mr, 0, -1):
                    with T.If(height == h), T.Then():
                        self.micro_kernel(h, let(first + row), place, k0, depth, tile, panel, strip, ask)
                if finish is not None:
                    with T.If(k_block == blocks - 1), T.Then(), T.serial(height) as r:
                        finish(row + r, place + r)

    def block_for(self, rows: Expr) -> Expr:
        """Steps of a block of k. A few rows wait for memory, and what they ask for is the block behind theirs: it is
        to be near, and few sums are cheap to keep in between."""
        long = tirx.const(self.kc, "int64")
        if not self.asks or self.runs is not None or self.tiles.streamed_kc >= self.kc:
            return long
        return let(tirx.Select(rows <= self.tiles.streamed_rows, tirx.const(self.tiles.streamed_kc, "int64"), long))

    @property
    def asks(self) -> bool:
        """Whether strips ask for what is needed next: not where panels are made, and where codes wait to be widened."""
        return self.b_in_place and self.matmul.codes is None

    def ask_for_next(self, k0: Expr, depth: Expr, number: Expr, strips: Expr) -> Callable[[Expr], None] | None:
        """What a strip calls at each step k to ask for its share of the block of the panel behind this one.

        So memory is read at all times, however few strips there are: eight rows take no longer than one. Blocks of a
        panel and panels are consecutive. None where it asks for nothing.
        """
        if not self.asks:
            return None
        width = self.nr * self.together
        of_line = LINE // DataType(self.matmul.b.ty).itemsize
        size = let(depth * width)
        start = let(self.at(self.b_offsets[0], k=k0, c=tirx.const(0, "int64")) + size + number * size // strips)
        share, bits = let(tirx.const(1 << 8, "int64") // strips), tirx.const(8, "int64")  # a fixed-point number

        def ask(k: Expr) -> None:
            for element in range(0, width, of_line):
                prefetch(self.operands.b, start + T.shift_right((k * width + element) * share, bits), level=2)

        return ask

    def at(self, position: Expr, **where: Expr) -> Expr:
        """An offset of A or B in this task, at m, k or c."""
        names = {"m": self.results.m, "c": self.results.c, "k": self.k.var}
        return substitute(
            position,
            {**self.values, **{names[name]: value for name, value in where.items()}},
        )

    def pack(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """Columns of B into panel[k, c], numbers that are not used behind the last one."""
        if self.words is None and is_int(self.operands.stride(self.b_offsets[0], self.k.var), 1):
            self.pack_transposed(panel, k0, depth, columns)
            return

        def copy_row(k: Expr, _: Expr, complete: bool) -> None:
            def copy(c: Expr, lane: Expr) -> None:
                at = [self.at(position, k=k0 + k, c=c) for position in self.b_offsets]
                store(panel, self.read(self.operands.b, at, complete), k * self.nr + c)

            vector_loop(columns, self.lanes, lambda width: copy)
            with T.serial(self.nr - columns) as c:
                store(panel, tirx.const(0, self.acc), k * self.nr + columns + c)

        self.steps(k0, depth, copy_row)

    def pack_transposed(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """The same where values of k are consecutive: squares of them are transposed in registers."""
        lanes, nr, memory = self.lanes, self.nr, self.operands.b
        with T.serial(nr // lanes) as v:
            # The last column stands in for those behind it.
            at = [let(tirx.min(v * lanes + i, columns - 1)) for i in range(lanes)]
            starts = [let(self.at(self.b_offsets[0], k=k0, c=c)) for c in at]
            squares = let(depth // lanes)
            with T.serial(squares) as square:
                k = let(square * lanes)
                rows = [let(convert(load(self.operands.b, lanes, start + k), self.acc, self.cpu)) for start in starts]
                for i, row in enumerate(transpose(rows)):
                    store(panel, row, (k + i) * nr + v * lanes)
            with T.serial(depth - squares * lanes) as rest:
                k = let(squares * lanes + rest)
                for i, start in enumerate(starts):
                    store(panel, read(memory, start + k), k * nr + v * lanes + i)

    def steps(self, k0: Expr, depth: Expr, body: Callable[[Expr, Expr, bool], None]) -> None:
        """body(k, how far A's element is behind `first_of_row`, whether step k0 + k is complete) for k < depth. The
        last word is not where values are left over."""
        if self.runs is not None:
            with self.each_run(k0, depth) as (first, behind), T.serial(self.runs.length) as n:
                body(first + n, behind + n * self.a_step, True)
            return
        whole = depth if self.is_whole else let(tirx.min(depth, self.whole - k0))
        with T.serial(whole) as k:
            body(k, k * self.a_step, True)
        if not self.is_whole:
            with T.If(whole < depth), T.Then():
                body(whole, whole * self.a_step, False)

    @contextmanager
    def each_run(self, k0: Expr, depth: Expr) -> Iterator[tuple[Expr, Expr]]:
        """Of each run of a block of steps the first step, and how far A's element is behind `first_of_row`."""
        assert self.runs is not None
        with T.serial(depth // self.runs.length) as number:
            first = let(number * self.runs.length)
            yield first, let(self.at(self.runs.behind, k=k0 + first))

    def first_of_row(self, row: Expr, k0: Expr) -> Expr:
        """Where the elements of A's row begin that a block of steps needs; those of all steps, where there are runs."""
        return let(self.at(self.a_offsets[0], m=row, k=k0 if self.runs is None else tirx.const(0, "int64")))

    def read(self, memory: tirx.Buffer, at: list[Expr], complete: bool) -> Expr:
        """The element or the word of a step whose elements lie there."""
        if self.words is None:
            return read(memory, at[0])
        return self.word([tirx.BufferLoad(memory, [position]) for position in at], complete)

    def word(self, loads: list[Expr], complete: bool) -> Expr:
        """The word of a step's values; of one that is not complete only those are read that there are."""
        assert self.words is not None
        if not complete and isinstance(self.rest, tirx.IntImm):
            loads = loads[: self.rest.value]
        elif not complete:
            zero = tirx.const(0, loads[0].ty)
            there = (tirx.if_then_else(n < self.rest, load, zero) for n, load in enumerate(loads[1:-1], 1))
            loads = [loads[0], *there]
        return self.words.join(loads)

    def micro_kernel(
        self,
        height: int,
        row: Expr,
        place: Expr,
        k0: Expr,
        depth: Expr,
        tile: tirx.Buffer,
        panel: tirx.Buffer | None,
        strip: tirx.Buffer | None,
        ask: Callable[[Expr], None] | None,
    ) -> None:
        """tile[place + i, c] += sum over k of A[row + i, k0 + k] B[k0 + k, c] for i < height, k < depth.

        The tile begins as zeros where k0 is 0. ask(k) is called at each step.
        """
        p = self.matmul
        vectors = range(0, self.nr, self.lanes)
        a = self.operands.a
        if strip is None:
            starts = [self.first_of_row(row + i, k0) for i in range(height)]
        else:
            self.fill(strip, height, row, k0, depth)
            a, starts = strip, [tirx.const(i * self.kc, "int64") for i in range(height)]
        zero = splat(tirx.const(0, self.acc), self.lanes, self.acc)
        if p.codes is not None:
            with T.If(k0 == 0), T.Then(), T.serial(height * (self.nr // self.lanes)) as v:
                store(tile, zero, place * self.nr + v * self.lanes)
            accumulate_codes(self, p.codes, a, starts, place, k0, depth, tile)
            return
        c = [[Register(zero) for _ in vectors] for _ in range(height)]
        with T.If(k0 > 0), T.Then():
            for i in range(height):
                for v, accumulator in zip(vectors, c[i]):
                    accumulator.value = load(tile, self.lanes, (place + i) * self.nr + v)

        def add(k: Expr, behind: Expr, complete: bool) -> None:
            if ask is not None:
                ask(k)
            b = [self.b_vector(panel, k0, k, v) for v in vectors]
            for i in range(height):
                at = starts[i] + (behind if strip is None else k)
                if strip is not None or self.words is None:
                    a_ik = a[at]
                elif complete:
                    a_ik = self.words.of(load(a, self.together, at))
                else:
                    a_ik = self.word([a[at + n] for n in range(self.together)], complete=False)
                a_ik = T.bind(splat(a_ik, self.lanes, self.acc))
                for accumulator, b_v in zip(c[i], b):
                    total = accumulator.value
                    accumulator.value = total + a_ik * b_v if self.words is None else self.words.dot(total, a_ik, b_v)

        self.steps(k0, depth, add)
        for i in range(height):
            for v, accumulator in zip(vectors, c[i]):
                store(tile, accumulator.value, (place + i) * self.nr + v)

    def b_vector(self, panel: tirx.Buffer | None, k0: Expr, k: Expr, v: int) -> Expr:
        """Columns v and up of a panel at step k0 + k."""
        if panel is not None:
            return T.bind(load(panel, self.lanes, k * self.nr + v))
        start = let(self.at(self.b_offsets[0], k=k0 + k, c=tirx.const(0, "int64")))
        if self.words is not None:
            n = self.together
            return self.words.of(load(self.operands.b, n * self.lanes, start + n * v))
        return convert(load(self.operands.b, self.lanes, start + v), self.acc, self.cpu)

    def fill(self, strip: tirx.Buffer, height: int, first: Expr, k0: Expr, depth: Expr) -> None:
        """strip[i, k] = step k0 + k of row first + i of A."""
        whole = depth if self.is_whole else let(tirx.min(depth, self.whole - k0))

        def fill_runs(i: int, length: int) -> None:
            start = self.first_of_row(first + i, k0)
            with self.each_run(k0, depth) as (k, behind):
                vector_loop(
                    tirx.const(length, "int64"),
                    self.lanes,
                    lambda width: (
                        lambda n, lane: store(
                            strip, read(self.operands.a, start + behind + n * self.a_step), i * self.kc + k + n
                        )
                    ),
                )

        def fill_row(i: int) -> None:
            def copy(k: Expr, complete: bool) -> None:
                at = [self.at(position, m=first + i, k=k0 + k) for position in self.a_offsets]
                store(strip, self.read(self.operands.a, at, complete), i * self.kc + k)

            vector_loop(whole, self.lanes, lambda width: lambda k, lane: copy(k, True))
            if not self.is_whole:
                with T.If(whole < depth), T.Then():
                    copy(whole, False)

        for i in range(height):
            fill_row(i) if self.runs is None else fill_runs(i, self.runs.length)
