"""Matrix products C = A B with a fused epilogue, blocked for registers and caches.

The blocking is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS
34(3), 2008, with their names: a register tile of mr x nr elements of C is accumulated over kc values of k from mr rows
of A, read in place, and a panel of B: nr columns, stored so that the nr elements of each k are consecutive.

    for each block of mc rows and panel of nr columns                    among threads
        for each block of kc values of k
            panel of B -> scratch, unless B is stored in panels
            for each mr rows                                             the micro-kernel
                C tile[mr, nr] += A[mr, kc] panel[kc, nr]                in mr * nr / lanes registers
        epilogue: C tile -> bias, activation, residual -> output

Strips of rows are as equal as they can be (mr + 1 rows are two halves, not mr and one), each with a micro-kernel of its
height, so nothing is read or written out of bounds, and a product with one row streams B at memory bandwidth. Columns
that are left over are zeros of the panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.expressions import Expr, is_int, offset, substitute, uses
from lowering.facts import Facts

from .codes import Codes, widened
from .loops import split_among_threads, unravel, vector_loop, volume
from .product import Product, follows, read_product
from .stages import Axis, Stage, read_stages
from .values import Evaluator, View, flat_view, read
from .vector import Machine, Register, convert, fixed, load, machine, prefetch, splat, store, workspace

_LINE = 64  # bytes of a cache line
_MANY_TASKS = 16  # so many panels keep threads busy
_WAITING_ROWS = 2  # a product of so many rows with codes is done before the next codes are there


@dataclass(frozen=True)
class Tiles:
    """Block sizes: mr rows x nr columns in registers, kc values of k and mc rows in caches.

    mr * nr / lanes accumulators, nr / lanes vectors of B and one broadcast element of A must fit the registers. A panel
    of kc * nr elements, mc * kc of A and a tile of mc * nr accumulators should fit the L2 cache. mr divides mc.
    """

    lanes: int
    nr: int
    mr: int = 6
    kc: int = 1024
    mc: int = 144


def panel_width(columns: int | None, cpu: Machine) -> int:
    """nr for a product with so many columns (None: not known): that of the least work, and the widest among those.

    v vectors take mr * v multiplications and mr + v loads for each k; few accumulators wait for one another.
    """
    lanes, mr = cpu.lanes("float32"), Tiles.mr
    widest = 4 if cpu.registers >= 32 else 2
    if columns is None:
        return widest * lanes

    def work(v: int) -> int:
        return -(-columns // (v * lanes)) * max(mr * v, mr + v, 8)

    return min(range(widest, 0, -1), key=work) * lanes


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """A blocked kernel for a float product followed by element-wise stages; None for anything else."""
    stages = read_stages(func)
    if not stages:
        return None
    product = read_product(stages[0])
    if product is None or not all(follows(stage, stages) for stage in stages[1:]):
        return None
    cpu = machine(target)
    if product.codes is not None and not _is_width(product.codes.nr, cpu.lanes("float32")):
        return None
    return _Kernel(func, stages, product, cpu).write()


def _is_width(columns: int, lanes: int) -> bool:
    """Whether a panel of so many columns is one to four vectors."""
    return 0 < columns <= 4 * lanes and columns % lanes == 0


def _tiles(codes: Codes, lanes: int) -> Tiles:
    """kc is a number of whole blocks, or a part of the only one. Integers of several codes wait in registers, too."""
    kc = max(Tiles.kc // codes.block, 1) * codes.block if codes.block else Tiles.kc
    return Tiles(lanes, codes.nr, kc=kc) if codes.group == 1 else Tiles(lanes, codes.nr, mr=5, kc=kc, mc=140)


class _Kernel:
    """The free variables of the offsets below: batch axes as themselves, row m of M, k, and column c of a panel."""

    def __init__(self, func: tirx.PrimFunc, stages: list[Stage], product: Product, cpu: Machine) -> None:
        self.func, self.stages, self.product, self.cpu = func, stages, product, cpu
        self.facts = Facts.of(func)
        self.m, self.c, self.panel = (tirx.Var(name, "int64") for name in ("m", "c", "panel"))
        self.rows = volume(product.rows)
        for axis in (*product.batch, Axis(self.m, self.rows), product.k):
            self.facts.bind(axis.var, 0, axis.extent)
        self.point = {axis.var: value for axis, value in zip(product.rows, unravel(self.m, product.rows))}
        self.a_offset = self.simplify(substitute(offset(product.a.source.shape, product.a.indices), self.point))
        step = self.stride(self.a_offset, product.k.var)
        linear = not uses(step, {product.k.var}) if product.codes is None else is_int(step, 1)
        self.a_in_place = product.a.ty == "float32" and linear

        lanes = cpu.lanes("float32")
        if product.codes is not None:
            self.tiles = _tiles(product.codes, lanes)
            self.b_in_place = True
            return
        columns, stored = product.j.extent, product.b.source.shape[-1]
        widths = [panel_width(columns.value if isinstance(columns, tirx.IntImm) else None, cpu)]
        if isinstance(stored, tirx.IntImm) and _is_width(stored.value, lanes):
            widths.insert(0, stored.value)
        for nr in widths:
            self.tiles = Tiles(lanes, nr)
            b_indices = self.b_panel(nr)
            self.b_offset = self.simplify(offset(product.b.source.shape, b_indices))
            self.b_in_place = self.is_panel(b_indices)
            if self.b_in_place:
                break

    def simplify(self, expr: Expr) -> Expr:
        return self.facts.simplify(expr)

    def stride(self, position: Expr, var: tirx.Var) -> Expr:
        return self.simplify(substitute(position, {var: var + 1}) - position)

    def b_panel(self, nr: int) -> list[Expr]:
        """Indices of B at column c of a panel of nr columns."""
        columns = self.product.j.extent
        self.facts.bind(self.c, 0, tirx.const(nr, "int64"))
        self.facts.bind(self.panel, 0, (columns + nr - 1) // nr)
        j = {self.product.j.var: self.panel * nr + self.c}
        return [self.simplify(substitute(index, j)) for index in self.product.b.indices]

    def is_panel(self, indices: list[Expr]) -> bool:
        """Whether the columns of a panel are consecutive, the last panel is padded, and panels have no gaps."""
        bounds = zip(indices, self.product.b.source.shape)
        return (
            is_int(self.stride(self.b_offset, self.c), 1)
            and is_int(self.stride(self.b_offset, self.product.k.var), self.tiles.nr)
            and all(self.facts.can_prove(index < extent) for index, extent in bounds)
        )

    def write(self) -> tirx.PrimFunc:
        p, t = self.product, self.tiles
        with IRBuilder() as builder, T.prim_func():
            memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
            self.a, self.b = memory[p.a.source], memory[p.b.source]
            self.outputs = {s.output: memory.pop(s.output) for s in self.stages if s.output in memory}
            self.inputs = {buffer: View(flat) for buffer, flat in memory.items()}
            self.panels = (p.j.extent + (t.nr - 1)) // t.nr
            self.k_blocks = self.simplify(tirx.max((p.k.extent + (t.kc - 1)) // t.kc, 1))
            batch = volume(p.batch)
            most = tirx.const(t.mc, "int64")
            if (
                not self.b_in_place
            ):  # a panel that is packed serves all rows, where no tile waits for another block of k
                alone = tirx.all(self.k_blocks <= 1, batch * self.panels >= _MANY_TASKS)
                most = tirx.Select(alone, tirx.max(self.rows, most), most)
            # Blocks of equal height, so that no thread gets all the short ones.
            self.row_blocks = fixed(tirx.max((self.rows + (most - 1)) // most, 1))
            self.block_rows = T.bind((self.rows + (self.row_blocks * t.mr - 1)) // (self.row_blocks * t.mr) * t.mr)
            work = batch * self.rows * p.j.extent * p.k.extent
            split_among_threads(batch * self.row_blocks * self.panels, work, self.task)
        return self.func.with_body(builder.get().body)

    def task(self, task: Expr) -> None:
        """One panel's columns for one block of rows."""
        p, t = self.product, self.tiles
        self.values = {self.panel: fixed(task % self.panels)}
        block = fixed(task // self.panels % self.row_blocks)
        for axis, index in zip(p.batch, unravel(task // (self.panels * self.row_blocks), p.batch)):
            self.values[axis.var] = fixed(index)
        first = fixed(block * self.block_rows)
        rows = fixed(tirx.min(self.block_rows, self.rows - first))
        columns = t.nr if is_int(self.simplify(p.j.extent % t.nr), 0) else p.j.extent - self.values[self.panel] * t.nr
        columns = fixed(tirx.min(tirx.const(t.nr, "int64"), columns))

        sizes = {"tile": (t.mc * t.nr, "float32")}
        if not self.b_in_place:
            sizes["panel"] = (t.kc * t.nr, "float32")
        if not self.a_in_place:
            sizes["strip"] = (t.mr * t.kc, "float32")
        scratch = workspace(**sizes)
        tile, panel, strip = (scratch.get(name) for name in ("tile", "panel", "strip"))
        one = tirx.const(1, "int64")
        with T.serial(self.k_blocks) as k_block:
            k0 = fixed(k_block * t.kc)
            depth = fixed(tirx.min(tirx.const(t.kc, "int64"), p.k.extent - k0))
            if panel is not None:
                self.pack(panel, k0, depth, columns)
            # Strips of rows whose heights differ by one at most: seven rows are four and three.
            strips = fixed(tirx.max((rows + (t.mr - 1)) // t.mr, 1))
            low, higher = fixed(rows // strips), fixed(rows % strips)
            with T.serial(strips) as i:
                height, row = fixed(low + tirx.Select(i < higher, one, one - 1)), fixed(i * low + tirx.min(i, higher))
                # Rows of a tile that waits for no other block of k stay where they are, in the nearest cache.
                place = fixed(tirx.Select(self.k_blocks <= 1, one - 1, row))
                self.ask_for_output(fixed(first + row), height)
                for h in range(t.mr, 0, -1):
                    with T.If(height == h), T.Then():
                        self.micro_kernel(h, fixed(first + row), place, k0, depth, tile, panel, strip)
                with T.If(k_block == self.k_blocks - 1), T.Then(), T.serial(height) as r:
                    self.epilogue(tile, fixed(place + r), fixed(first + row + r), columns)

    def at(self, position: Expr, **where: Expr) -> Expr:
        """An offset of A or B in this task, at m, k or c."""
        names = {"m": self.m, "c": self.c, "k": self.product.k.var}
        return substitute(
            position,
            {**self.values, **{names[name]: value for name, value in where.items()}},
        )

    def pack(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """Columns of B into panel[k, c], zeros behind the last column."""
        t = self.tiles

        def copy(c: Expr, lane: Expr) -> None:
            store(panel, read(self.b, self.at(self.b_offset, k=k0 + k, c=c)), k * t.nr + c)

        with T.serial(depth) as k:
            vector_loop(columns, t.lanes, lambda width: copy)
            with T.serial(t.nr - columns) as c:
                store(panel, T.float32(0), k * t.nr + columns + c)

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
    ) -> None:
        """tile[place + i, c] += sum over k of A[row + i, k0 + k] B[k0 + k, c] for i < height, k < depth.

        The tile begins as zeros where k0 is 0.
        """
        p, t = self.product, self.tiles
        vectors = range(0, t.nr, t.lanes)
        a = self.a
        starts = [fixed(self.at(self.a_offset, m=row + i, k=k0)) for i in range(height)]
        step = self.stride(self.a_offset, p.k.var)
        if strip is not None:
            for i in range(height):

                def copy(k: Expr, lane: Expr, i: int = i) -> None:
                    store(strip, read(a, starts[i] + k * step), i * t.kc + k)

                vector_loop(depth, t.lanes, lambda width, copy=copy: copy)  # type: ignore[misc]
            a, starts, step = strip, [i * t.kc for i in range(height)], 1
        zero = splat(0.0, t.lanes, "float32")
        if p.codes is not None:
            with T.If(k0 == 0), T.Then(), T.serial(height * (t.nr // t.lanes)) as v:
                store(tile, zero, place * t.nr + v * t.lanes)
            self.accumulate_codes(p.codes, a, starts, place, k0, depth, tile)
            return
        c = [[Register(zero) for _ in vectors] for _ in range(height)]
        with T.If(k0 > 0), T.Then():
            for i in range(height):
                for v, accumulator in zip(vectors, c[i]):
                    accumulator.value = load(tile, t.lanes, (place + i) * t.nr + v)
        with T.serial(depth) as k:
            if panel is not None:
                b = [T.bind(load(panel, t.lanes, k * t.nr + v)) for v in vectors]
            else:
                start = fixed(self.at(self.b_offset, k=k0 + k, c=tirx.const(0, "int64")))
                b = [convert(load(self.b, t.lanes, start + v), "float32", self.cpu) for v in vectors]
            for i in range(height):
                a_ik = T.bind(splat(a[starts[i] + k * step], t.lanes, "float32"))
                for accumulator, b_v in zip(c[i], b):
                    accumulator.value += a_ik * b_v
        for i in range(height):
            for v, accumulator in zip(vectors, c[i]):
                store(tile, accumulator.value, (place + i) * t.nr + v)

    def accumulate_codes(
        self, codes: Codes, a: tirx.Buffer, starts: list[Expr], row: Expr, k0: Expr, depth: Expr, tile: tirx.Buffer
    ) -> None:
        """The same for a matrix of codes: tile[row + i, c] += scale * (sum of A times code - zero) for each block."""
        t, cpu = self.tiles, self.cpu
        vectors, group = range(0, t.nr, t.lanes), codes.group
        panel = self.values[self.panel]
        stored, blocks = codes.load.source.shape[1], codes.scale.source.shape[1]
        memory = {
            load.source: self.inputs[load.source].memory for load in (codes.scale, codes.zero) if load is not None
        }
        whole = codes.block or t.kc  # the length of a block

        def ask(buffer: tirx.Buffer, start: Expr, ahead: int) -> None:
            """Prefetches a row of a panel, so many bytes ahead. Processors do so themselves up to the end of a page."""
            if len(starts) <= _WAITING_ROWS:
                size = DataType(buffer.dtype).itemsize
                for line in range(0, t.nr * size, _LINE):
                    prefetch(buffer, start + (ahead + line) // size, level=1)

        def block(start: Expr, length: int) -> None:
            """The block from k0 + start on."""
            place = fixed((panel * blocks + ((k0 + start) // codes.block if codes.block else 0)) * t.nr)
            if codes.block:
                ask(memory[codes.scale.source], place, 1024)
            zeros = [
                T.bind(widened(memory[codes.zero.source], t.lanes, place + v, cpu)) if codes.zero is not None else None
                for v in vectors
            ]
            c = [[Register(splat(0.0, t.lanes, "float32")) for _ in vectors] for _ in starts]

            with T.serial((length + group - 1) // group) as g:
                first = fixed((panel * stored + (k0 + start) // group + g) * t.nr)
                ask(self.b, first, 4096)
                b = [Register(load(self.b, t.lanes, first + v)) for v in vectors]
                with T.serial(group if length % group == 0 else tirx.min(group, length - g * group)) as k:
                    for n, zero in enumerate(zeros):
                        code = codes.next(b[n], cpu)
                        b_v = fixed(code if zero is None else code - zero)
                        for row_start, accumulators in zip(starts, c):
                            a_ik = splat(a[row_start + start + g * group + k], t.lanes, "float32")
                            accumulators[n].value += a_ik * b_v
            for n, v in enumerate(vectors):
                scale = T.bind(widened(memory[codes.scale.source], t.lanes, place + v, cpu))
                for i, accumulators in enumerate(c):
                    at = (row + i) * t.nr + v
                    store(tile, load(tile, t.lanes, at) + scale * accumulators[n].value, at)

        with T.serial(depth // whole) as n:
            block(n * whole, whole)
        rest = self.product.k.extent.value % whole
        if rest:
            with T.If(depth % whole != 0), T.Then():
                block(depth - rest, rest)

    def ask_for_output(self, row: Expr, height: Expr) -> None:
        """Prefetches the lines that so many rows of C will be stored to, while their products are summed up."""
        where = {**self.point, self.product.j.var: self.panel * self.tiles.nr + self.c}
        for output, memory in self.outputs.items():
            position = self.simplify(offset(output.shape, [substitute(i, where) for i in self.stages[0].indices]))
            with T.serial(height) as i:
                start = fixed(self.at(position, m=row + i, c=tirx.const(0, "int64")))
                line = _LINE // DataType(output.dtype).itemsize
                for c in range(0, self.tiles.nr, line):
                    prefetch(memory, start + c, level=1, write=True)

    def epilogue(self, tile: tirx.Buffer, place: Expr, row: Expr, columns: Expr) -> None:
        """What the stages make of a row of C, which is at `place` in the tile, stored."""
        t, product = self.tiles, self.stages[0]
        where = {**self.point, self.product.j.var: self.panel * t.nr + self.c}
        point = [self.simplify(substitute(index, where)) for index in product.indices]
        known = {product.output: [(point, tile[place * t.nr + self.c])]}
        values = [tirx.BufferLoad(output, point) for output in self.outputs]
        positions = [self.simplify(offset(output.shape, point)) for output in self.outputs]
        dtypes = [output.dtype for output in self.outputs]
        program = Evaluator(self.stages, self.inputs).program([*values, *positions], self.facts, known, dtypes)
        body = program.before_loop(self.c, {**self.values, self.m: row})

        def column(width: int) -> Callable[[Expr, Expr], None]:
            write = body(width)

            def store_all(c: Expr, lane: Expr) -> None:
                results = write(c, lane)
                for memory, value, position in zip(self.outputs.values(), results, results[len(values) :]):
                    T.buffer_store(memory, value, [position])

            return store_all

        vector_loop(columns, t.lanes if program.vectorizable(self.c) else 1, column)
