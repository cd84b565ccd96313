"""matmuls C = A B with a fused epilogue, blocked for registers and caches.

The blocking is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS
34(3), 2008, with their names: a register tile of mr x nr elements of C is accumulated over kc values of k from mr rows
of A, read in place, and a panel of B: nr columns, stored so that the nr elements of each k are consecutive.

    for each block of mc rows and panel of nr columns                    among threads
        for each matmul whose sums are read together
            for each block of kc values of k                             blocked.py
                panel of B -> scratch, unless B is stored in panels
                for each mr rows                                         the micro-kernel
                    C tile[mr, nr] += A[mr, kc] panel[kc, nr]            in mr * nr / lanes registers
                    behind the last k of the last matmul: C tiles -> bias, activation, residual -> output

Strips of rows are as equal as they can be (mr + 1 rows are two halves, not mr and one), each with a micro-kernel of its
height, so nothing is read or written out of bounds, and a matmul with one row streams B at memory bandwidth. Columns
that are left over are zeros of the panel.

Several matmuls (matmul.py) run in one pass over the rows: those of a group have a tile each, and one epilogue;
groups, such as queries, keys and values, are panels of one long row of tasks.

Where B is not stored in panels, small M or N are not worth packing it (gemv.py).

Pairs of bfloat16, where the machine multiplies them, and four bytes, whose matmuls are added up in int32, are words
(words.py): a step along k takes as many values, a panel's elements are words of successive k, and what is missing in
the last one is zeros.
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

from ..reading.matmul import read_groups
from ..reading.selection import read_selection
from ..reading.stages import Stage, read_stages
from ..reading.values import flat_view
from ..variant import Variant
from .blocked import Blocked
from .gemv import GemvTiles, gemv_kernels, is_gemv
from .loops import split_among_threads
from .operands import Operands
from .panels import PanelTiles, is_width
from .results import Results, Values
from .vector import Machine, let, machine, workspace

Plan = list[list[Blocked]]
"""Kernels of the matmuls of each group."""


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Blocked kernels for float matmuls with element-wise stages around them; None for anything else."""
    kernels = plan(func, target)
    if kernels is None:
        return None
    groups, cpu = [group[0].results.group for group in kernels], machine(target)
    tiles = {"panels": kernels[0][0].tiles, "gemv": GemvTiles.default(groups, cpu)}

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        wanted = kernels if tiles["panels"] == kernels[0][0].tiles else plan(func, target, tiles["panels"])
        assert wanted is not None
        return _emit(func, wanted, tiles["gemv"])

    return [Variant("panels", groups, cpu, tiles, emit)]


def plan(func: tirx.PrimFunc, target: tvm.target.Target, tiles: PanelTiles | None = None) -> Plan | None:
    """How `matmul` takes a function, or None where it does not."""
    stages = read_stages(func)
    return plan_stages(func, stages, set(func.params), machine(target), tiles) if stages else None


