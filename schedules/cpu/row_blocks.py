"""Matmuls whose rows are reduced and multiplied again, such as attention whose scores and probabilities are codes.

    for each block of rows of a batch                                among threads
        scores[rows, keys]         = A B, and its epilogue           by panels of B, as in matmul.py
        probabilities[rows, keys]  = what reductions make of a row   row by row, as in reduction.py
        output[rows, columns]      = probabilities C, and its epilogue

Between the parts a block stays in the second-level cache, and what they compute is what they computed apart. So memory
grows with the keys and not with the pairs, and rounding is exactly that of the model: an online softmax, which knows
the sum of a row when all keys are seen, could not round a probability before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int

from ..reading.row_parts import Part, RowParts, read_row_parts
from ..reading.stages import unravel
from ..reading.values import flat_view
from ..rejections import fits
from ..tiles import Space
from ..variant import Variant
from .blocked import Blocked
from .loops import LoopTiles, split_among_threads
from .matmul import panel_memory, plan_stages, sum_panel
from .panels import PanelTiles
from .reduction import ReductionTiles, RowKernel
from .results import Memory
from .vector import Machine, let, machine, workspace

_STRIP = PanelTiles.mr  # a block of a multiple of them has strips of equal height


@dataclass(frozen=True, kw_only=True)
class RowBlockTiles(LoopTiles):
    """Tiles of blocks of rows."""

    cache: int = 1 << 18
    """Bytes that lie between the parts, at home in any second-level cache."""
    rows: int = 96
    """The most rows of a block ..."""
    least: int = 24
    """... and the fewest, unless there are no more: what is packed for a block is packed for all of them."""
    many_tasks: int = 16
    """Blocks that keep threads busy."""

    @classmethod
    def space(cls, problem: RowParts, machine: Machine) -> Space:
        return super().space(problem, machine) | {
            "cache": tuple(1 << n for n in range(17, 22)),
            "rows": (12, 24, 48, 96, 144, 192),
            "least": (6, 12, 24, 48),
            "many_tasks": (4, 8, 16, 32, 64),
        }

    def rules(self, problem: RowParts, machine: Machine) -> dict[str, bool]:
        return super().rules(problem, machine) | {
            f"rows = {self.rows} and least = {self.least} must be positive multiples of {_STRIP}": (
                min(self.rows, self.least) > 0 and self.rows % _STRIP == self.least % _STRIP == 0
            ),
            f"least = {self.least} must not be more than rows = {self.rows}": self.least <= self.rows,
            "cache and many_tasks must be positive": min(self.cache, self.many_tasks) > 0,
        }


def row_blocks(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Blocks of rows among threads, for functions of parts (row_parts.py) that are matmuls of bytes, with reductions
    of their rows between; None for anything else."""
    read = read_row_parts(func)
    if read is None:
        return None
    cpu = machine(target)
    kernels = [_kernel(func, part, cpu) for part in read.parts]
    matmuls = [kernel for kernel in kernels if isinstance(kernel, list)]
    rank = len(read.groups[0].matmuls[0].stage.axes) - 1
    needs = {
        "sums are of bytes": all(group.acc == "int32" for group in read.groups),
        "matrices are no weights": not any(kernel[0].b_in_place for kernel in matmuls),
        "matmuls go by panels": len(matmuls) == len(read.groups),
        "rows are reduced one by one": all(k.rank == rank for k in kernels if isinstance(k, RowKernel)),
    }
    if not fits("row blocks", needs):
        return None
    tiles = {"blocks": RowBlockTiles.default(read, cpu)}
    return [Variant("blocks", read, cpu, tiles, lambda tiles: _emit(func, read, cpu, tiles["blocks"]))]


def _kernel(func: tirx.PrimFunc, part: Part, cpu: Machine) -> list[Blocked] | RowKernel | None:
    """What computes a part: the kernel of the matmul, or the one of rows. None where it is no matmul by panels."""
    if part.group is None:
        return RowKernel(func, part.stages, cpu, ReductionTiles.default(part.stages, cpu), part.parameters)
    plan = plan_stages(func, part.stages, part.parameters, cpu)
    return plan[0] if plan is not None and len(plan) == 1 else None


