"""One matmul by panels of B: packing of panels, and the micro-kernel (the loops: matmul.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int

from ...reading.values import load_widened
from ..elementwise.loops import emit_vector_loop
from ..primitives.vector import Register, convert, let, load, splat, store, transpose
from .int8_matmul import accumulate_int8
from .int8_rows import Int8Rows
from .panel_addressing import PanelAddressing
from .prefetch_share import PrefetchShare
from .quantized_matmul import accumulate_quantized, dequantize_panel
from .results import Values
from .strips import MicroKernel, RowBlock, Strip, Strips


class BlockedMatmul(PanelAddressing):
    """One matmul C = A B, blocked into panels of B. `quantize_rows` sets int8_rows where `has_int8_rows`."""

    int8_rows: Int8Rows | None = None

    @property
    def has_int8_rows(self) -> bool:
        """Whether rows of A are quantized to int8 before panels are multiplied (int8_rows.py)."""
        return self.matmul.quantization is not None and self.matmul.quantization.form.quads

    @property
    def copies_strips(self) -> bool:
        """Whether strips of A are copied for the micro-kernel; quantized rows are such a copy."""
        return not self.is_a_in_place and not self.has_int8_rows

    def count_columns(self, values: Values) -> Expr:
        """Return the number of columns of a panel."""
        nr, columns = self.nr, self.matmul.j.extent
        if is_int(self.results.simplify(columns % nr), 0):
            return tirx.const(nr, "int64")
        return let(tirx.min(tirx.const(nr, "int64"), columns - values[self.results.panel] * nr))

    def scratch_sizes(self) -> dict[str, int]:
        """Return the scratch elements, in the accumulator type, that `accumulate_panel` needs besides the tile."""
        sizes = {} if self.is_b_in_place else {"panel": self.kc * self.nr}
        if self.dequantizes_panels:
            sizes = {"panel": self.dequantized_kc * self.nr}
        height = max(self.tiles.mr, self.tiles.fused_mr)
        return {**sizes, "strip": height * self.max_depth} if self.copies_strips else sizes

    def accumulate_panel(
        self,
        values: Values,
        block: RowBlock,
        columns: Expr,
        tile: tirx.Buffer,
        scratch: dict[str, tirx.Buffer],
        finish: Callable[[Expr, Expr], None] | None,
    ) -> None:
        """Accumulate a panel's columns for a block of rows, each in its row of the tile.

        finish(row, tile_row) receives a row as soon as it is accumulated, from row `tile_row` of the tile.
        """
        t, self.values = self.tiles, values
        copy = scratch["strip"] if self.copies_strips else None
        accumulate = partial(self.accumulate_strips, block, columns, tile, copy, finish)
        length = self.choose_k_block(block.count)
        if self.matmul.quantization is None:
            panel = None if self.is_b_in_place else scratch["panel"]
            accumulate(Strips(self.list_kernels(block, t.mr), t.mr, panel, length))
            return
        bound = t.fused_rows if self.dequantizes_panels else None
        fused = Strips(self.list_kernels(block, t.fused_mr, up_to=bound), t.fused_mr, None, length)
        if bound is None:
            accumulate(fused)
            return
        kernels = [MicroKernel(height) for height in block.list_heights(t.mr, above=bound)]
        dequantized = Strips(kernels, t.mr, scratch["panel"], tirx.const(self.dequantized_kc, "int64"))
        block.branch(bound, lambda: accumulate(fused), lambda: accumulate(dequantized))

    def list_kernels(self, block: RowBlock, mr: int, up_to: int | None = None) -> list[MicroKernel]:
        """Return the micro-kernels of a block of up to so many rows: those for a few rows prefetch streams of B."""
        bound, heights = self.tiles.streamed_rows, block.list_heights(mr, up_to=up_to)
        if not self.is_b_in_place:
            return [MicroKernel(height) for height in heights]
        # Strips of fewer rows are rare among many rows: streams serve these, too.
        few, many = heights, [height for height in heights if height == mr]
        if not bound:
            few, many = [], heights
        elif up_to is not None and up_to <= bound:
            many = []
        elif block.counts is not None:
            few, many = block.list_heights(mr, up_to=bound), block.list_heights(mr, above=bound, up_to=up_to)
        return [
            *(MicroKernel(height, when=block.count > bound if height in few else None) for height in many),
            *(
                MicroKernel(height, has_streams=True, when=block.count <= bound if height in many else None)
                for height in few
            ),
        ]

    @property
    def dequantizes_panels(self) -> bool:
        """Whether many rows share a panel of B that is dequantized in memory, not in the registers of each strip."""
        t = self.tiles
        is_quantized, may_exceed = self.matmul.quantization is not None, t.fused_rows < t.mc
        return (
            is_quantized
            and not self.has_int8_rows
            and may_exceed
            and not self.facts.can_prove(self.results.rows <= t.fused_rows)
        )

    def accumulate_strips(
        self,
        block: RowBlock,
        columns: Expr,
        tile: tirx.Buffer,
        copy: tirx.Buffer | None,
        finish: Callable[[Expr, Expr], None] | None,
        strips: Strips,
    ) -> None:
        """Emit `accumulate_panel` in these strips."""
        rows, mr, length, unit = block.count, strips.mr, strips.length, tirx.const(1, "int64")
        blocks = let(tirx.max((self.k.extent + (length - 1)) // length, unit))
        with T.serial(blocks) as k_block:
            k0 = let(k_block * length)
            depth = let(tirx.min(length, self.k.extent - k0))
            if strips.panel is not None:
                self.pack_panel(strips.panel, k0, depth, columns)
            count = let(tirx.max((rows + (mr - 1)) // mr, 1))
            low, higher = let(rows // count), let(rows % count)
            with T.serial(count) as i:
                height, row = let(low + tirx.Select(i < higher, unit, unit - 1)), let(i * low + tirx.min(i, higher))
                first, tile_row = let(block.first + row), row
                if finish is not None:
                    # Rows that need only one block of k share the first rows of the tile, in the nearest cache.
                    tile_row = let(tirx.Select(blocks <= 1, unit - 1, row))
                    self.results.prefetch_rows(self.operands.memory, self.values, first, height, self.column, self.nr)
                strip = Strip(first, tile_row, k0, depth, i, count)
                for kernel in strips.kernels:
                    with T.If(kernel.applies_to(height)), T.Then():
                        self.emit_micro_kernel(kernel, strip, tile, strips.panel, copy)
                if finish is not None:
                    with T.If(k_block == blocks - 1), T.Then(), T.serial(height) as r:
                        finish(row + r, tile_row + r)

    def choose_k_block(self, rows: Expr) -> Expr:
        """Return the number of steps of a block of k.

        With a few rows a matmul is bound by memory bandwidth, and its strips prefetch the next block. The block is so
        long that its streams are in different pages. The accumulators of few rows are cheap to store in between.
        """
        long, short = (tirx.const(kc, "int64") for kc in (self.kc, self.streamed_kc))
        if not self.is_b_in_place or self.runs is not None or self.streamed_kc == self.kc:
            return long
        return let(tirx.Select(rows <= self.tiles.streamed_rows, short, long))

    @property
    def max_depth(self) -> int:
        """The maximum number of steps of a block of k."""
        depth = max(self.kc, self.streamed_kc, self.dequantized_kc if self.dequantizes_panels else 0)
        return min(depth, self.k.extent.value) if isinstance(self.k.extent, tirx.IntImm) else depth

    def plan_prefetch(self, kernel: MicroKernel, strip: Strip) -> Callable[[Expr], None] | None:
        """Return a function that prefetches at each step k if B is read in place. Panels are consecutive."""
        if not self.is_b_in_place:
            return None
        width, depth = self.nr * self.k_per_lane, strip.depth
        following = let(self.bind_offset(self.b_offsets[0], k=strip.k0 + depth, c=tirx.const(0, "int64")))
        share = PrefetchShare(
            self.operands.b, following, depth=depth, width=width, number=strip.number, count=strip.count
        )
        return share.plan_streams() if kernel.has_streams else share.plan_sequence()

    def pack_panel(self, panel: tirx.Buffer, k0: Expr, depth: Expr, columns: Expr) -> None:
        """Pack columns of B into panel[k, c]; columns after the last one hold unused values."""
        if self.matmul.quantization is not None:
            dequantize_panel(self, k0, depth, panel)
            return
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

    def emit_micro_kernel(
        self,
        kernel: MicroKernel,
        strip: Strip,
        tile: tirx.Buffer,
        panel: tirx.Buffer | None,
        copy: tirx.Buffer | None,
    ) -> None:
        """Emit tile[tile_row + i, c] += sum over k of A[row + i, k0 + k] B[k0 + k, c] for i < height, k < depth.

        The tile starts from zeros if k0 is 0. copy is scratch memory for rows of A, or None to read A in place.
        """
        height, row, tile_row, k0, depth = kernel.height, strip.row, strip.tile_row, strip.k0, strip.depth
        if self.has_int8_rows:
            self.clear_tile(height, tile_row, k0, tile)
            accumulate_int8(self, kernel, strip, tile)
            return
        vectors = range(0, self.nr, self.lanes)
        a = self.operands.a
        if copy is None:
            starts = [self.row_start(row + i, k0) for i in range(height)]
        else:
            self.fill_copy(copy, height, row, k0, depth)
            a, starts = copy, [tirx.const(i * self.max_depth, "int64") for i in range(height)]
        if self.matmul.quantization is not None and panel is None:
            self.clear_tile(height, tile_row, k0, tile)
            accumulate_quantized(self, kernel, strip, a, starts, tile)
            return
        zero = splat(tirx.const(0, self.acc), self.lanes, self.acc)
        c = [[Register(zero) for _ in vectors] for _ in range(height)]
        with T.If(k0 > 0), T.Then():
            for i in range(height):
                for v, accumulator in zip(vectors, c[i]):
                    accumulator.value = load(tile, self.lanes, (tile_row + i) * self.nr + v)

        prefetch_step = self.plan_prefetch(kernel, strip) if panel is None else None

        def add(k: Expr, distance: Expr, complete: bool) -> None:
            if prefetch_step is not None:
                prefetch_step(k)
            b = [self.load_b_vector(panel, k0, k, v) for v in vectors]
            for i in range(height):
                a_ik = a[starts[i] + k] if copy is not None else self.load_a_step(starts[i] + distance, complete)
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

    def load_a_step(self, position: Expr, complete: bool) -> Expr:
        """Load the element or the packed lane of a step of A in place."""
        a = self.operands.a
        if self.packing is None:
            return a[position]
        if complete:
            return self.packing.pack_vector(load(a, self.k_per_lane, position))
        return self.pack_step([a[position + n] for n in range(self.k_per_lane)], complete=False)

    def clear_tile(self, height: int, tile_row: Expr, k0: Expr, tile: tirx.Buffer) -> None:
        """Set rows of the tile to zeros before the first block of k."""
        zero = splat(tirx.const(0, self.acc), self.lanes, self.acc)
        with T.If(k0 == 0), T.Then(), T.serial(height * (self.nr // self.lanes)) as v:
            store(tile, zero, tile_row * self.nr + v * self.lanes)

    def load_b_vector(self, panel: tirx.Buffer | None, k0: Expr, k: Expr, v: int) -> Expr:
        """Load columns v and up of a panel at step k0 + k."""
        if panel is not None:
            return T.bind(load(panel, self.lanes, k * self.nr + v))
        start = let(self.bind_offset(self.b_offsets[0], k=k0 + k, c=tirx.const(0, "int64")))
        if self.packing is not None:
            n = self.k_per_lane
            return self.packing.pack_vector(load(self.operands.b, n * self.lanes, start + n * v))
        return convert(load(self.operands.b, self.lanes, start + v), self.acc, self.cpu)

    def fill_copy(self, copy: tirx.Buffer, height: int, first: Expr, k0: Expr, depth: Expr) -> None:
        """Emit copy[i, k] = step k0 + k of row first + i of A."""
        whole = depth if self.is_whole else let(tirx.min(depth, self.whole - k0))

        def fill_runs(i: int, length: int) -> None:
            start = self.row_start(first + i, k0)
            with self.iterate_runs(k0, depth) as (k, distance):
                emit_vector_loop(
                    tirx.const(length, "int64"),
                    self.lanes,
                    lambda width: (
                        lambda n, lane: store(
                            copy,
                            load_widened(self.operands.a, start + distance + n * self.a_step),
                            i * self.max_depth + k + n,
                        )
                    ),
                )

        def fill_row(i: int) -> None:
            def copy_step(k: Expr, complete: bool) -> None:
                offsets = [self.bind_offset(position, m=first + i, k=k0 + k) for position in self.a_offsets]
                store(copy, self.load_step(self.operands.a, offsets, complete), i * self.max_depth + k)

            emit_vector_loop(whole, self.lanes, lambda width: lambda k, lane: copy_step(k, True))
            if not self.is_whole:
                with T.If(whole < depth), T.Then():
                    copy_step(whole, False)

        for i in range(height):
            fill_row(i) if self.runs is None else fill_runs(i, self.runs.length)
