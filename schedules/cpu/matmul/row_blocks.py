"""Back-to-back GEMM fusion: matmuls whose rows are reduced and multiplied again, such as quantized attention.

    for each block of rows of a batch                                among threads
        scores[rows, keys]         = A B, and its epilogue           by panels of B, as in matmul.py
        probabilities[rows, keys]  = reductions of a row             row by row, as in reduction.py
        output[rows, columns]      = probabilities C, and its epilogue

Between the phases a block stays in the second-level cache. The phases compute what they would compute unfused. So
memory grows with the keys and not with the pairs, and rounding is exactly that of the model. An online softmax could
not do this: it has the sum of a row only after all keys, but a probability must be rounded before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int

from ...reading.row_segments import RowSegment, RowSegments, read_row_segments
from ...reading.stages import unravel
from ...reading.values import flat_view
from ...rejections import fits
from ...tiles import Space
from ...variant import Variant
from ..elementwise.loops import LoopTiles, split_among_threads
from ..elementwise.reduction import ReductionTiles, RowKernel
from ..primitives.vector import CpuFeatures, allocate_workspace, let, read_cpu_features
from .blocked import BlockedMatmul
from .matmul import emit_panel, list_panel_scratch, plan_stages
from .panels import PanelTiles
from .results import Memory
from .strips import RowBlock

_STRIP = PanelTiles.mr  # a block that is a multiple of it has strips of equal height


@dataclass(frozen=True, kw_only=True)
class RowBlockTiles(LoopTiles):
    """Tiles of blocks of rows."""

    cache: int = 1 << 18
    """Bytes of the intermediate tensors of a block; they fit any second-level cache."""
    rows: int = 96
    """The maximum number of rows of a block ..."""
    least: int = 24
    """... and the minimum, unless there are fewer rows: a panel packed for a block serves all of its rows."""
    many_tasks: int = 16
    """Blocks that keep threads busy."""

    @classmethod
    def space(cls, problem: RowSegments, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {
            "cache": tuple(1 << n for n in range(17, 22)),
            "rows": (12, 24, 48, 96, 144, 192),
            "least": (6, 12, 24, 48),
            "many_tasks": (4, 8, 16, 32, 64),
        }

    def rules(self, problem: RowSegments, cpu: CpuFeatures) -> dict[str, bool]:
        return super().rules(problem, cpu) | {
            f"rows = {self.rows} and least = {self.least} must be positive multiples of {_STRIP}": (
                min(self.rows, self.least) > 0 and self.rows % _STRIP == self.least % _STRIP == 0
            ),
            f"least = {self.least} must not be more than rows = {self.rows}": self.least <= self.rows,
            "cache and many_tasks must be positive": min(self.cache, self.many_tasks) > 0,
        }


def row_blocks(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule fused matmuls of bytes with row reductions between them (row_segments.py), block by block among threads.

    Return None for anything else.
    """
    row_parts = read_row_segments(func)
    if row_parts is None:
        return None
    cpu = read_cpu_features(target)
    kernels = [_plan_phase(func, phase, cpu) for phase in row_parts.segments]
    matmuls = [kernel for kernel in kernels if isinstance(kernel, list)]
    rank = len(row_parts.groups[0].matmuls[0].stage.axes) - 1
    needs = {
        "sums are of bytes": all(group.acc == "int32" for group in row_parts.groups),
        "matrices are no weights": not any(kernel[0].is_b_in_place for kernel in matmuls),
        "matmuls go by panels": len(matmuls) == len(row_parts.groups),
        "rows are reduced one by one": all(k.rank == rank for k in kernels if isinstance(k, RowKernel)),
    }
    if not fits("row blocks", needs):
        return None
    tiles = {"blocks": RowBlockTiles.default(row_parts, cpu)}
    return [Variant("blocks", row_parts, cpu, tiles, lambda tiles: _emit(func, row_parts, cpu, tiles["blocks"]))]


def _plan_phase(func: tirx.PrimFunc, phase: RowSegment, cpu: CpuFeatures) -> list[BlockedMatmul] | RowKernel | None:
    """Return the kernel of a phase: of its matmul, or of its rows; None for a matmul that is not by panels."""
    if phase.group is None:
        return RowKernel(func, phase.stages, cpu, ReductionTiles.default(phase.stages, cpu), phase.parameters)
    plan = plan_stages(func, phase.stages, phase.parameters, cpu)
    return plan[0] if plan is not None and len(plan) == 1 else None


