"""Matmuls C = A B with a fused epilogue, blocked for registers and caches.

The blocking is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS
34(3), 2008, with their names. A register tile of mr x nr elements of C is accumulated over kc values of k. Its
operands are mr rows of A, read in place, and a panel of B. A panel is nr columns, stored so that the nr elements of
each k are consecutive.

    for each block of mc rows and panel of nr columns                    among threads
        for each matmul whose accumulators are read together
            for each block of kc values of k                             blocked.py
                panel of B -> scratch, unless B is stored in panels; of quantized values for many rows only
                for each mr rows                                         the micro-kernel
                    C tile[mr, nr] += A[mr, kc] panel[kc, nr]            in mr * nr / lanes registers
                    after the last k of the last matmul: C tiles -> bias, activation, residual -> output

Strips of rows are as equal as they can be (mr + 1 rows are two halves, not mr and one), each with a micro-kernel of its
height. So nothing is read or written out of bounds, and a matmul with one row streams B at memory bandwidth. Padding
columns of a panel are zeros.

Several matmuls (matmul.py) run in one pass over the rows: those of a group have a tile each, and one epilogue. Groups,
such as queries, keys and values, are panels of one long row of tasks.

If B is not stored in panels, a small M or N does not justify packing it (gemv.py).

bfloat16 pairs, if the machine multiplies them, and quadruples of bytes, whose matmuls accumulate in int32, are packed
lanes (packed_lanes.py). A step along k takes as many values. A panel's elements are packed lanes of successive k, and
missing values of the last one are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int

from ...reading.matmul import read_groups
from ...reading.selection import read_selection
from ...reading.stages import Stage, read_stages
from ...reading.values import flat_view
from ...variant import Variant
from ..elementwise.loops import split_among_threads
from ..primitives.vector import CpuFeatures, allocate_workspace, let, read_cpu_features
from .blocked import BlockedMatmul
from .gemv import GemvTiles, is_gemv, list_gemv_kernels
from .int8_rows import quantize_rows
from .operands import MatmulOperands
from .panels import PanelTiles, is_panel_width
from .results import MatmulResults, Values
from .strips import RowBlock, list_block_sizes
from .winograd import read_transformed_convolution

Plan = list[list[BlockedMatmul]]
"""Kernels of the matmuls of each group."""


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule float matmuls with element-wise stages around them by blocked kernels; return None for anything else."""
    kernels = plan_matmul(func, target)
    if kernels is None:
        return None
    groups, cpu = [group[0].results.group for group in kernels], read_cpu_features(target)
    tiles = {"panels": kernels[0][0].tiles, "gemv": GemvTiles.default(groups, cpu)}

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        planned = kernels if tiles["panels"] == kernels[0][0].tiles else plan_matmul(func, target, tiles["panels"])
        assert planned is not None
        return _emit(func, planned, tiles["gemv"])

    return [Variant("panels", groups, cpu, tiles, emit)]


def plan_matmul(func: tirx.PrimFunc, target: tvm.target.Target, tiles: PanelTiles | None = None) -> Plan | None:
    """Return the kernels by which `matmul` schedules a function, or None if it does not."""
    stages = read_stages(func)
    return plan_stages(func, stages, set(func.params), read_cpu_features(target), tiles) if stages else None


