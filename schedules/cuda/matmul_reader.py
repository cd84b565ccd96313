"""Matmuls of matrices as kernels for GPUs read them: where chunks of A and B are, and what becomes of the sums.

Tensor cores take k in steps of 16, or 8 in TF32, and memory gives 16 bytes at a time: eight elements of half precision,
or four of float32, a chunk. An operand lies in chunks along k (A of most models, a stored weight) or along its other
axis (B as ONNX writes it); what lies in neither is copied element by element. Rows of a convolution are patches:
element (m, k) is at start(m) + along(k), which is all that a kernel asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int, offset, substitute, uses
from lowering.tensorir.facts import Facts

from ..half_precision import HALF
from ..reading.codes import Codes
from ..reading.matmul import MATMULS, WEIGHTS, Group, read_groups
from ..reading.selection import Selection, read_selection
from ..reading.stages import Axis, Stage, read_stages, unravel, volume
from .tensor_types import TENSOR_TYPES, TensorType

_ZERO = tirx.const(0, "int64")


class Order(Enum):
    """Along what chunks of an operand lie."""

    K = "k"
    OUTER = "rows of A, columns of B"
    NONE = "nothing: elements are copied one by one"


def chunks_at_once(codes: Codes | None) -> int:
    """Return how many chunks of k 16 bytes of a row have: one of elements, more of quantized values."""
    return 16 // (16 if codes is None else codes.bits)


@dataclass(frozen=True)
class Shape:
    """What tiles are chosen by. Sizes that are symbolic are None."""

    dtype: str
    """Of TENSOR_TYPES."""
    batch: int | None
    rows: int | None
    columns: int | None
    depth: int | None
    matmuls: int
    """Whose sums are read together."""
    chunks: int = 1
    """Of k in 16 bytes of a row of B: more than one where B is quantized."""

    @property
    def type(self) -> TensorType:
        return TENSOR_TYPES[self.dtype]


@dataclass(frozen=True, eq=False)
class Operand:
    """A or B: element k of row (or column) n is buffer[start + along], start of the batch axes and n, along of k."""

    buffer: tirx.Buffer
    outer: tirx.Var
    k: tirx.Var
    start: Expr
    along: Expr
    order: Order
    condition: Expr | None
    """What must hold at run time for chunks to be whole and at multiples of 16 bytes; None where it always does."""
    codes: Codes | None = None
    """Of a matrix of integers with scales: `buffer` holds its codes, of which `start + along` is a number."""
    first: Expr = _ZERO
    """Of such a matrix: which of the stored columns its first one is, an expression of the batch axes."""


class Matmuls:
    """The matmuls of a function, with one A, and free variables: batch axes as themselves, row m and column j.

    dtype is how they are multiplied, of TENSOR_TYPES. With a selection rows are those of one matrix."""

    def __init__(
        self, func: tirx.PrimFunc, stages: list[Stage], group: Group, dtype: str, selection: Selection | None = None
    ) -> None:
        first = group.matmuls[0]
        self.func, self.stages, self.group, self.selection = func, stages, group, selection
        self.dtype, self.chunk = dtype, TENSOR_TYPES[dtype].chunk
        self.facts = Facts.of(func)
        self.m, self.j, self.k = tirx.Var("m", "int64"), first.j.var, first.k.var
        self.batch_axes, self.row_axes = first.batch, first.rows
        self.batch, self.rows = volume(first.batch), volume(first.rows)
        self.columns, self.depth = first.j.extent, first.k.extent
        for axis in (*first.batch, Axis(self.m, self.rows), first.j, first.k):
            self.facts.bind(axis.var, 0, axis.extent)
        if selection is not None:
            self.facts.bind(selection.group, 0, T.int64(selection.count))
        self.point = {axis.var: value for axis, value in zip(first.rows, unravel(self.m, first.rows))}

    @property
    def matrices(self) -> tuple[Axis, ...]:
        """The axes by which a matrix of B is chosen: those of the batch, or of what a table says."""
        chosen = self.selection
        return self.batch_axes if chosen is None else (Axis(chosen.group, T.int64(chosen.count)),)

    @property
    def is_selected(self) -> bool:
        """Whether each row, a batch of its own, chooses its matrix by a table."""
        return self.group.matmuls[0].selector is not None

    @property
    def shape(self) -> Shape:
        sizes = (self.batch, self.rows, self.columns, self.depth)
        batch, rows, columns, depth = (size.value if isinstance(size, tirx.IntImm) else None for size in sizes)
        chunks = chunks_at_once(self.group.matmuls[0].codes)
        return Shape(self.dtype, batch, rows, columns, depth, len(self.group.matmuls), chunks)

    def is_weight(self, b: Operand) -> bool:
        """Whether no kernel of the model writes B."""
        params = list(self.func.params)
        weights = {params[int(n)] for n in self.func.attrs.get(WEIGHTS, ())}
        parts = [b.buffer]
        if b.codes is not None:
            parts += [load.source for load in (b.codes.scale, b.codes.zero) if load is not None]
        return weights.issuperset(parts)

    def operands(self) -> tuple[Operand, list[Operand]] | None:
        """A, and B of each matmul; None where elements are not where a kernel could find them."""
        ours, theirs = [], []
        for matmul in self.group.matmuls:
            point = {**self.point, matmul.k.var: self.k}
            places = ([substitute(index, point) for index in load.indices] for load in (matmul.a, matmul.b))
            a = self._operand(matmul.a.source, next(places), self.m, self.rows)
            if matmul.codes is None:
                b = self._operand(matmul.b.source, next(places), self.j, self.columns)
            else:
                b = self._codes(matmul.codes, next(places)[0])
            if a is None or b is None:
                return None
            ours.append(a)
            theirs.append(b)
        first = ours[0]
        same = all(a.buffer.same_as(first.buffer) and _equal(a.start, first.start) for a in ours)
        return (first, theirs) if same else None

    def same_a(self, ours: Operand, other: Matmuls, theirs: Operand) -> bool:
        """Whether two groups multiply the same A, row by row."""
        rows = [(axis.extent, theirs.extent) for axis, theirs in zip(self.row_axes, other.row_axes)]
        start = substitute(theirs.start, {other.m: self.m})
        return (
            ours.buffer.same_as(theirs.buffer)
            and len(self.row_axes) == len(other.row_axes)
            and all(_equal(*pair) for pair in (*rows, (ours.start, start)))
        )

    def _operand(self, buffer: tirx.Buffer, indices: list[Expr], outer: tirx.Var, extent: Expr) -> Operand | None:
        simplify, k = self.facts.simplify, self.k
        # By index: what is behind a matmul with a symbolic size does not cancel.
        starts = [simplify(substitute(index, {k: tirx.const(0, "int64")})) for index in indices]
        steps = [simplify(index - start) for index, start in zip(indices, starts)]
        along, start = (simplify(offset(buffer.shape, part)) for part in (steps, starts))
        others = {self.m, self.j, *(axis.var for axis in self.batch_axes)}
        if uses(along, others):
            return None
        order, condition = Order.NONE, None
        for candidate, var, size in ((Order.K, k, self.depth), (Order.OUTER, outer, extent)):
            found = self._chunks(buffer, (starts, steps), var, size)
            if found is not None and (order is Order.NONE or found is True):
                order, condition = candidate, (None if found is True else found)
                if found is True:
                    break
        return Operand(buffer, outer, k, start, along, order, condition)

    def _codes(self, codes: Codes, column: Expr) -> Operand | None:
        """Codes that lie in chunks along k, each with one scale, a column behind the other."""
        depth = self.depth
        if not isinstance(depth, tirx.IntImm) or codes.nr != 1 or codes.depth != depth.value:
            return None
        whole = depth.value % self.chunk == codes.block % self.chunk == 0
        column = self.facts.simplify(column)
        first = self.facts.simplify(column - self.j)
        if not whole or uses(first, {self.j, self.m}):
            return None
        return Operand(codes.load.source, self.j, self.k, column * depth, self.k, Order.K, None, codes, first)

    def _chunks(
        self, buffer: tirx.Buffer, parts: tuple[list[Expr], list[Expr]], var: tirx.Var, extent: Expr
    ) -> Expr | bool | None:
        """Whether chunks lie along a variable: always, where an expression holds, or never (None)."""
        facts, chunk = self.facts.copy(), self.chunk
        number, inside = tirx.Var("number", "int64"), tirx.Var("inside", "int64")
        facts.bind(number, 0, facts.simplify((extent + (chunk - 1)) // chunk))
        facts.bind(inside, 0, tirx.const(chunk, "int64"))
        first, any_of = ({var: facts.simplify(number * chunk + more)} for more in (tirx.const(0, "int64"), inside))
        indices = [a + b for a, b in zip(*parts)]
        at, behind = ([facts.simplify(substitute(index, where)) for index in indices] for where in (first, any_of))
        gaps = [facts.simplify(b - a) for a, b in zip(at, behind)]
        if not _equal(facts.simplify(offset(buffer.shape, gaps)), inside):
            return None
        conditions: list[Expr] = []
        whole = facts.simplify(extent % chunk)
        # Chunks begin at multiples of their size: by what is known, or where the last dimension is such a multiple.
        begins = facts.simplify(offset(buffer.shape, at) % chunk)
        if not is_int(begins, 0):
            if not at or not is_int(facts.simplify(at[-1] % chunk), 0):
                return None
            conditions.append(buffer.shape[-1] % chunk)
        conditions.append(whole)
        left = [c for c in conditions if not is_int(c, 0)]
        if any(isinstance(c, tirx.IntImm) for c in left):
            return None
        return tirx.all(*(tirx.EQ(c, tirx.const(0, "int64")) for c in left)) if left else True


def read_matmuls(func: tirx.PrimFunc) -> list[Matmuls] | None:
    """A function that is groups of matmuls, with element-wise stages around them, of half precision, or of float32
    that it wants multiplied as TF32: each group; or None."""
    stages = read_stages(func)
    return matmuls_of(func, stages) if stages else None


def matmuls_of_runs(func: tirx.PrimFunc) -> list[Matmuls] | None:
    """Where rows choose their matrices by a table, the matmuls of the rows of one matrix."""
    stages = read_stages(func)
    groups = read_groups(stages, set(func.params)) if stages else None
    selection = read_selection(groups) if groups else None
    return matmuls_of(func, stages, selection) if stages and selection is not None else None


def matmuls_of(func: tirx.PrimFunc, stages: list[Stage], selection: Selection | None = None) -> list[Matmuls] | None:
    """Of the stages of a function, or some of them, between which and the others stand parameters. With a selection
    rows are those of one matrix."""
    groups = read_groups(stages, set(func.params))
    if not groups:
        return None
    matmuls = [matmul for group in groups for matmul in group.matmuls]
    loads = [load for matmul in matmuls for load in (matmul.a, *(() if matmul.codes else (matmul.b,)))]
    types = {str(load.ty) for load in loads}
    if types == {"float32"} and MATMULS in func.attrs and not any(matmul.codes for matmul in matmuls):
        types = {str(func.attrs[MATMULS])}
    elif len(types) > 1 or not types <= set(HALF):
        return None
    if selection is not None:
        groups = [selection.apply(group) for group in groups]
    (dtype,) = types
    return [Matmuls(func, stages, group, dtype, selection) for group in groups]


def _equal(a: Expr, b: Expr) -> bool:
    return bool(prim.expr_deep_equal(a, b))