def _emit(func: tirx.PrimFunc, read: RowParts, cpu: Machine, tiles: RowBlockTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        _Blocks(func, read, cpu, tiles).write()
    return func.with_body(builder.get().body)


class _Blocks:
    """The code, written where the IRBuilder stands."""

    def __init__(self, func: tirx.PrimFunc, read: RowParts, cpu: Machine, tiles: RowBlockTiles) -> None:
        self.read, self.tiles = read, tiles
        self.parts = [(part, _kernel(func, part, cpu)) for part in read.parts]
        self.matmuls = [kernel for _, kernel in self.parts if isinstance(kernel, list)]
        self.results = self.matmuls[0][0].results
        self.given: Memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

    def write(self) -> None:
        tiles, batch, rows = self.tiles, self.results.batch, self.results.rows
        one, size = tirx.const(1, "int64"), tirx.const(0, "int64")
        for buffer in self.read.between:
            size = size + buffer.shape[-1] * DataType(buffer.dtype).itemsize
        fitting = let(tirx.min(tirx.max(tiles.cache // tirx.max(size, one), tiles.least), tiles.rows))
        enough = tirx.min((tiles.many_tasks - 1) // tirx.max(batch, one), (rows - 1) // tiles.least) + 1
        blocks = let(tirx.max(tirx.max((rows + (fitting - 1)) // fitting, enough), one))
        # Blocks of equal height, of whole strips.
        strips = (rows + (blocks * _STRIP - 1)) // (blocks * _STRIP)
        height = let(tirx.max(tirx.min(strips * _STRIP, rows), one))
        count = let((rows + (height - 1)) // height)

        def task(index: Expr) -> None:
            # The same rows of all batches one after the other: heads share a mask.
            first = let(index // batch * height)
            self.block(let(index % batch), first, let(tirx.min(height, rows - first)), height)

        split_among_threads(batch * count, batch * rows * self.work(), tiles.parallel_work, task)

    def work(self) -> Expr:
        """Simple operations per row, roughly."""
        work: Expr = tirx.const(0, "int64")
        for _, kernel in self.parts:
            if isinstance(kernel, RowKernel):
                work = work + kernel.work()
            elif kernel is not None:
                work = work + kernel[0].results.columns * kernel[0].operands.depth
        return work

    def block(self, number: Expr, first: Expr, height: Expr, most: Expr) -> None:
        """All parts for `height` rows from `first` on, at most so many, of the batch of this number."""
        scratch = self.workspace(most)
        memory = {**self.given, **self.between(scratch, number * self.results.rows + first)}
        for part, kernel in self.parts:
            if isinstance(kernel, RowKernel):
                kernel.open({buffer: memory[buffer] for buffer in part.parameters})
                own = {output: scratch[name] for output, name in self.row_names(kernel).items()}
                self.rows(kernel, number, first, height, own)
            elif kernel is not None:
                kernel[0].operands.open(memory)
                values = kernel[0].results.in_batch(number)
                with T.serial(kernel[0].panels) as panel:
                    sum_panel(kernel, values, panel, first, height, scratch)

    def rows(
        self, kernel: RowKernel, number: Expr, first: Expr, height: Expr, scratch: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        """A part without a matmul, row by row."""
        matmul = self.read.groups[0].matmuls[0]
        values = self.results.in_batch(number)
        with T.serial(height) as r:
            places = unravel(let(first + r), matmul.rows)
            at = {**values, **{axis.var: let(place) for axis, place in zip(matmul.rows, places)}}
            axes = matmul.stage.axes[:-1]
            kernel.row([tirx.const(0, "int64") if is_int(axis.extent, 1) else at[axis.var] for axis in axes], scratch)

    def workspace(self, most: Expr) -> dict[str, tirx.Buffer]:
        """Memory for a block of so many rows, by name, in one allocation: what lies between the parts, and what one
        part after the other needs."""
        sizes: dict[str, tuple[int | Expr, str]] = {}
        for n, buffer in enumerate(self.read.between):
            sizes[f"between_{n}"] = most * buffer.shape[-1], buffer.dtype
        for matmul in self.matmuls:
            for name, (size, dtype) in panel_memory(matmul, self.tiles.rows).items():
                sizes[name] = max(size, sizes.get(name, (0, dtype))[0]), dtype
        for _, kernel in self.parts:
            if isinstance(kernel, RowKernel):
                names = self.row_names(kernel)
                sizes |= {names[output]: size for output, size in kernel.scratch_rows().items()}
        return workspace(**sizes)

    def row_names(self, kernel: RowKernel) -> dict[tirx.Buffer, str]:
        """What the rows that a part needs beside are called in the workspace."""
        place = next(n for n, (_, other) in enumerate(self.parts) if other is kernel)
        return {output: f"row_{place}_{n}" for n, output in enumerate(kernel.scratch_rows())}

    def between(self, scratch: dict[str, tirx.Buffer], row: Expr) -> Memory:
        """The tensors between the parts, of which only a block is there, that begins with this row of all batches'."""
        views = {}
        for n, buffer in enumerate(self.read.between):
            view = scratch[f"between_{n}"]
            start = let(view.elem_offset - row * buffer.shape[-1])
            size = self.results.simplify(self.results.batch * self.results.rows * buffer.shape[-1])
            views[buffer] = T.decl_buffer((size,), buffer.dtype, data=view.data, elem_offset=start, layout=None)
        return views
