"""Where intermediate tensors lie: in one block of memory per call, at offsets that are planned here.

Sizes are symbolic, so that "fits" must be proved: they are polynomials of the model's symbols, which are not negative,
and p <= q where no coefficient of q - p is negative. The largest tensor is placed first, each at the smallest offset
that nothing alive at the same time touches (greedy by size: Pisarchyk and Lee, Efficient Memory Management for Deep
Neural Net Inference, 2020). Tensors of one shape at one offset are one view, which is made once per call.

A tensor whose size depends on data lies in a second block, made once that size is known. Outputs, and what a branch may
hand on, have memory of their own.
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

from ..arithmetic import LARGEST_SIZE
from ..tensorir.expressions import Expr, is_int

# Blocks and tensors begin at multiples of this, a cache line.
_ALIGNMENT = 64
# What a symbol is taken for where an order is wanted and none can be proved.
_TYPICAL = 256

# Functions of the runtime: a part of a tensor's memory, and the same part as a tensor without an offset.
_VIEW = "runtime.TVMTensorCreateView"
_FROM_ITS_OFFSET = "vm.builtin.ensure_zero_offset"

# Coefficients by monomial: the sorted numbers of its factors.
Polynomial = dict[tuple[int, ...], int]


def plan_memory(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with the intermediate tensors of each Relax function in planned blocks."""
    kernels = {v for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            body = _Plan(function, kernels).body()
            mod = mod.clone()
            mod[variable] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return mod


class Terms:
    """Sizes as polynomials: of symbols, and of other expressions that are never negative."""

    def __init__(self) -> None:
        self._factors: list[Expr] = []
        self._analyzer = Analyzer()

    def add_symbols(self, symbols: Iterable[Any]) -> None:
        for symbol in symbols:
            self._analyzer.bind(symbol, ir.Range(0, LARGEST_SIZE))

    def polynomial(self, expr: Expr) -> Polynomial | None:
        """None for an expression of which a factor may be negative."""
        if isinstance(expr, prim.IntImm):
            return {(): int(expr.value)} if expr.value else {}
        if isinstance(expr, prim.Add | prim.Sub | prim.Mul):
            a, b = self.polynomial(expr.a), self.polynomial(expr.b)
            if a is None or b is None:
                return None
            if isinstance(expr, prim.Mul):
                return prod(a, b)
            return add(a, b, 1 if isinstance(expr, prim.Add) else -1)
        number = next((k for k, f in enumerate(self._factors) if tvm_ffi.structural_equal(f, expr)), None)
        if number is None:
            if not self._analyzer.can_prove(expr >= 0):
                return None
            number = len(self._factors)
            self._factors.append(expr)
        return {(number,): 1}

    def aligned(self, size: Polynomial) -> Polynomial | None:
        """The smallest multiple of the alignment that is at least `size`; None if it may be negative."""
        if all(c % _ALIGNMENT == 0 for c in size.values()):
            return size
        units = self.polynomial(tirx.floordiv(self.expression(size) + (_ALIGNMENT - 1), _ALIGNMENT))
        return units and prod(units, {(): _ALIGNMENT})

    def expression(self, polynomial: Polynomial) -> Expr:
        total: Expr = tirx.const(0, "int64")
        for factors, coefficient in sorted(polynomial.items()):
            term: Expr = tirx.const(coefficient, "int64")
            for factor in factors:
                term = term * self._factors[factor]
            total = total + term
        return self._analyzer.simplify(total)


def add(a: Polynomial, b: Polynomial, sign: int = 1) -> Polynomial:
    """a + sign b"""
    sums = {m: a.get(m, 0) + sign * b.get(m, 0) for m in {*a, *b}}
    return {m: c for m, c in sums.items() if c}


def prod(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            result = add(result, {tuple(sorted((*left, *right))): x * y})
    return result


def at_most(a: Polynomial, b: Polynomial) -> bool:
    """Whether a <= b is proved."""
    return all(c >= 0 for c in add(b, a, -1).values())


def larger(a: Polynomial, b: Polynomial) -> Polynomial:
    """The smallest polynomial that is proved to be at least a and at least b."""
    largest = {m: max(a.get(m, 0), b.get(m, 0)) for m in {*a, *b}}
    return {m: c for m, c in largest.items() if c}


def estimate(polynomial: Polynomial) -> int:
    """Its value for typical symbols."""
    return sum(c * _TYPICAL ** len(m) for m, c in polynomial.items())


@dataclass
class Tensor:
    """A tensor of `size` bytes, `room` when aligned, that is alive from binding `first` to `last`; placed at offset."""

    first: int
    last: int
    size: Polynomial
    room: Polynomial
    offset: Polynomial | None = None

    def end(self) -> Polynomial:
        return add(self.offset or {}, self.room)

    def ends_before(self, position: Polynomial) -> bool:
        """Whether that is proved; `position` is a multiple of the alignment."""
        return at_most(self.end(), position) or at_most(add(self.offset or {}, self.size), position)


def top(tensors: Iterable[Tensor]) -> Polynomial:
    """A multiple of the alignment behind which none of the placed tensors reaches."""
    height: Polynomial = {}
    for tensor in sorted(tensors, key=lambda t: -estimate(t.end())):
        if not tensor.ends_before(height):
            height = larger(height, tensor.end())
    return height


def place(tensors: Sequence[Tensor]) -> None:
    """Gives every tensor an offset, so that no two that are alive at the same time overlap.

    Polynomials are rows of arrays here, with a column for each monomial: every tensor is compared with all that are
    placed, of which wide models keep thousands alive at once.
    """
    ordered = sorted(tensors, key=lambda t: (-estimate(t.room), t.first))
    columns = {m: k for k, m in enumerate(sorted({m for t in ordered for m in (*t.size, *t.room)}))}
    typical = np.array([float(_TYPICAL) ** len(m) for m in columns])
    # No offset is larger than all tensors beside each other. Such numbers are no sizes, but must not wrap.
    total = sum(abs(c) for t in ordered for c in (*t.size.values(), *t.room.values()))
    kind: Any = np.int64 if total < 1 << 62 else object

    def rows(polynomials: Sequence[Polynomial]) -> np.ndarray:
        result = np.zeros((len(polynomials), len(columns)), kind)
        for row, polynomial in zip(result, polynomials):
            for monomial, coefficient in polynomial.items():
                row[columns[monomial]] = coefficient
        return result

    sizes, rooms = rows([t.size for t in ordered]), rows([t.room for t in ordered])
    offsets = np.zeros_like(rooms)
    first, last = np.array([t.first for t in ordered]), np.array([t.last for t in ordered])
    for k, tensor in enumerate(ordered):
        others = np.flatnonzero((first[:k] <= tensor.last) & (tensor.first <= last[:k]))
        start = _lowest(sizes[k], offsets[others], sizes[others], rooms[others], typical)
        if start is None:
            start = rows([top([ordered[o] for o in others])])[0]
        offsets[k] = start
        tensor.offset = {m: int(start[column]) for m, column in columns.items() if start[column]}


def _lowest(
    size: np.ndarray, begins: np.ndarray, sizes: np.ndarray, rooms: np.ndarray, typical: np.ndarray
) -> np.ndarray | None:
    """The lowest start, 0 or an end of another tensor, that is proved to leave a tensor apart from all others."""
    ends, used = begins + rooms, begins + sizes
    starts = np.concatenate([np.zeros((1, len(size)), begins.dtype), ends])
    starts = starts[np.argsort((starts @ typical).astype(float), kind="stable")]
    # What is proved holds for typical symbols, too, which tell what is below a start and what above. Then no
    # coefficient may be in the way. That leaves few starts to prove.
    at, begin = (starts @ typical).astype(float), (begins @ typical).astype(float)
    reach, length = np.minimum(ends @ typical, used @ typical).astype(float), float(size @ typical)
    order = np.argsort(begin)
    below = np.searchsorted(begin[order], at + length)  # so many of the others, by where they begin
    possible = _running(np.maximum, reach[order], [-np.inf])[below] <= at
    if length > 0:  # nothing is both below and above
        lowest = _running(np.maximum, np.minimum(ends, used)[order], starts.min(0, keepdims=True))[below]
        highest = _running(np.minimum, begins[order[::-1]], (starts + size).max(0, keepdims=True))[::-1][below]
        possible &= (lowest <= starts).all(1) & (starts + size <= highest).all(1)
    for start in starts[possible]:
        apart = (ends <= start).all(1) | (used <= start).all(1) | (start + size <= begins).all(1)
        if apart.all():
            return start
    return None


def _running(extreme: np.ufunc, rows: np.ndarray, of_none: Any) -> np.ndarray:
    """The extremes of the first 0, 1, 2, ... rows."""
    return extreme.accumulate(np.concatenate([of_none, rows]))


class _Plan:
    """One function: its bindings, what of its tensors can be planned, and the bindings that replace their making."""

    def __init__(self, function: relax.Function, kernels: set[Any]) -> None:
        self._function = function
        self._kernels = kernels
        self._bindings = [b for block in function.body.blocks for b in block.bindings]
        self._terms = Terms()
        # By symbol: the binding that defines it, -1 for the function's parameters.
        self._known: dict[Any, int] = {}
        for parameter in function.params:
            self._define(parameter.ty, -1)
        for k, binding in enumerate(self._bindings):
            if isinstance(binding, relax.MatchCast):
                self._define(binding.var.ty, k)
        self._tensors = self._planned()
        self._views: dict[tuple, list[tuple[Any, Any]]] = {}

    def body(self) -> relax.SeqExpr:
        """The function's body with the tensors in blocks, one for all tensors whose sizes are known at once."""
        blocks: dict[int, list[Tensor]] = {}
        for k, tensor in self._tensors.items():
            blocks.setdefault(self._known_at(k), []).append(tensor)
        for tensors in blocks.values():
            place(tensors)
        made: dict[int, Any] = {}
        result: list[Any] = []
        for k, binding in enumerate(self._bindings):
            if k not in self._tensors:
                result.append(binding)
                continue
            at = self._known_at(k)
            if at not in made:
                size = self._terms.expression(top(blocks[at]))
                block = relax.op.builtin.alloc_tensor(relax.ShapeExpr([size]), "uint8", 0)
                made[at] = relax.Var(f"block{len(made)}", relax.TensorType([size], "uint8"))
                result.append(relax.VarBinding(made[at], block))
            result += self._view(binding, made[at], at, self._tensors[k])
        return relax.SeqExpr([relax.BindingBlock(result)], self._function.body.body)

    def _define(self, kind: Any, position: int) -> None:
        symbols = [s for s in relax.analysis.definable_tir_vars_in_type(kind) if s not in self._known]
        self._known.update(dict.fromkeys(symbols, position))
        self._terms.add_symbols(symbols)

    def _known_at(self, k: int) -> int:
        """The binding after which the size of the tensor that binding k makes is known."""
        return max((self._known[s] for s in relax.analysis.tir_vars_in_type(self._bindings[k].var.ty)), default=-1)

    def _planned(self) -> dict[int, Tensor]:
        """By the binding that makes it, every tensor that no one can reach after its last reader."""
        owners: dict[Any, set[int]] = {}  # the tensors whose memory a variable may be
        last: dict[int, int] = {}
        for k, binding in enumerate(self._bindings):
            if _is_allocation(binding.value):
                owners[binding.var] = {k}
                last[k] = k
                continue
            used = self._used(binding.value, owners)
            last.update(dict.fromkeys(used, k))
            if not self._is_kernel(binding.value):
                owners[binding.var] = used
        kept = self._used(self._function.body.body, owners)
        planned = {}
        for k in last.keys() - kept:
            size = self._terms.polynomial(_bytes(self._bindings[k].value))
            room = None if size is None else self._terms.aligned(size)
            if size is not None and room is not None:
                planned[k] = Tensor(k, last[k], size, room)
        return dict(sorted(planned.items()))

    @staticmethod
    def _used(expr: Any, owners: dict[Any, set[int]]) -> set[int]:
        return {k for v in relax.analysis.free_vars(expr) for k in owners.get(v, ())}

    def _is_kernel(self, value: Any) -> bool:
        return isinstance(value, relax.Call) and value.op in self._kernels

    def _view(self, binding: Any, block: Any, at: int, tensor: Tensor) -> list[Any]:
        """Bindings that give the tensor's variable its memory."""
        shape, dtype, *_ = binding.value.args
        assert tensor.offset is not None
        known = self._views.setdefault((at, frozenset(tensor.offset.items()), str(dtype)), [])
        for other, variable in known:
            if tvm_ffi.structural_equal(other, shape):
                return [relax.VarBinding(binding.var, variable)]
        known.append((shape, binding.var))
        offset = self._terms.expression(tensor.offset)
        kind = binding.var.ty
        view = relax.Call(relax.ExternFunc(_VIEW), [block, shape, dtype, offset], ty_args=[kind])
        if is_int(offset, 0):
            return [relax.VarBinding(binding.var, view)]
        # Kernels take tensors that begin where their memory does.
        inside = relax.Var(f"{binding.var.name}_inside", kind)
        moved = relax.Call(relax.ExternFunc(_FROM_ITS_OFFSET), [inside], ty_args=[kind])
        return [relax.VarBinding(inside, view), relax.VarBinding(binding.var, moved)]


def _is_allocation(value: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.builtin.alloc_tensor"


def _bytes(allocation: Any) -> Expr:
    shape, dtype, *_ = allocation.args
    return math.prod(shape.values, start=tirx.const(max(1, DataType(dtype.value).bits // 8), "int64"))