def _emit(func: tirx.PrimFunc, row_parts: RowSegments, cpu: CpuFeatures, tiles: RowBlockTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        _Blocks(func, row_parts, cpu, tiles).emit()
    return func.with_body(builder.get().body)


class _Blocks:
    """The kernel, emitted at the IRBuilder's insertion point."""

    def __init__(self, func: tirx.PrimFunc, row_parts: RowSegments, cpu: CpuFeatures, tiles: RowBlockTiles) -> None:
        self.read, self.tiles = row_parts, tiles
        self.phases = [(phase, _plan_phase(func, phase, cpu)) for phase in row_parts.segments]
        self.matmuls = [kernel for _, kernel in self.phases if isinstance(kernel, list)]
        self.results = self.matmuls[0][0].results
        self.arguments: Memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

    def emit(self) -> None:
        tiles, batch, rows = self.tiles, self.results.batch, self.results.rows
        unit, size = tirx.const(1, "int64"), tirx.const(0, "int64")
        for buffer in self.read.intermediates:
            size = size + buffer.shape[-1] * DataType(buffer.dtype).itemsize
        fitting = let(tirx.min(tirx.max(tiles.cache // tirx.max(size, unit), tiles.least), tiles.rows))
        enough = tirx.min((tiles.many_tasks - 1) // tirx.max(batch, unit), (rows - 1) // tiles.least) + 1
        blocks = let(tirx.max(tirx.max((rows + (fitting - 1)) // fitting, enough), unit))
        # Blocks have equal height, of whole strips.
        strips = (rows + (blocks * _STRIP - 1)) // (blocks * _STRIP)
        height = let(tirx.max(tirx.min(strips * _STRIP, rows), unit))
        count = let((rows + (height - 1)) // height)

        def task(index: Expr) -> None:
            # The same rows of all batches follow each other, because heads share a mask.
            first = let(index // batch * height)
            self.block(let(index % batch), first, let(tirx.min(height, rows - first)), height)

        split_among_threads(batch * count, batch * rows * self.work(), tiles.parallel_work, task)

    def work(self) -> Expr:
        """Return roughly the number of simple operations per row."""
        work: Expr = tirx.const(0, "int64")
        for _, kernel in self.phases:
            if isinstance(kernel, RowKernel):
                work = work + kernel.work()
            elif kernel is not None:
                work = work + kernel[0].results.columns * kernel[0].operands.depth
        return work

    def block(self, number: Expr, first: Expr, height: Expr, max_rows: Expr) -> None:
        """Emit all phases for `height` <= max_rows rows from `first` on, of the batch `number`."""
        scratch = self.allocate(max_rows)
        memory = {**self.arguments, **self.intermediates(scratch, number * self.results.rows + first)}
        for phase, kernel in self.phases:
            if isinstance(kernel, RowKernel):
                kernel.bind_memory({buffer: memory[buffer] for buffer in phase.parameters})
                scratch_rows = {output: scratch[name] for output, name in self.row_names(kernel).items()}
                self.rows(kernel, number, first, height, scratch_rows)
            elif kernel is not None:
                kernel[0].operands.bind_memory(memory)
                values = kernel[0].results.bind_batch(number)
                with T.serial(kernel[0].panels) as panel:
                    emit_panel(kernel, values, panel, RowBlock(first, height), scratch)

    def rows(
        self, kernel: RowKernel, number: Expr, first: Expr, height: Expr, scratch: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        """Emit a phase without a matmul, row by row."""
        matmul = self.read.groups[0].matmuls[0]
        values = self.results.bind_batch(number)
        with T.serial(height) as r:
            coordinates = unravel(let(first + r), matmul.rows)
            at = {**values, **{axis.var: let(coordinate) for axis, coordinate in zip(matmul.rows, coordinates)}}
            axes = matmul.stage.axes[:-1]
            kernel.emit_row(
                [tirx.const(0, "int64") if is_int(axis.extent, 1) else at[axis.var] for axis in axes], scratch
            )

    def allocate(self, max_rows: Expr) -> dict[str, tirx.Buffer]:
        """Allocate the memory of a block of rows at once, by name: the intermediates, and the scratch of each phase."""
        sizes: dict[str, tuple[int | Expr, str]] = {}
        for n, buffer in enumerate(self.read.intermediates):
            sizes[f"between_{n}"] = max_rows * buffer.shape[-1], buffer.dtype
        for matmul in self.matmuls:
            for name, (size, dtype) in list_panel_scratch(matmul, self.tiles.rows).items():
                sizes[name] = max(size, sizes.get(name, (0, dtype))[0]), dtype
        for _, kernel in self.phases:
            if isinstance(kernel, RowKernel):
                names = self.row_names(kernel)
                sizes |= {names[output]: size for output, size in kernel.scratch_rows().items()}
        return allocate_workspace(**sizes)

    def row_names(self, kernel: RowKernel) -> dict[tirx.Buffer, str]:
        """Return the names, in the workspace, of the scratch rows of a phase."""
        index = next(n for n, (_, other) in enumerate(self.phases) if other is kernel)
        return {output: f"row_{index}_{n}" for n, output in enumerate(kernel.scratch_rows())}

    def intermediates(self, scratch: dict[str, tirx.Buffer], row: Expr) -> Memory:
        """Return views of the intermediates, of which only a block is in memory: it begins with this row of all
        batches."""
        views = {}
        for n, buffer in enumerate(self.read.intermediates):
            view = scratch[f"between_{n}"]
            start = let(view.elem_offset - row * buffer.shape[-1])
            size = self.results.simplify(self.results.batch * self.results.rows * buffer.shape[-1])
            views[buffer] = T.decl_buffer((size,), buffer.dtype, data=view.data, elem_offset=start, layout=None)
        return views