def plan_stages(
    func: tirx.PrimFunc,
    stages: list[Stage],
    parameters: set[tirx.Buffer],
    cpu: Machine,
    tiles: PanelTiles | None = None,
) -> Plan | None:
    """The same for some of the function's stages, to which tensors that others make or read are parameters, too."""
    groups = read_groups(stages, parameters)
    if not groups:
        return None
    codes = [matmul.codes for group in groups for matmul in group.matmuls if matmul.codes is not None]
    if not all(is_width(c.nr, cpu.lanes("float32")) for c in codes):
        return None
    tiles = tiles or PanelTiles.default(groups, cpu)
    selection = read_selection(groups)
    if selection is not None:
        groups = [selection.apply(group) for group in groups]
    kernels = []
    for group in groups:
        results = Results(func, stages, group, cpu, selection)
        kernels.append([Blocked(Operands(results, matmul), tiles) for matmul in group.matmuls])
    if len(_every(kernels)) > 1 or selection is not None:
        return kernels if _in_one_pass(kernels) else None
    first = kernels[0][0]
    return None if _may_be_gemv(first) and is_gemv(first.operands) else kernels


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether matmuls by other stored matrices may join a function that `matmul` takes; None where it does not."""
    kernels = plan(func, target)
    return None if kernels is None else all(b.b_in_place and not b.matmul.batch for b in _every(kernels))


def _emit(func: tirx.PrimFunc, kernels: Plan, gemv: GemvTiles) -> tirx.PrimFunc:
    operands = kernels[0][0].operands
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        for b in _every(kernels):
            b.operands.open(memory)
        special = gemv_kernels(operands, gemv) if _may_be_gemv(kernels[0][0]) else []
        _first_possible(operands.results, special, lambda: _blocked(kernels))
    return func.with_body(builder.get().body)


def _may_be_gemv(b: Blocked) -> bool:
    """Whether there are other small-M kernels or columns: B is not stored in panels, rows of A lie in memory as
    one, not as patches do, and numbers are no bytes."""
    operands = b.operands
    return not b.b_in_place and b.acc != "int32" and operands.is_linear(operands.a_offset, operands.k)


def _every(kernels: Plan) -> list[Blocked]:
    return [b for group in kernels for b in group]


def _in_one_pass(kernels: Plan) -> bool:
    """Whether several matmuls can be summed up side by side: equal rows, stored panels, as wide within a group."""
    first = kernels[0][0].results
    return all(
        b.b_in_place
        and b.nr == group[0].nr
        and not b.matmul.batch
        and is_int(first.simplify(b.results.rows - first.rows), 0)
        for group in kernels
        for b in group
    )


def _first_possible(
    results: Results, kernels: list[tuple[Expr, Callable[[], None]]], otherwise: Callable[[], None]
) -> None:
    """Writes the kernels, each for when its condition holds and none before it does."""
    if not kernels:
        otherwise()
        return
    (condition, write), *others = kernels
    condition = results.simplify(condition)
    if is_int(condition, 1):
        write()
    elif is_int(condition, 0):
        _first_possible(results, others, otherwise)
    else:
        with T.If(condition):
            with T.Then():
                write()
            with T.Else():
                _first_possible(results, others, otherwise)


def _blocked(kernels: Plan) -> None:
    """The loops of this file's head, for groups of matmuls."""
    every = _every(kernels)
    results = every[0].results
    tiles = every[0].tiles
    panels = [group[0].panels for group in kernels]
    all_panels = sum(panels[1:], panels[0])
    rows, batch = results.rows, results.batch
    most = tirx.const(tiles.mc, "int64")
    if not every[0].b_in_place:  # a panel that is packed serves all rows, where no tile waits for more of k
        alone = tirx.all(every[0].k_blocks <= 1, batch * all_panels >= tiles.many_tasks)
        most = tirx.Select(alone, tirx.max(rows, most), most)
    # Blocks of equal height, so that no thread gets all the short ones.
    row_blocks = let(tirx.max((rows + (most - 1)) // most, 1))
    block_rows = T.bind((rows + (row_blocks * tiles.mr - 1)) // (row_blocks * tiles.mr) * tiles.mr)

    sum_rows = _panel if results.selection is None else _panel_by_runs

    def task(index: Expr) -> None:
        """One panel's columns for one block of rows."""
        panel = let(index % all_panels)
        values = results.in_batch(index // (all_panels * row_blocks))
        first = let(index // all_panels % row_blocks * block_rows)
        height = let(tirx.min(block_rows, rows - first))

        def of(number: int, start: Expr) -> None:
            """In the groups from this number on, whose panels begin at `start`."""
            if number + 1 == len(kernels):
                sum_rows(kernels[number], values, panel - start, first, height, tiles.mc)
                return
            end = start + panels[number]
            with T.If(panel < end):
                with T.Then():
                    sum_rows(kernels[number], values, panel - start, first, height, tiles.mc)
                with T.Else():
                    of(number + 1, end)

        of(0, tirx.const(0, "int64"))

    work = [batch * rows * b.results.columns * b.operands.depth for b in every]
    words = next((b.words for b in every if b.words is not None), None)
    with nullcontext() if words is None else words.using():
        split_among_threads(batch * row_blocks * all_panels, sum(work[1:], work[0]), tiles.parallel_work, task)


def _panel(group: list[Blocked], values: Values, panel: Expr, first: Expr, rows: Expr, most: int) -> None:
    """`sum_panel` in memory of its own."""
    sum_panel(group, values, panel, first, rows, workspace(**panel_memory(group, most)))


def _panel_by_runs(group: list[Blocked], values: Values, panel: Expr, first: Expr, rows: Expr, most: int) -> None:
    """The same where rows choose their matrix: for each run of successive rows that choose the same one."""
    results = group[0].results
    selection = results.selection
    assert selection is not None
    table = group[0].operands.memory[selection.table]
    scratch = workspace(**panel_memory(group, most))
    begin = T.alloc_buffer((1,), "int64")
    T.buffer_store(begin, first, [0])
    with T.serial(rows) as i:
        row = let(first + i)
        following = let(tirx.min(row + 1, results.rows - 1))
        with T.If(tirx.any(i == rows - 1, table[row] != table[following])), T.Then():
            start = let(begin[0])
            chosen = {**values, selection.group: let(selection.nearest(table[row]))}
            sum_panel(group, chosen, panel, start, let(row + 1 - start), scratch)
            T.buffer_store(begin, row + 1, [0])


def panel_memory(group: list[Blocked], most: int) -> dict[str, tuple[int | Expr, str]]:
    """Elements and their type of the memory that `sum_panel` needs for at most so many rows, by name."""
    sizes = {f"tile{n}": most * b.nr for n, b in enumerate(group)}
    for b in group:
        for name, size in b.scratch().items():
            sizes[name] = max(size, sizes.get(name, 0))
    return {name: (size, group[0].acc) for name, size in sizes.items()}


def sum_panel(
    group: list[Blocked], values: Values, panel: Expr, first: Expr, rows: Expr, scratch: dict[str, tirx.Buffer]
) -> None:
    """One panel's columns of a group's matmuls for `rows` rows from `first` on."""
    results, last = group[0].results, group[-1]
    values = {**values, results.panel: let(panel)}
    columns = last.columns_of(values)
    tiles = [scratch[f"tile{n}"] for n in range(len(group))]

    def finish(row: Expr, place: Expr) -> None:
        """A row of the block, whose sums of the last matmul are in row `place` of its tile."""
        sums = [(tile, let((place if b is last else row) * b.nr)) for b, tile in zip(group, tiles)]
        results.store(last.operands.memory, values, sums, let(first + row), last.column, columns)

    for b, tile in zip(group, tiles):
        b.sum_up(values, first, rows, columns, tile, scratch, finish if b is last else None)
