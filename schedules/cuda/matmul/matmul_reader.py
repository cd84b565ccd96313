"""Matmuls as kernels for GPUs read them: the addresses of chunks of A and B, and the epilogues.

Tensor cores take k in steps of 16, or 8 in TF32. Memory delivers a chunk of 16 bytes at a time: eight elements of half
precision, or four of float32. An operand has chunks along k (A of most models, a stored weight) or along its other axis
(B as ONNX stores it); an operand without chunks is copied element by element. Rows of a convolution are patches:
element (m, k) is at start(m) + along(k), which is all that a kernel needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, is_int, substitute, uses
from lowering.tensorir.facts import Facts

from ...half_precision import HALF
from ...reading.matmul import MATMULS, WEIGHTS, MatmulGroup, read_groups
from ...reading.quantized_weights import WeightQuantization
from ...reading.selection import Selection, read_selection
from ...reading.stages import Axis, Stage, count_points, read_stages, unravel
from .tensor_types import TENSOR_TYPES, TensorType

_ZERO = tirx.const(0, "int64")


class Order(Enum):
    """The axis along which chunks of an operand are stored."""

    K = "k"
    OUTER = "rows of A, columns of B"
    NONE = "nothing: elements are copied one by one"


def chunks_per_load(quantized: WeightQuantization | None) -> int:
    """Return the chunks of k in 16 bytes of a row: one of elements, more of quantized values."""
    return 16 // (16 if quantized is None else quantized.bits)


@dataclass(frozen=True)
class MatmulShape:
    """The sizes by which tiles are chosen. Symbolic sizes are None."""

    dtype: str
    """A key of TENSOR_TYPES."""
    batch: int | None
    rows: int | None
    columns: int | None
    depth: int | None
    matmuls: int
    """Matmuls with a common epilogue."""
    chunks: int = 1
    """Chunks of k in 16 bytes of a row of B: more than one where B is quantized."""

    @property
    def type(self) -> TensorType:
        return TENSOR_TYPES[self.dtype]


@dataclass(frozen=True, eq=False)
class Operand:
    """A or B: element k of row (or column) n is buffer[start + along].

    `start` depends on the batch axes and n, `along` on k.
    """

    buffer: tirx.Buffer
    outer: tirx.Var
    k: tirx.Var
    start: Expr
    along: Expr
    order: Order
    condition: Expr | None
    """The run-time condition under which chunks are whole and aligned to 16 bytes; None where it always holds."""
    quantized: WeightQuantization | None = None
    """The quantized matrix: `buffer` has its values, and `start + along` is the number of one."""
    first: Expr = _ZERO
    """The index of its first column among the stored columns, an expression of the batch axes."""


class Matmuls:
    """The matmuls of a function with one A, and free variables: batch axes as themselves, row m and column j.

    `dtype` is the key of TENSOR_TYPES by which they are multiplied. With a selection, rows are those of one matrix.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        stages: list[Stage],
        group: MatmulGroup,
        dtype: str,
        selection: Selection | None = None,
    ) -> None:
        first = group.matmuls[0]
        self.func, self.stages, self.group, self.selection = func, stages, group, selection
        self.dtype, self.chunk = dtype, TENSOR_TYPES[dtype].chunk
        self.facts = Facts.of(func)
        self.m, self.j, self.k = tirx.Var("m", "int64"), first.j.var, first.k.var
        self.batch_axes, self.row_axes = first.batch, first.rows
        self.batch, self.rows = count_points(first.batch), count_points(first.rows)
        self.columns, self.depth = first.j.extent, first.k.extent
        for axis in (*first.batch, Axis(self.m, self.rows), first.j, first.k):
            self.facts.bind(axis.var, 0, axis.extent)
        if selection is not None:
            self.facts.bind(selection.group, 0, T.int64(selection.count))
        self.point = {axis.var: value for axis, value in zip(first.rows, unravel(self.m, first.rows))}

    @property
    def matrices(self) -> tuple[Axis, ...]:
        """The axes by which a matrix of B is chosen: those of the batch, or the group of the selection."""
        selection = self.selection
        return self.batch_axes if selection is None else (Axis(selection.group, T.int64(selection.count)),)

    @property
    def is_selected(self) -> bool:
        """Whether each row, a batch of its own, chooses its matrix by a table."""
        return self.group.matmuls[0].selector is not None

    @property
    def shape(self) -> MatmulShape:
        sizes = (self.batch, self.rows, self.columns, self.depth)
        batch, rows, columns, depth = (size.value if isinstance(size, tirx.IntImm) else None for size in sizes)
        chunks = chunks_per_load(self.group.matmuls[0].quantization)
        return MatmulShape(self.dtype, batch, rows, columns, depth, len(self.group.matmuls), chunks)

    def is_weight(self, b: Operand) -> bool:
        """Return whether no kernel of the model writes B."""
        params = list(self.func.params)
        weights = {params[int(n)] for n in self.func.attrs.get(WEIGHTS, ())}
        buffers = [b.buffer]
        if b.quantized is not None:
            buffers += [load.source for load in (b.quantized.scale, b.quantized.zero) if load is not None]
        return weights.issuperset(buffers)

    def operands(self) -> tuple[Operand, list[Operand]] | None:
        """Return A, and B of each matmul; None where a kernel cannot address their elements."""
        a_operands, b_operands = [], []
        for matmul in self.group.matmuls:
            point = {**self.point, matmul.k.var: self.k}
            indices = ([substitute(index, point) for index in load.indices] for load in (matmul.a, matmul.b))
            a = self._read_operand(matmul.a.source, next(indices), self.m, self.rows)
            if matmul.quantization is None:
                b = self._read_operand(matmul.b.source, next(indices), self.j, self.columns)
            else:
                b = self._read_quantized(matmul.quantization, next(indices)[0])
            if a is None or b is None:
                return None
            a_operands.append(a)
            b_operands.append(b)
        first = a_operands[0]
        shares_a = all(a.buffer.same_as(first.buffer) and _equal(a.start, first.start) for a in a_operands)
        return (first, b_operands) if shares_a else None

    def shares_a(self, own: Operand, other: Matmuls, operand: Operand) -> bool:
        """Return whether two groups multiply the same A, row by row."""
        rows = [(axis.extent, operand.extent) for axis, operand in zip(self.row_axes, other.row_axes)]
        start = substitute(operand.start, {other.m: self.m})
        return (
            own.buffer.same_as(operand.buffer)
            and len(self.row_axes) == len(other.row_axes)
            and all(_equal(*pair) for pair in (*rows, (own.start, start)))
        )

    def _read_operand(self, buffer: tirx.Buffer, indices: list[Expr], outer: tirx.Var, extent: Expr) -> Operand | None:
        simplify, k = self.facts.simplify, self.k
        # By index, because a matmul with a symbolic size prevents cancellation.
        starts = [simplify(substitute(index, {k: tirx.const(0, "int64")})) for index in indices]
        steps = [simplify(index - start) for index, start in zip(indices, starts)]
        along, start = (simplify(flatten_index(buffer.shape, indices_part)) for indices_part in (steps, starts))
        other_variables = {self.m, self.j, *(axis.var for axis in self.batch_axes)}
        if uses(along, other_variables):
            return None
        order, condition = Order.NONE, None
        for candidate, var, size in ((Order.K, k, self.depth), (Order.OUTER, outer, extent)):
            chunk_condition = self._find_chunks(buffer, (starts, steps), var, size)
            if chunk_condition is not None and (order is Order.NONE or chunk_condition is True):
                order, condition = candidate, (None if chunk_condition is True else chunk_condition)
                if chunk_condition is True:
                    break
        return Operand(buffer, outer, k, start, along, order, condition)

    def _read_quantized(self, quantized: WeightQuantization, column: Expr) -> Operand | None:
        """Return quantized values in chunks along k, each with one scale, column after column.

        None for another layout.
        """
        depth = self.depth
        if not isinstance(depth, tirx.IntImm) or quantized.nr != 1 or quantized.depth != depth.value:
            return None
        divides = depth.value % self.chunk == quantized.block % self.chunk == 0
        column = self.facts.simplify(column)
        first = self.facts.simplify(column - self.j)
        if not divides or uses(first, {self.j, self.m}):
            return None
        return Operand(quantized.load.source, self.j, self.k, column * depth, self.k, Order.K, None, quantized, first)

    def _find_chunks(
        self, buffer: tirx.Buffer, components: tuple[list[Expr], list[Expr]], var: tirx.Var, extent: Expr
    ) -> Expr | bool | None:
        """Return whether chunks lie along a variable: always (True), where an expression holds, or never (None)."""
        facts, chunk = self.facts.copy(), self.chunk
        number, inside = tirx.Var("number", "int64"), tirx.Var("inside", "int64")
        facts.bind(number, 0, facts.simplify((extent + (chunk - 1)) // chunk))
        facts.bind(inside, 0, tirx.const(chunk, "int64"))
        first, inside_chunk = (
            {var: facts.simplify(number * chunk + more)} for more in (tirx.const(0, "int64"), inside)
        )
        indices = [a + b for a, b in zip(*components)]
        at, addresses = (
            [facts.simplify(substitute(index, where)) for index in indices] for where in (first, inside_chunk)
        )
        gaps = [facts.simplify(b - a) for a, b in zip(at, addresses)]
        if not _equal(facts.simplify(flatten_index(buffer.shape, gaps)), inside):
            return None
        conditions: list[Expr] = []
        remainder = facts.simplify(extent % chunk)
        # Chunks are provably aligned, or are aligned where the last dimension is a multiple of their size.
        begins = facts.simplify(flatten_index(buffer.shape, at) % chunk)
        if not is_int(begins, 0):
            if not at or not is_int(facts.simplify(at[-1] % chunk), 0):
                return None
            conditions.append(buffer.shape[-1] % chunk)
        conditions.append(remainder)
        unproven = [c for c in conditions if not is_int(c, 0)]
        if any(isinstance(c, tirx.IntImm) for c in unproven):
            return None
        return tirx.all(*(tirx.EQ(c, tirx.const(0, "int64")) for c in unproven)) if unproven else True


def read_matmuls(func: tirx.PrimFunc) -> list[Matmuls] | None:
    """Return each group of matmuls of a function, or None.

    The function consists of groups of matmuls with element-wise stages around them, of half precision, or of float32
    that is to be multiplied as TF32.
    """
    stages = read_stages(func)
    return read_stage_matmuls(func, stages) if stages else None


def read_run_matmuls(func: tirx.PrimFunc) -> list[Matmuls] | None:
    """Return the matmuls of the rows of one matrix, where rows choose their matrices by a table; None for anything
    else.
    """
    stages = read_stages(func)
    groups = read_groups(stages, set(func.params)) if stages else None
    selection = read_selection(groups) if groups else None
    return read_stage_matmuls(func, stages, selection) if stages and selection is not None else None


def read_stage_matmuls(
    func: tirx.PrimFunc, stages: list[Stage], selection: Selection | None = None
) -> list[Matmuls] | None:
    """Return the matmuls of the stages of a function, or of some of them; None for anything else.

    Parameters separate these stages from the others. With a selection, rows are those of one matrix.
    """
    groups = read_groups(stages, set(func.params))
    if not groups:
        return None
    matmuls = [matmul for group in groups for matmul in group.matmuls]
    loads = [load for matmul in matmuls for load in (matmul.a, *(() if matmul.quantization else (matmul.b,)))]
    types = {str(load.ty) for load in loads}
    if types == {"float32"} and MATMULS in func.attrs and not any(matmul.quantization for matmul in matmuls):
        types = {str(func.attrs[MATMULS])}
    elif len(types) > 1 or not types <= set(HALF):
        return None
    if selection is not None:
        groups = [selection.apply(group) for group in groups]
    (dtype,) = types
    return [Matmuls(func, stages, group, dtype, selection) for group in groups]


def _equal(a: Expr, b: Expr) -> bool:
    return bool(prim.expr_deep_equal(a, b))