def plan_stages(
    func: tirx.PrimFunc,
    stages: list[Stage],
    parameters: set[tirx.Buffer],
    cpu: CpuFeatures,
    tiles: PanelTiles | None = None,
) -> Plan | None:
    """Plan some of the function's stages; tensors that other stages write or read also count as parameters."""
    groups = read_groups(stages, parameters)
    if not groups or any(matmul.transformed is not None for group in groups for matmul in group.matmuls):
        return None
    quantized = [matmul.quantization for group in groups for matmul in group.matmuls if matmul.quantization is not None]
    if not all(is_panel_width(c.nr, cpu.lanes("float32")) for c in quantized):
        return None
    tiles = tiles or PanelTiles.default(groups, cpu)
    selection = read_selection(groups)
    if selection is not None:
        groups = [selection.apply(group) for group in groups]
    kernels = []
    for group in groups:
        results = MatmulResults(func, stages, group, cpu, selection)
        kernels.append([BlockedMatmul(MatmulOperands(results, matmul), tiles) for matmul in group.matmuls])
    if len(_flatten_plan(kernels)) > 1 or selection is not None:
        return kernels if _can_share_pass(kernels) else None
    first = kernels[0][0]
    return None if _allows_gemv(first) and is_gemv(first.operands) else kernels


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Return whether matmuls by other stored matrices may join a function; None for one without a kernel's matmul."""
    stages, parameters = read_stages(func), set(func.params)
    kernels = plan_stages(func, stages, parameters, read_cpu_features(target)) if stages else None
    if kernels is not None:
        return all(b.is_b_in_place and not b.matmul.batch for b in _flatten_plan(kernels))
    return False if stages and read_transformed_convolution(stages, parameters) is not None else None


def _emit(func: tirx.PrimFunc, kernels: Plan, gemv: GemvTiles) -> tirx.PrimFunc:
    operands = kernels[0][0].operands
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        for b in _flatten_plan(kernels):
            b.operands.bind_memory(memory)
        special = list_gemv_kernels(operands, gemv) if _allows_gemv(kernels[0][0]) else []
        _emit_first_applicable(operands.results, special, lambda: _emit_blocked(kernels))
    return func.with_body(builder.get().body)


def _allows_gemv(b: BlockedMatmul) -> bool:
    """Return whether small-M or small-N kernels apply.

    They do if B is not stored in panels, a row of A is linear in memory, not a patch, and elements are not bytes.
    """
    operands = b.operands
    return not b.is_b_in_place and b.acc != "int32" and operands.is_linear(operands.a_offset, operands.k)


def _flatten_plan(kernels: Plan) -> list[BlockedMatmul]:
    return [b for group in kernels for b in group]


def _can_share_pass(kernels: Plan) -> bool:
    """Return whether several matmuls can run in one pass: equal rows, stored panels, one panel width in a group."""
    first = kernels[0][0].results
    return all(
        b.is_b_in_place
        and b.nr == group[0].nr
        and not b.matmul.batch
        and is_int(first.simplify(b.results.rows - first.rows), 0)
        for group in kernels
        for b in group
    )


def _emit_first_applicable(
    results: MatmulResults, kernels: list[tuple[Expr, Callable[[], None]]], otherwise: Callable[[], None]
) -> None:
    """Emit the kernels, each under its condition if no earlier one is met."""
    if not kernels:
        otherwise()
        return
    (condition, write), *remaining = kernels
    condition = results.simplify(condition)
    if is_int(condition, 1):
        write()
    elif is_int(condition, 0):
        _emit_first_applicable(results, remaining, otherwise)
    else:
        with T.If(condition):
            with T.Then():
                write()
            with T.Else():
                _emit_first_applicable(results, remaining, otherwise)


