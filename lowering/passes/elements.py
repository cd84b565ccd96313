"""Elements of Relax tensors as scalar expressions: what a chain of kernels computes at one point.

After legalization every producer is a TensorIR function that stores a value at every point of its output. Substituting
producers into their readers, point by point, gives an element of the last tensor as one expression; where that stops,
it loads from a tensor that is computed as before: a leaf. No operator is known here, only their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import ir, relax, s_tir, sym, tirx
from tvm.ir import Expr, prim

from ..importing.checks import INDICES, called
from ..tensorir.blocks import read_block
from ..tensorir.expressions import is_int, rewrite, substitute, uses, walk
from ..tensorir.facts import Facts

_MOST_NODES = 4096  # of an expression; sharing is lost in a tree


class NoExpression(Exception):
    """The element is no expression of reasonable size."""


@dataclass(frozen=True, eq=False)
class _Store:
    """buffer[indices] = value for all 0 <= variables < extents."""

    buffer: tirx.Buffer
    extents: dict[tirx.Var, Expr]
    indices: list[Expr]
    value: Expr


class Elements:
    """Elements of the tensors in `main`.

    keep(indices, element) says whether a tensor that could be written out at these indices is a leaf all the same;
    checked(call, indices) is the element of indices whose check has to happen (importing/checks.py), None for a leaf.
    bounds are the ends of the index variables' ranges, which start at 0.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        bindings: Mapping[relax.Var, relax.Expr],
        bounds: Mapping[tirx.Var, Expr],
        keep: Callable[[list[Expr], Expr], bool],
        checked: Callable[[relax.Call, list[Expr]], Expr | None] = lambda *_: None,
    ) -> None:
        self.mod, self.bindings, self.keep, self.checked = mod, bindings, keep, checked
        self.bounds = dict(bounds)
        self.facts = Facts()
        self.analyzer = self.facts.analyzer
        for var, end in bounds.items():
            self._add_size(end)
            self.facts.bind(var, 0, end)
        self.leaves: dict[relax.Expr, tirx.Buffer] = {}
        # By tensor, the elements at the indices that were asked for: who reads a tensor twice does so mostly at one.
        self._found: dict[relax.Expr, list[tuple[list[Expr], Expr]]] = {}

    def at(self, tensor: relax.Expr, indices: list[Expr]) -> Expr:
        """The element of `tensor` at these indices. Raises NoExpression."""
        while isinstance(tensor, relax.Var) and isinstance(self.bindings.get(tensor), relax.Var):
            tensor = self.bindings[tensor]
        indices = [self.simplify(index) for index in indices]
        known = self._found.setdefault(tensor, [])
        for place, element in known:
            if all(prim.expr_deep_equal(a, b) for a, b in zip(place, indices, strict=True)):
                return element
        element = self._produced(tensor, indices)
        if element is None or self.keep(indices, element):
            element = self._leaf(tensor, indices)
        known.append((indices, element))
        return element

    def ends(self, expr: Expr) -> tuple[Expr, Expr] | None:
        """Bounds of an integer expression, by sizes; None for one that depends on data."""
        ranges = {var: sym.IntervalSet(tirx.const(0, "int64"), end - 1) for var, end in self.bounds.items()}
        values = self.analyzer.int_set(expr, ranges)
        if not isinstance(values, sym.IntervalSet):
            return None
        low, high = (self.simplify(end) for end in (values.min_value, values.max_value))
        allowed = {node for end in self.bounds.values() for node in walk(end) if isinstance(node, tirx.Var)}
        free = [v for end in (low, high) for v in tirx.analysis.undefined_vars(end)]
        return (low, high) if all(v in allowed for v in free) and not _loads(low, high) else None

    def simplify(self, expr: Expr) -> Expr:
        """expr with what the bounds of the indices decide."""
        if sum(1 for _ in walk(expr)) > _MOST_NODES:
            raise NoExpression
        return rewrite(self.facts.simplify(expr), self._decide)

    def _decide(self, node: Expr) -> Expr | None:
        """min(j, T - 1) is j, which the analyzer proves but does not find by itself."""
        if not isinstance(node, prim.Min | prim.Max) or str(node.ty) != "int64":
            return None
        a, b = (rewrite(x, self._decide) for x in (node.a, node.b))
        if self.facts.can_prove(a <= b):
            return a if isinstance(node, prim.Min) else b
        if self.facts.can_prove(b <= a):
            return b if isinstance(node, prim.Min) else a
        return type(node)(a, b)  # not None, for which its operands would be looked at again

    def _add_size(self, size: Expr) -> None:
        """Elements exist where sizes are positive."""
        self.facts.add_size(size)
        for node in walk(size):
            if isinstance(node, tirx.Var):
                self.analyzer.bind(node, ir.Range(1, 1 << 40), allow_override=True)

    def _leaf(self, tensor: relax.Expr, indices: list[Expr]) -> Expr:
        if isinstance(tensor, ir.GenericConst) and all(is_int(n, 1) for n in tensor.ty.shape.values):
            return tirx.const(tensor.value.numpy().item(), str(tensor.ty.dtype))
        if tensor not in self.leaves:
            shape = _shape(tensor)
            self.leaves[tensor] = tirx.decl_buffer(shape, str(tensor.ty.dtype), f"table_{len(self.leaves)}")
        buffer = self.leaves[tensor]
        return tirx.BufferLoad(buffer, [self._kept_inside(x, n) for x, n in zip(indices, buffer.shape)])

    def _kept_inside(self, index: Expr, extent: Expr) -> Expr:
        """Both branches of a condition are evaluated: an index that only holds in one of them must do no harm."""
        if self.facts.can_prove(tirx.all(index >= 0, index < extent)):
            return index
        return self.simplify(tirx.max(tirx.min(index, extent - 1), 0))

    def _produced(self, tensor: relax.Expr, indices: list[Expr]) -> Expr | None:
        """The element written out by one step or more; None where the tensor has no readable producer."""
        call = self.bindings.get(tensor) if isinstance(tensor, relax.Var) else None
        if not isinstance(call, relax.Call):
            return None
        if call.op == ir.Op.get("relax.reshape"):
            return self.at(call.args[0], self._reshaped(indices, _shape(tensor), _shape(call.args[0])))
        if called(call) == INDICES:
            return self.checked(call, indices)
        if call.op != ir.Op.get("relax.call_tir"):
            return None
        func = self.mod[call.args[0]]
        stores = _stores(func)
        buffers = [p for p in func.params if tirx.is_buffer_var(p)]
        args = list(call.args[1].fields)
        tensors = [a for a in args if isinstance(a.ty, relax.TensorType)]
        if stores is None or len(buffers) != len(tensors) + 1:
            return None
        sizes = self._sizes(func, args, tensors, _shape(tensor))
        if sizes is None:
            return None
        return self._stored(buffers[-1], indices, stores, dict(zip(buffers, tensors)), sizes)

    def _sizes(
        self, func: tirx.PrimFunc, args: list[relax.Expr], tensors: list[relax.Expr], result: list[Expr]
    ) -> dict[tirx.Var, Expr] | None:
        """What the function's symbols are where it is called."""
        sizes: dict[tirx.Var, Expr] = {}
        buffers = [p for p in func.params if tirx.is_buffer_var(p)]
        for buffer, shape in zip(buffers, [*map(_shape, tensors), result], strict=True):
            for inner, outer in zip(buffer.shape, shape, strict=True):
                if isinstance(inner, tirx.Var):
                    sizes.setdefault(inner, outer)
        scalars = [p for p in func.params if not tirx.is_buffer_var(p)]
        given = [a for a in args if not isinstance(a.ty, relax.TensorType)]
        if len(scalars) != len(given):
            return None
        for size in (*sizes.values(), *given):
            self._add_size(size)
        return {**sizes, **dict(zip(scalars, given))}

    def _stored(
        self,
        buffer: tirx.Buffer,
        indices: list[Expr],
        stores: list[_Store],
        tensors: dict[tirx.Buffer, relax.Expr],
        sizes: dict[tirx.Var, Expr],
    ) -> Expr | None:
        """The element of a buffer of the function: that of the last store which reaches it."""
        element: Expr | None = None
        for store in (s for s in stores if s.buffer.same_as(buffer)):
            place = self._solved(store, indices, sizes)
            if place is None:
                return None
            at, inside = place
            if is_int(inside, 0):
                continue

            def load(node: Expr) -> Expr | None:
                if not isinstance(node, ir.TensorLoad):
                    return None
                where = [rewrite(index, load) for index in node.indices]
                if node.source in tensors:
                    return self.at(tensors[node.source], where)
                inner = self._stored(node.source, where, stores, tensors, sizes)
                if inner is None:
                    raise NoExpression
                return inner

            value = rewrite(substitute(store.value, {**sizes, **at}), load)
            element = value if is_int(inside, 1) or element is None else prim.Select(inside, value, element)
        return None if element is None else self.simplify(_without_branches(element))

    def _solved(
        self, store: _Store, indices: list[Expr], sizes: dict[tirx.Var, Expr]
    ) -> tuple[dict[tirx.Var, Expr], Expr] | None:
        """The store's variables at which it writes these indices, and whether they are in their ranges.

        Variables are kept in their ranges in any case, so that what they index can be read.
        """
        at: dict[tirx.Var, Expr] = {}
        inside: Expr = tirx.const(True, "bool")
        for index, wanted in zip(store.indices, indices, strict=True):
            var, start = index, tirx.const(0, "int64")
            if isinstance(index, prim.Add) and index.a in store.extents:
                var, start = index.a, substitute(index.b, sizes)
            if var in store.extents and var not in at:
                extent = substitute(store.extents[var], sizes)
                place = self.simplify(wanted - start)
                within = self.simplify(tirx.all(place >= 0, place < extent))
                at[var] = place if is_int(within, 1) else self.simplify(tirx.max(tirx.min(place, extent - 1), 0))
            elif isinstance(index, prim.IntImm):
                within = self.simplify(tirx.EQ(wanted, tirx.const(index.value, "int64")))
            else:
                return None
            inside = self.simplify(tirx.all(inside, within))
        return (at, inside) if len(at) == len(store.extents) else None

    def _reshaped(self, indices: list[Expr], shape: list[Expr], source: list[Expr]) -> list[Expr]:
        """The indices in a tensor of shape `source` of the element at `indices` in its reshaped form."""
        several = [(x, n) for x, n in zip(indices, shape) if not is_int(n, 1)]
        wanted = [n for n in source if not is_int(n, 1)]
        if len(several) == len(wanted) and all(
            self.analyzer.can_prove_equal(n, w) for (_, n), w in zip(several, wanted)
        ):
            rest = iter(x for x, _ in several)
            return [tirx.const(0, "int64") if is_int(n, 1) else next(rest) for n in source]
        position: Expr = tirx.const(0, "int64")
        for index, extent in zip(indices, shape):
            position = position * extent + index
        result: list[Expr] = []
        for extent in reversed(source):
            result.append(tirx.floormod(position, extent))
            position = tirx.floordiv(position, extent)
        return result[::-1]


