"""Memory planning: intermediate tensors are placed in one block per call, at offsets planned here.

Sizes are symbolic, so "fits" must be proved. They are polynomials of the model's symbols, which are not negative, and p
<= q if no coefficient of q - p is negative. The largest tensor is placed first, each at the smallest offset that no
tensor live at the same time overlaps (greedy by size: Pisarchyk and Lee, Efficient Memory Management for Deep Neural
Net Inference, 2020). Tensors of one shape at one offset are one view, which is created once per call.

A tensor whose size depends on data is in a second block, allocated when the size is computed. Outputs, and tensors that
a branch may pass on, have separate memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import DataType, ir, relax, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from ...arithmetic import LARGEST_SIZE
from ...tensorir.expressions import Expr, is_int

# Blocks and tensors begin at multiples of this, a cache line.
ALIGNMENT = 64
# The assumed value of a symbol where an order is required and none can be proved.
_TYPICAL = 256

# Functions of the runtime: a slice of a tensor's memory, and the same slice as a tensor without an offset.
VIEW = "runtime.TVMTensorCreateView"
FROM_ITS_OFFSET = "vm.builtin.ensure_zero_offset"

# Coefficients by monomial: the sorted indices of its factors.
Polynomial = dict[tuple[int, ...], int]


def plan_memory(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the intermediate tensors of each Relax function in planned blocks."""
    kernels = {v for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            body = _MemoryPlan(function, kernels).body()
            mod = mod.clone()
            mod[variable] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return mod


class SizePolynomials:
    """Conversion of sizes to polynomials of symbols, and of other expressions that are never negative."""

    def __init__(self) -> None:
        self._factors: list[Expr] = []
        self._analyzer = Analyzer()

    def add_symbols(self, symbols: Iterable[Any]) -> None:
        for symbol in symbols:
            self._analyzer.bind(symbol, ir.Range(0, LARGEST_SIZE))

    def to_polynomial(self, expr: Expr) -> Polynomial | None:
        """Return an expression as a polynomial, None if a factor may be negative."""
        if isinstance(expr, prim.IntImm):
            return {(): int(expr.value)} if expr.value else {}
        if isinstance(expr, prim.Add | prim.Sub | prim.Mul):
            a, b = self.to_polynomial(expr.a), self.to_polynomial(expr.b)
            if a is None or b is None:
                return None
            if isinstance(expr, prim.Mul):
                return multiply_polynomials(a, b)
            return add_polynomials(a, b, 1 if isinstance(expr, prim.Add) else -1)
        number = next((k for k, f in enumerate(self._factors) if tvm_ffi.structural_equal(f, expr)), None)
        if number is None:
            if not self._analyzer.can_prove(expr >= 0):
                return None
            number = len(self._factors)
            self._factors.append(expr)
        return {(number,): 1}

    def align_up(self, size: Polynomial) -> Polynomial | None:
        """Return the smallest multiple of the alignment that is at least `size`; None if it may be negative."""
        if all(c % ALIGNMENT == 0 for c in size.values()):
            return size
        units = self.to_polynomial(tirx.floordiv(self.to_expression(size) + (ALIGNMENT - 1), ALIGNMENT))
        return units and multiply_polynomials(units, {(): ALIGNMENT})

    def to_expression(self, polynomial: Polynomial) -> Expr:
        total: Expr = tirx.const(0, "int64")
        for factors, coefficient in sorted(polynomial.items()):
            term: Expr = tirx.const(coefficient, "int64")
            for factor in factors:
                term = term * self._factors[factor]
            total = total + term
        return self._analyzer.simplify(total)


def add_polynomials(a: Polynomial, b: Polynomial, sign: int = 1) -> Polynomial:
    """Return a + sign b."""
    coefficients = {m: a.get(m, 0) + sign * b.get(m, 0) for m in {*a, *b}}
    return {m: c for m, c in coefficients.items() if c}


def multiply_polynomials(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            result = add_polynomials(result, {tuple(sorted((*left, *right))): x * y})
    return result


def is_at_most(a: Polynomial, b: Polynomial) -> bool:
    """Return whether a <= b provably holds."""
    return all(c >= 0 for c in add_polynomials(b, a, -1).values())


def bound_both(a: Polynomial, b: Polynomial) -> Polynomial:
    """Return the smallest polynomial that is provably at least a and at least b."""
    largest = {m: max(a.get(m, 0), b.get(m, 0)) for m in {*a, *b}}
    return {m: c for m, c in largest.items() if c}


def estimate_size(polynomial: Polynomial) -> int:
    """Return its value for typical symbols."""
    return sum(c * _TYPICAL ** len(m) for m, c in polynomial.items())


@dataclass
class PlannedTensor:
    """A tensor of `size` bytes that is live from binding `first` to `last`; offset is its planned offset."""

    first: int
    last: int
    size: Polynomial
    aligned_size: Polynomial
    offset: Polynomial | None = None

    def end(self) -> Polynomial:
        return add_polynomials(self.offset or {}, self.aligned_size)

    def ends_before(self, position: Polynomial) -> bool:
        """Return whether it provably ends before `position`, a multiple of the alignment."""
        return is_at_most(self.end(), position) or is_at_most(add_polynomials(self.offset or {}, self.size), position)


def find_top(tensors: Iterable[PlannedTensor]) -> Polynomial:
    """Return a multiple of the alignment that none of the placed tensors extends beyond."""
    height: Polynomial = {}
    for tensor in sorted(tensors, key=lambda t: -estimate_size(t.end())):
        if not tensor.ends_before(height):
            height = bound_both(height, tensor.end())
    return height


def place_tensors(tensors: Sequence[PlannedTensor]) -> None:
    """Assign every tensor an offset, so that no two that are live at the same time overlap.

    Polynomials are rows of arrays here, with a column for each monomial: every tensor is compared with all placed ones,
    of which wide models have thousands live at once.
    """
    ordered = sorted(tensors, key=lambda t: (-estimate_size(t.aligned_size), t.first))
    columns = {m: k for k, m in enumerate(sorted({m for t in ordered for m in (*t.size, *t.aligned_size)}))}
    typical = np.array([float(_TYPICAL) ** len(m) for m in columns])
    # No offset is larger than the sum of all tensors. Such numbers are not sizes, but must not wrap.
    total = sum(abs(c) for t in ordered for c in (*t.size.values(), *t.aligned_size.values()))
    kind: Any = np.int64 if total < 1 << 62 else object

    def to_rows(polynomials: Sequence[Polynomial]) -> np.ndarray:
        result = np.zeros((len(polynomials), len(columns)), kind)
        for row, polynomial in zip(result, polynomials):
            for monomial, coefficient in polynomial.items():
                row[columns[monomial]] = coefficient
        return result

    sizes, rooms = to_rows([t.size for t in ordered]), to_rows([t.aligned_size for t in ordered])
    offsets = np.zeros_like(rooms)
    first, last = np.array([t.first for t in ordered]), np.array([t.last for t in ordered])
    for k, tensor in enumerate(ordered):
        live = np.flatnonzero((first[:k] <= tensor.last) & (tensor.first <= last[:k]))
        start = _find_lowest_start(sizes[k], offsets[live], sizes[live], rooms[live], typical)
        if start is None:
            start = to_rows([find_top([ordered[o] for o in live])])[0]
        offsets[k] = start
        tensor.offset = {m: int(start[column]) for m, column in columns.items() if start[column]}


def _find_lowest_start(
    size: np.ndarray, begins: np.ndarray, sizes: np.ndarray, rooms: np.ndarray, typical: np.ndarray
) -> np.ndarray | None:
    """Return the lowest start, 0 or an end of another tensor, that provably does not overlap others; None if none."""
    ends, used = begins + rooms, begins + sizes
    starts = np.concatenate([np.zeros((1, len(size)), begins.dtype), ends])
    starts = starts[np.argsort((starts @ typical).astype(float), kind="stable")]
    # A proof also holds for typical symbols, which tell the tensors below and above a start. Then no coefficient may
    # contradict it. That leaves few starts to prove.
    start_values, begin = (starts @ typical).astype(float), (begins @ typical).astype(float)
    reach, length = np.minimum(ends @ typical, used @ typical).astype(float), float(size @ typical)
    order = np.argsort(begin)
    begin_counts = np.searchsorted(begin[order], start_values + length)  # so many tensors begin below, in order
    possible = _accumulate_extremes(np.maximum, reach[order], [-np.inf])[begin_counts] <= start_values
    if length > 0:  # no tensor is both below and above
        lowest = _accumulate_extremes(np.maximum, np.minimum(ends, used)[order], starts.min(0, keepdims=True))[
            begin_counts
        ]
        highest = _accumulate_extremes(np.minimum, begins[order[::-1]], (starts + size).max(0, keepdims=True))[::-1][
            begin_counts
        ]
        possible &= (lowest <= starts).all(1) & (starts + size <= highest).all(1)
    for start in starts[possible]:
        is_disjoint = (ends <= start).all(1) | (used <= start).all(1) | (start + size <= begins).all(1)
        if is_disjoint.all():
            return start
    return None


def _accumulate_extremes(extreme: np.ufunc, rows: np.ndarray, initial: Any) -> np.ndarray:
    """Return the extremes of the first 0, 1, 2, ... rows."""
    return extreme.accumulate(np.concatenate([initial, rows]))


class _MemoryPlan:
    """The plan of one function: its bindings, its planned tensors, and the bindings that replace their allocation."""

    def __init__(self, function: relax.Function, kernels: set[Any]) -> None:
        self._function = function
        self._kernels = kernels
        self._bindings = [b for block in function.body.blocks for b in block.bindings]
        self._terms = SizePolynomials()
        # By symbol: the binding that defines it, -1 for the function's parameters.
        self._defined_at: dict[Any, int] = {}
        for parameter in function.params:
            self._define(parameter.ty, -1)
        for k, binding in enumerate(self._bindings):
            if isinstance(binding, relax.MatchCast):
                self._define(binding.var.ty, k)
        self._tensors = self._find_planned()
        self._views: dict[tuple, list[tuple[Any, Any]]] = {}

    def body(self) -> relax.SeqExpr:
        """Return the body with tensors in blocks, one for all tensors whose sizes are defined at one point."""
        blocks: dict[int, list[PlannedTensor]] = {}
        for k, tensor in self._tensors.items():
            blocks.setdefault(self._find_definition(k), []).append(tensor)
        for tensors in blocks.values():
            place_tensors(tensors)
        block_vars: dict[int, Any] = {}
        result: list[Any] = []
        for k, binding in enumerate(self._bindings):
            if k not in self._tensors:
                result.append(binding)
                continue
            definition = self._find_definition(k)
            if definition not in block_vars:
                size = self._terms.to_expression(find_top(blocks[definition]))
                block = relax.op.builtin.alloc_tensor(relax.ShapeExpr([size]), "uint8", 0)
                block_vars[definition] = relax.Var(f"block{len(block_vars)}", relax.TensorType([size], "uint8"))
                result.append(relax.VarBinding(block_vars[definition], block))
            result += self._make_view(binding, block_vars[definition], definition, self._tensors[k])
        return relax.SeqExpr([relax.BindingBlock(result)], self._function.body.body)

    def _define(self, kind: Any, position: int) -> None:
        symbols = [s for s in relax.analysis.definable_tir_vars_in_type(kind) if s not in self._defined_at]
        self._defined_at.update(dict.fromkeys(symbols, position))
        self._terms.add_symbols(symbols)

    def _find_definition(self, k: int) -> int:
        """Return the binding after which the size of the tensor allocated by binding k is defined."""
        return max((self._defined_at[s] for s in relax.analysis.tir_vars_in_type(self._bindings[k].var.ty)), default=-1)

    def _find_planned(self) -> dict[int, PlannedTensor]:
        """Return every tensor that cannot be reached after its last reader, by the binding that allocates it."""
        owners: dict[Any, set[int]] = {}  # the tensors whose memory a variable may alias
        last: dict[int, int] = {}
        for k, binding in enumerate(self._bindings):
            if _is_allocation(binding.value):
                owners[binding.var] = {k}
                last[k] = k
                continue
            used = self._find_used(binding.value, owners)
            last.update(dict.fromkeys(used, k))
            if not self._is_kernel(binding.value):
                owners[binding.var] = used
        reachable = self._find_used(self._function.body.body, owners)
        planned = {}
        for k in last.keys() - reachable:
            size = self._terms.to_polynomial(_get_bytes(self._bindings[k].value))
            room = None if size is None else self._terms.align_up(size)
            if size is not None and room is not None:
                planned[k] = PlannedTensor(k, last[k], size, room)
        return dict(sorted(planned.items()))

    @staticmethod
    def _find_used(expr: Any, owners: dict[Any, set[int]]) -> set[int]:
        return {k for v in relax.analysis.free_vars(expr) for k in owners.get(v, ())}

    def _is_kernel(self, value: Any) -> bool:
        return isinstance(value, relax.Call) and value.op in self._kernels

    def _make_view(self, binding: Any, block: Any, definition: int, tensor: PlannedTensor) -> list[Any]:
        """Return the bindings that assign memory to the tensor's variable."""
        shape, dtype, *_ = binding.value.args
        assert tensor.offset is not None
        views = self._views.setdefault((definition, frozenset(tensor.offset.items()), str(dtype)), [])
        for other, variable in views:
            if tvm_ffi.structural_equal(other, shape):
                return [relax.VarBinding(binding.var, variable)]
        views.append((shape, binding.var))
        offset = self._terms.to_expression(tensor.offset)
        kind = binding.var.ty
        view = relax.Call(relax.ExternFunc(VIEW), [block, shape, dtype, offset], ty_args=[kind])
        if is_int(offset, 0):
            return [relax.VarBinding(binding.var, view)]
        # Kernels take tensors without an offset.
        inside = relax.Var(f"{binding.var.name}_inside", kind)
        moved = relax.Call(relax.ExternFunc(FROM_ITS_OFFSET), [inside], ty_args=[kind])
        return [relax.VarBinding(inside, view), relax.VarBinding(binding.var, moved)]


def _is_allocation(value: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.builtin.alloc_tensor"


def _get_bytes(allocation: Any) -> Expr:
    shape, dtype, *_ = allocation.args
    return math.prod(shape.values, start=tirx.const(max(1, DataType(dtype.value).bits // 8), "int64"))
