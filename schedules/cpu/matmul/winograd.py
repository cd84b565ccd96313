"""3 x 3 convolutions by Winograd's algorithm F(2 x 2, 3 x 3) (schedules/reading/winograd.py), with their epilogue.

    for each block of tiles and group of panels                      among threads
        V[16, tiles, C] = B^T d B of the tiles' patches              scratch
        for each panel of nr columns
            for each of 16 points
                for each mr tiles                                    the micro-kernel, as in blocked.py
                    matmuls[point, mr, nr] = V[point, mr, C] U[point, C, nr]
            for each tile
                2 x 2 outputs = A^T matmuls A -> bias, activation, residual -> output

Each of the 2 x 2 outputs depends on no input outside of its window: what patches read after the last row or column of
the data is unused. Infinities in a window may become NaN, as B^T d B subtracts inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.matmul import MatmulGroup, read_groups
from ...reading.stages import Stage, read_stages
from ...reading.values import flat_view
from ...reading.winograd import PATCH, POINTS, TILE
from ...tiles import Space
from ...variant import Variant
from ..elementwise.loops import LoopTiles, split_among_threads
from ..primitives.vector import (
    CpuFeatures,
    Register,
    allocate_workspace,
    cover_row,
    let,
    load,
    read_cpu_features,
    splat,
    store,
)
from .prefetch_share import PrefetchShare
from .results import MatmulResults, Values


@dataclass(frozen=True, kw_only=True)
class WinogradTiles(LoopTiles):
    """Blocks of tiles of outputs."""

    mr: int = 6
    """Tiles of a micro-kernel."""
    block: int = 48
    """The maximum number of tiles of a block, a multiple of mr. With about as many as a panel has columns, patches and
    weights that exceed the second-level cache are read again equally often."""
    cache: int = 1 << 19
    """Bytes from which on U is not in the second-level cache: a point's is prefetched while that before it is used."""
    many_tasks: int = 8
    """Blocks that keep threads busy; of fewer, panels are divided, too."""

    @classmethod
    def space(cls, problem: MatmulGroup, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {
            "mr": (4, 5, 6),
            "block": (12, 24, 36, 48, 60, 72, 96, 120, 144),
            "cache": tuple(1 << n for n in range(17, 24)),
            "many_tasks": (1, 2, 4, 8, 16, 32),
        }

    def rules(self, problem: MatmulGroup, cpu: CpuFeatures) -> dict[str, bool]:
        transformed = problem.matmuls[0].transformed
        assert transformed is not None
        vectors = transformed.nr // cpu.lanes("float32")
        needed = self.mr * vectors + vectors + 1
        return super().rules(problem, cpu) | {
            "mr, cache and many_tasks must be positive": min(self.mr, self.cache, self.many_tasks) > 0,
            f"block = {self.block} must be a positive multiple of mr = {self.mr}": self.block > 0 < self.mr
            and self.block % self.mr == 0,
            f"{needed} registers are more than {cpu.registers}": needed <= cpu.registers,
        }


def winograd(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a convolution by transformed weights and its element-wise stages; return None for anything else."""
    stages = read_stages(func)
    group = read_transformed_convolution(stages, set(func.params)) if stages else None
    if not stages or group is None:
        return None
    cpu = read_cpu_features(target)
    tiles = {"winograd": WinogradTiles.default(group, cpu)}
    return [Variant("winograd", group, cpu, tiles, lambda tiles: _emit(func, stages, group, cpu, tiles["winograd"]))]


def read_transformed_convolution(stages: list[Stage], parameters: set[tirx.Buffer]) -> MatmulGroup | None:
    """Return the only matmul of the stages, with its epilogue, if it is a convolution by transformed weights."""
    groups = read_groups(stages, parameters)
    if not groups or len(groups) > 1 or len(groups[0].matmuls) > 1:
        return None
    matmul = groups[0].matmuls[0]
    is_patch = matmul.transformed is not None and matmul.transformed.reads_patches(matmul.a, matmul.rows, matmul.k)
    return groups[0] if is_patch else None


def _emit(
    func: tirx.PrimFunc, stages: list[Stage], group: MatmulGroup, cpu: CpuFeatures, tiles: WinogradTiles
) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        _Kernel(func, MatmulResults(func, stages, group, cpu), tiles).emit()
    return func.with_body(builder.get().body)


def _transform_input(d: list[Expr]) -> list[Expr]:
    """Return B^T d of four values."""
    return [let(d[0] - d[2]), let(d[1] + d[2]), let(d[2] - d[1]), let(d[1] - d[3])]


def _transform_output(m: list[Expr]) -> list[Expr]:
    """Return A^T m of four values."""
    return [let(m[0] + m[1] + m[2]), let(m[1] - m[2] - m[3])]


def _transform_both(rows: list[list[Expr]], transform: Callable[[list[Expr]], list[Expr]]) -> list[list[Expr]]:
    """Transform columns, then rows."""
    columns = [transform([row[s] for row in rows]) for s in range(PATCH)]
    return [transform([column[r] for column in columns]) for r in range(len(columns[0]))]


class _Kernel:
    """The kernel, emitted at the IRBuilder's insertion point."""

    def __init__(self, func: tirx.PrimFunc, results: MatmulResults, tiles: WinogradTiles) -> None:
        self.results, self.tiles = results, tiles
        (matmul,) = results.group.matmuls
        weights = matmul.transformed
        assert weights is not None
        self.axes, self.channels, self.nr, self.lanes = matmul.rows, weights.channels, weights.nr, results.lanes
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        self.data, self.weights = self.memory[matmul.a.source], self.memory[weights.load.source]
        _, self.data_rows, self.data_columns, _ = matmul.a.source.shape
        self.prefetches = math.prod(map(int, weights.load.source.shape)) * 4 > tiles.cache
        self.panels, self.block = int(weights.load.source.shape[0]), tiles.block
        results.use_axes()
        results.facts.bind(results.c, 0, tirx.const(self.nr, "int64"))
        results.facts.bind(results.panel, 0, tirx.const(self.panels, "int64"))

    def emit(self) -> None:
        tiles, mr = self.tiles, self.tiles.mr
        images, rows, columns = (axis.extent for axis in self.axes)
        self.tile_rows, self.tile_columns = (let((size + (TILE - 1)) // TILE) for size in (rows, columns))
        self.count = let(images * self.tile_rows * self.tile_columns)
        # Blocks are equal, of whole strips; tiles after the last one are copies of it.
        needed = let((self.count + (self.block - 1)) // self.block)
        blocks = let(tirx.max(needed, 1))
        height = let((self.count + (blocks * mr - 1)) // (blocks * mr) * mr)
        groups = let(tirx.min((blocks + (tiles.many_tasks - 1)) // blocks, self.panels))
        panels = let((groups + (self.panels - 1)) // groups)

        def task(index: Expr) -> None:
            first, group = let(index // groups * height), let(index % groups)
            self.scratch = allocate_workspace(
                patches=(POINTS * self.block * self.channels, "float32"),
                matmuls=(POINTS * self.block * self.nr, "float32"),
                outputs=(TILE * TILE * self.nr, "float32"),
            )
            with T.serial(height) as i:
                self.transform_input(i, let(tirx.min(first + i, self.count - 1)))
            with T.serial(let(tirx.max(tirx.min(panels, self.panels - group * panels), 0))) as n:
                self.multiply_panel(let(group * panels + n), first, height)

        work = self.count * (POINTS * self.channels) * self.results.columns
        split_among_threads(needed * groups, work, tiles.parallel_work, task)

    def unravel_tile(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image of a tile, and its first row and column."""
        per_image = self.tile_rows * self.tile_columns
        row, column = let(tile // self.tile_columns % self.tile_rows), let(tile % self.tile_columns)
        return let(tile // per_image), let(row * TILE), let(column * TILE)

    def transform_input(self, i: Expr, tile: Expr) -> None:
        """Store B^T d B of the patch of a tile, which is number i of its block."""
        image, first_row, first_column = self.unravel_tile(tile)
        rows = [let(image * self.data_rows + tirx.min(first_row + r, self.data_rows - 1)) for r in range(PATCH)]
        columns = [let(tirx.min(first_column + s, self.data_columns - 1)) for s in range(PATCH)]
        starts = [[let((row * self.data_columns + column) * self.channels) for column in columns] for row in rows]
        width, vectors = cover_row(self.channels, self.lanes)
        with T.serial(tirx.const(len(vectors), "int64")) as v:
            channel = let(tirx.min(v * width, self.channels - width))
            d = [[let(load(self.data, width, start + channel)) for start in row] for row in starts]
            for r, row in enumerate(_transform_both(d, _transform_input)):
                for s, value in enumerate(row):
                    point = (PATCH * r + s) * self.block
                    store(self.scratch["patches"], value, (point + i) * self.channels + channel)

    def multiply_panel(self, panel: Expr, first: Expr, height: Expr) -> None:
        """Compute the outputs of a panel's columns for `height` tiles from `first` on."""
        size, strips = self.channels * self.nr, let(height // self.tiles.mr)
        with T.serial(tirx.const(POINTS, "int64")) as point, T.serial(strips) as strip:
            u = let((panel * POINTS + point) * size)
            channels = tirx.const(self.channels, "int64")
            share = PrefetchShare(self.weights, u + size, depth=channels, width=self.nr, number=strip, count=strips)
            self.emit_micro_kernel(u, let(point * self.block + strip * self.tiles.mr), share)
        with T.serial(let(tirx.min(height, self.count - first))) as i:
            self.transform_output(i)
            self.store_tile(let(first + i), panel)

    def store_tile(self, tile: Expr, panel: Expr) -> None:
        """Apply the epilogue to those of a tile's 2 x 2 outputs that exist, and store a panel's columns of them."""
        results, column = self.results, self.results.panel * self.nr + self.results.c
        columns = let(tirx.min(results.columns - panel * self.nr, self.nr))
        image, first_row, first_column = self.unravel_tile(tile)
        with T.serial(tirx.const(TILE * TILE, "int64")) as n:
            values = image, let(first_row + n // TILE), let(first_column + n % TILE)
            exists = [index < axis.extent for axis, index in zip(self.axes[1:], values[1:])]
            with T.If(tirx.all(*exists)), T.Then():
                point: Values = {axis.var: index for axis, index in zip(self.axes, values)}
                accumulators = [(self.scratch["outputs"], let(n * self.nr))]
                results.store(self.memory, {**point, results.panel: panel}, accumulators, n, column, columns)

    def emit_micro_kernel(self, u: Expr, row: Expr, share: PrefetchShare) -> None:
        """Store the matmul of mr tiles at a point, from that row of V on, with a panel's U from element u on.

        After the last point its share of what follows is memory of others, which a prefetch may name.
        """
        vectors = range(0, self.nr, self.lanes)
        zero = splat(tirx.const(0, "float32"), self.lanes, "float32")
        accumulators = [[Register(zero) for _ in vectors] for _ in range(self.tiles.mr)]
        starts = [let((row + i) * self.channels) for i in range(self.tiles.mr)]
        prefetch_step = share.plan_sequence() if self.prefetches else None
        with T.serial(tirx.const(self.channels, "int64")) as k:
            if prefetch_step is not None:
                prefetch_step(k)
            weights = [T.bind(load(self.weights, self.lanes, u + k * self.nr + v)) for v in vectors]
            for start, of_tile in zip(starts, accumulators):
                value = T.bind(splat(self.scratch["patches"][start + k], self.lanes, "float32"))
                for accumulator, weight in zip(of_tile, weights):
                    accumulator.value += value * weight
        for i, of_tile in enumerate(accumulators):
            for v, accumulator in zip(vectors, of_tile):
                store(self.scratch["matmuls"], accumulator.value, (row + i) * self.nr + v)

    def transform_output(self, i: Expr) -> None:
        """Store the 2 x 2 outputs, before the epilogue, of tile i of the block."""
        with T.serial(tirx.const(self.nr // self.lanes, "int64")) as v:
            column = let(v * self.lanes)
            m = [
                [
                    let(load(self.scratch["matmuls"], self.lanes, (point * self.block + i) * self.nr + column))
                    for point in range(PATCH * r, PATCH * r + PATCH)
                ]
                for r in range(PATCH)
            ]
            for r, row in enumerate(_transform_both(m, _transform_output)):
                for s, value in enumerate(row):
                    store(self.scratch["outputs"], value, (TILE * r + s) * self.nr + column)
