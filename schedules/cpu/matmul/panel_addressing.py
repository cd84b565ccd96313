"""Addressing of a matmul by panels of B: offsets of A and B, steps along k, packed lanes, and runs.

A step's offsets are expressions that `bind_offset` evaluates in a task. B is addressed in place if it is stored in
panels, else as a matrix from which the kernel packs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, is_int, substitute, uses
from lowering.tensorir.facts import Facts

from ...reading.quantized_weights import NIBBLES
from ...reading.stages import Axis
from ...reading.values import load_widened
from ..primitives.vector import let
from .int8_rows import choose_row_block
from .operands import MatmulOperands
from .packed_lanes import PackedLanes, choose_packing
from .panels import PanelTiles, is_panel_width
from .results import Values
from .runs import StrideRuns, find_runs


class PanelAddressing:
    """The offsets of A and B of a matmul C = A B that is blocked into panels of B.

    The free variables of the offsets are: batch axes as themselves, row m of M, step k, and column c of a panel. A step
    is `k_per_lane` values of k, one or those of a packed lane (packed_lanes.py); each has its own offset. Panels have
    nr columns. Elements of a row of A have a constant stride, over all steps or within runs of them. Runs arise, for
    example, in the rows of a convolution's window.
    """

    def __init__(self, operands: MatmulOperands, tiles: PanelTiles) -> None:
        self.tiles, self.lanes, self.acc = tiles, operands.results.lanes, operands.matmul.acc
        self.operands, self.matmul, self.results = operands, operands.matmul, operands.results
        self.cpu = self.results.cpu
        self.values: Values = {}
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
        self.kc, self.streamed_kc = self.tiles.kc, self.tiles.streamed_kc
        if matmul.quantization is not None:
            self.nr, self.is_b_in_place, block = matmul.quantization.nr, True, matmul.quantization.block
            unit = block or (choose_row_block(block, self.cpu) if matmul.quantization.form.quads else NIBBLES)
            self.kc, self.streamed_kc, self.dequantized_kc = (
                max(kc // unit, 1) * unit for kc in (self.kc, self.streamed_kc, self.tiles.dequantized_kc)
            )
            if not block:  # a column's scale is applied after the shorter of both lengths, which must divide the other
                shorter = min(self.kc, self.streamed_kc)
                self.kc, self.streamed_kc = (kc // shorter * shorter for kc in (self.kc, self.streamed_kc))
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

    def bind_offset(self, position: Expr, **where: Expr) -> Expr:
        """Return an offset of A or B in this task, at m, k or c."""
        names = {"m": self.results.m, "c": self.results.c, "k": self.k.var}
        return substitute(
            position,
            {**self.values, **{names[name]: value for name, value in where.items()}},
        )

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