def _loads(*exprs: Expr) -> bool:
    return any(isinstance(node, ir.TensorLoad) for expr in exprs for node in walk(expr))


def _shape(tensor: relax.Expr) -> list[Expr]:
    """Raises NoExpression for tensors whose shape is not known."""
    shape = tensor.ty.shape if isinstance(tensor.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        raise NoExpression
    return list(shape.values)


def _without_branches(expr: Expr) -> Expr:
    """if_then_else as Select: all that is loaded can be."""

    def replace(node: Expr) -> Expr | None:
        if isinstance(node, ir.Call) and node.op == ir.Op.get("prim.if_then_else"):
            return prim.Select(*(rewrite(operand, replace) for operand in node.args))
        return None

    return rewrite(expr, replace)


def _stores(func: tirx.PrimFunc) -> list[_Store] | None:
    """The stores of a function in their order; None if it does anything but data-parallel stores."""
    root = func.body
    if isinstance(root, s_tir.SBlockRealize) and not root.block.match_buffers:
        root = root.block.body
    stores = []
    for nest in tirx.stmt_list(root):
        store = _store(nest)
        if store is None:
            return None
        stores.append(store)
    return stores


def _store(nest: tirx.Stmt) -> _Store | None:
    if isinstance(nest, tirx.BufferStore):  # single numbers, as of a shape
        return _Store(nest.buffer, {}, list(nest.indices), nest.value)
    block = read_block(nest)
    if block is None or block.reduce:
        return None
    if any(isinstance(node, ir.TensorLoad) and node.source.same_as(block.buffer) for node in walk(block.value)):
        return None
    extents, indices = dict(block.spatial), block.indices
    # An axis of one element may be missing from the indices.
    units: dict[tirx.Var, Expr] = {}
    for var, extent in block.spatial.items():
        if is_int(extent, 1) and not any(uses(index, {var}) for index in indices):
            units[var] = tirx.const(0, "int64")
            del extents[var]
    return _Store(block.buffer, extents, indices, substitute(block.value, units))