def _emit_blocked(kernels: Plan) -> None:
    """Emit the loops of this file's docstring, for groups of matmuls."""
    matmuls = _flatten_plan(kernels)
    quantize_rows(matmuls)
    results = matmuls[0].results
    tiles = matmuls[0].tiles
    panels = [group[0].panels for group in kernels]
    all_panels = sum(panels[1:], panels[0])
    rows, batch = results.rows, results.batch
    max_rows = tirx.const(tiles.mc, "int64")
    if not matmuls[0].is_b_in_place:  # a packed panel serves all rows if there is only one block of k
        is_single_block = tirx.all(matmuls[0].k_blocks <= 1, batch * all_panels >= tiles.many_tasks)
        max_rows = tirx.Select(is_single_block, tirx.max(rows, max_rows), max_rows)
    # Blocks have equal height, so that no thread gets all the short ones.
    row_blocks = let(tirx.max((rows + (max_rows - 1)) // max_rows, 1))
    block_rows = let((rows + (row_blocks * tiles.mr - 1)) // (row_blocks * tiles.mr) * tiles.mr)
    sizes = list_block_sizes(rows, row_blocks, block_rows)

    emit_rows = _emit_panel_apart if results.selection is None else _emit_panel_by_runs

    def task(index: Expr) -> None:
        """Emit one panel's columns for one block of rows."""
        panel = let(index % all_panels)
        values = results.bind_batch(index // (all_panels * row_blocks))
        first = let(index // all_panels % row_blocks * block_rows)
        height = tirx.const(sizes[0], "int64") if sizes and len(sizes) == 1 else let(tirx.min(block_rows, rows - first))
        block = RowBlock(first, height, sizes)

        def emit_groups(number: int, start: Expr) -> None:
            """Emit the groups from this number on, whose panels begin at `start`."""
            if number + 1 == len(kernels):
                emit_rows(kernels[number], values, panel - start, block, tiles.mc)
                return
            end = start + panels[number]
            with T.If(panel < end):
                with T.Then():
                    emit_rows(kernels[number], values, panel - start, block, tiles.mc)
                with T.Else():
                    emit_groups(number + 1, end)

        emit_groups(0, tirx.const(0, "int64"))

    work = [batch * rows * b.results.columns * b.operands.depth for b in matmuls]
    packing = next((b.packing for b in matmuls if b.packing is not None), None)
    with nullcontext() if packing is None else packing.open_context():
        split_among_threads(batch * row_blocks * all_panels, sum(work[1:], work[0]), tiles.parallel_work, task)


def _emit_panel_apart(group: list[BlockedMatmul], values: Values, panel: Expr, block: RowBlock, max_rows: int) -> None:
    """Emit `emit_panel` in a workspace of its own."""
    emit_panel(group, values, panel, block, allocate_workspace(**list_panel_scratch(group, max_rows)))


def _emit_panel_by_runs(
    group: list[BlockedMatmul], values: Values, panel: Expr, block: RowBlock, max_rows: int
) -> None:
    """Emit a panel for each run of successive rows that select the same matrix."""
    results = group[0].results
    selection = results.selection
    assert selection is not None
    table = group[0].operands.memory[selection.table]
    scratch = allocate_workspace(**list_panel_scratch(group, max_rows))
    begin = T.alloc_buffer((1,), "int64")
    T.buffer_store(begin, block.first, [0])
    with T.serial(block.count) as i:
        row = let(block.first + i)
        following = let(tirx.min(row + 1, results.rows - 1))
        with T.If(tirx.any(i == block.count - 1, table[row] != table[following])), T.Then():
            start = let(begin[0])
            selected = {**values, selection.group: let(selection.clamp_group(table[row]))}
            emit_panel(group, selected, panel, RowBlock(start, let(row + 1 - start)), scratch)
            T.buffer_store(begin, row + 1, [0])


def list_panel_scratch(group: list[BlockedMatmul], max_rows: int) -> dict[str, tuple[int | Expr, str]]:
    """Return the number and type of the elements that `emit_panel` needs for at most `max_rows` rows, by name."""
    sizes = {f"tile{n}": max_rows * b.nr for n, b in enumerate(group)}
    for b in group:
        for name, size in b.scratch_sizes().items():
            sizes[name] = max(size, sizes.get(name, 0))
    return {name: (size, group[0].acc) for name, size in sizes.items()}


def emit_panel(
    group: list[BlockedMatmul], values: Values, panel: Expr, block: RowBlock, scratch: dict[str, tirx.Buffer]
) -> None:
    """Emit one panel's columns of a group's matmuls for a block of rows."""
    results, last = group[0].results, group[-1]
    values = {**values, results.panel: let(panel)}
    columns = last.count_columns(values)
    tiles = [scratch[f"tile{n}"] for n in range(len(group))]

    def finish(row: Expr, tile_row: Expr) -> None:
        """Store a row of the block, whose accumulators of the last matmul are in row `tile_row` of its tile."""
        accumulators = [(tile, let((tile_row if b is last else row) * b.nr)) for b, tile in zip(group, tiles)]
        results.store(last.operands.memory, values, accumulators, let(block.first + row), last.column, columns)

    for b, tile in zip(group, tiles):
        b.accumulate_panel(values, block, columns, tile, scratch, finish if b is last else None)
