"""Elements of Relax tensors as scalar expressions: the computation of a chain of kernels at one point.

After legalization every producer is a TensorIR function that stores a value at every point of its output. Substituting
producers into their readers, point by point, gives an element of the last tensor as one expression. Where that stops,
the expression loads from a tensor that is computed as before: a leaf. The pass depends on kernels only, not on
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tvm
from tvm import ir, relax, s_tir, sym, tirx
from tvm.ir import Expr, prim

from ...importing.checks import INDICES, read_callee_name
from ...tensorir.blocks import read_block
from ...tensorir.expressions import is_int, rewrite, substitute, uses, walk
from ...tensorir.facts import Facts

_MAX_NODES = 4096  # of an expression; sharing is lost in a tree


class NoExpressionError(Exception):
    """The element cannot be expressed in reasonable size."""


@dataclass(frozen=True, eq=False)
class _Store:
    """buffer[indices] = value for all 0 <= variables < extents."""

    buffer: tirx.Buffer
    extents: dict[tirx.Var, Expr]
    indices: list[Expr]
    value: Expr


class ElementExpressions:
    """Elements of the tensors in `main`.

    is_leaf(indices, element) tells whether a tensor that could be expressed at these indices is a leaf nevertheless.
    check(call, indices) is the element of indices that must be checked (importing/checks.py), None for a leaf. bounds
    are the ends of the index variables' ranges, which start at 0.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        bindings: Mapping[relax.Var, relax.Expr],
        bounds: Mapping[tirx.Var, Expr],
        is_leaf: Callable[[list[Expr], Expr], bool],
        check: Callable[[relax.Call, list[Expr]], Expr | None] = lambda *_: None,
    ) -> None:
        self.mod, self.bindings, self.is_leaf, self.check = mod, bindings, is_leaf, check
        self.bounds = dict(bounds)
        self.facts = Facts()
        self.analyzer = self.facts.analyzer
        for var, end in bounds.items():
            self._add_size(end)
            self.facts.bind(var, 0, end)
        self.leaves: dict[relax.Expr, tirx.Buffer] = {}
        # By tensor, the elements read so far: a reader that reads a tensor twice mostly does so at the same indices.
        self._cache: dict[relax.Expr, list[tuple[list[Expr], Expr]]] = {}

    def read_element(self, tensor: relax.Expr, indices: list[Expr]) -> Expr:
        """Return the element of `tensor` at these indices. Raise NoExpressionError."""
        while isinstance(tensor, relax.Var) and isinstance(self.bindings.get(tensor), relax.Var):
            tensor = self.bindings[tensor]
        indices = [self.simplify(index) for index in indices]
        cached = self._cache.setdefault(tensor, [])
        for cached_indices, element in cached:
            if all(prim.expr_deep_equal(a, b) for a, b in zip(cached_indices, indices, strict=True)):
                return element
        element = self._produced(tensor, indices)
        if element is None or self.is_leaf(indices, element):
            element = self._load_leaf(tensor, indices)
        cached.append((indices, element))
        return element

    def find_bounds(self, expr: Expr) -> tuple[Expr, Expr] | None:
        """Return bounds of an integer expression, in terms of sizes; None for one that depends on data."""
        ranges = {var: sym.IntervalSet(tirx.const(0, "int64"), end - 1) for var, end in self.bounds.items()}
        values = self.analyzer.int_set(expr, ranges)
        if not isinstance(values, sym.IntervalSet):
            return None
        low, high = (self.simplify(end) for end in (values.min_value, values.max_value))
        allowed = {node for end in self.bounds.values() for node in walk(end) if isinstance(node, tirx.Var)}
        free = [v for end in (low, high) for v in tirx.analysis.undefined_vars(end)]
        return (low, high) if all(v in allowed for v in free) and not _has_loads(low, high) else None

    def simplify(self, expr: Expr) -> Expr:
        """Return expr simplified by the bounds of the indices."""
        if sum(1 for _ in walk(expr)) > _MAX_NODES:
            raise NoExpressionError
        return rewrite(self.facts.simplify(expr), self._decide)

    def _decide(self, node: Expr) -> Expr | None:
        """Simplify min(j, T - 1) to j, for instance, which the analyzer proves but does not find by itself."""
        if not isinstance(node, prim.Min | prim.Max) or str(node.ty) != "int64":
            return None
        a, b = (rewrite(x, self._decide) for x in (node.a, node.b))
        if self.facts.can_prove(a <= b):
            return a if isinstance(node, prim.Min) else b
        if self.facts.can_prove(b <= a):
            return b if isinstance(node, prim.Min) else a
        return type(node)(a, b)  # not None, which would make rewrite() visit its operands again

    def _add_size(self, size: Expr) -> None:
        """Record that sizes are positive, since elements exist only then."""
        self.facts.add_size(size)
        for node in walk(size):
            if isinstance(node, tirx.Var):
                self.analyzer.bind(node, ir.Range(1, 1 << 40), allow_override=True)

    def _load_leaf(self, tensor: relax.Expr, indices: list[Expr]) -> Expr:
        if isinstance(tensor, ir.GenericConst) and all(is_int(n, 1) for n in tensor.ty.shape.values):
            return tirx.const(tensor.value.numpy().item(), str(tensor.ty.dtype))
        if tensor not in self.leaves:
            shape = _get_shape(tensor)
            self.leaves[tensor] = tirx.decl_buffer(shape, str(tensor.ty.dtype), f"table_{len(self.leaves)}")
        buffer = self.leaves[tensor]
        return tirx.BufferLoad(buffer, [self._clamp_index(x, n) for x, n in zip(indices, buffer.shape)])

    def _clamp_index(self, index: Expr, extent: Expr) -> Expr:
        """Return an index that is safe to load, since both branches of a condition are evaluated."""
        if self.facts.can_prove(tirx.all(index >= 0, index < extent)):
            return index
        return self.simplify(tirx.max(tirx.min(index, extent - 1), 0))

    def _produced(self, tensor: relax.Expr, indices: list[Expr]) -> Expr | None:
        """Return the element expressed by one or more steps; None if the tensor has no readable producer."""
        call = self.bindings.get(tensor) if isinstance(tensor, relax.Var) else None
        if not isinstance(call, relax.Call):
            return None
        if call.op == ir.Op.get("relax.reshape"):
            return self.read_element(
                call.args[0], self._map_reshaped_indices(indices, _get_shape(tensor), _get_shape(call.args[0]))
            )
        if read_callee_name(call) == INDICES:
            return self.check(call, indices)
        if call.op != ir.Op.get("relax.call_tir"):
            return None
        func = self.mod[call.args[0]]
        stores = _read_stores(func)
        buffers = [p for p in func.params if tirx.is_buffer_var(p)]
        args = list(call.args[1].fields)
        tensors = [a for a in args if isinstance(a.ty, relax.TensorType)]
        if stores is None or len(buffers) != len(tensors) + 1:
            return None
        sizes = self._bind_symbols(func, args, tensors, _get_shape(tensor))
        if sizes is None:
            return None
        return self._read_stored(buffers[-1], indices, stores, dict(zip(buffers, tensors)), sizes)

    def _bind_symbols(
        self, func: tirx.PrimFunc, args: list[relax.Expr], tensors: list[relax.Expr], result: list[Expr]
    ) -> dict[tirx.Var, Expr] | None:
        """Return the values of the function's symbols at its call."""
        sizes: dict[tirx.Var, Expr] = {}
        buffers = [p for p in func.params if tirx.is_buffer_var(p)]
        for buffer, shape in zip(buffers, [*map(_get_shape, tensors), result], strict=True):
            for inner, outer in zip(buffer.shape, shape, strict=True):
                if isinstance(inner, tirx.Var):
                    sizes.setdefault(inner, outer)
        scalars = [p for p in func.params if not tirx.is_buffer_var(p)]
        values = [a for a in args if not isinstance(a.ty, relax.TensorType)]
        if len(scalars) != len(values):
            return None
        for size in (*sizes.values(), *values):
            self._add_size(size)
        return {**sizes, **dict(zip(scalars, values))}

    def _read_stored(
        self,
        buffer: tirx.Buffer,
        indices: list[Expr],
        stores: list[_Store],
        tensors: dict[tirx.Buffer, relax.Expr],
        sizes: dict[tirx.Var, Expr],
    ) -> Expr | None:
        """Return the element of a buffer of the function, written by the last store that reaches it."""
        element: Expr | None = None
        for store in (s for s in stores if s.buffer.same_as(buffer)):
            solution = self._solve_indices(store, indices, sizes)
            if solution is None:
                return None
            values, inside = solution
            if is_int(inside, 0):
                continue

            def load(node: Expr) -> Expr | None:
                if not isinstance(node, ir.TensorLoad):
                    return None
                load_indices = [rewrite(index, load) for index in node.indices]
                if node.source in tensors:
                    return self.read_element(tensors[node.source], load_indices)
                inner = self._read_stored(node.source, load_indices, stores, tensors, sizes)
                if inner is None:
                    raise NoExpressionError
                return inner

            value = rewrite(substitute(store.value, {**sizes, **values}), load)
            element = value if is_int(inside, 1) or element is None else prim.Select(inside, value, element)
        return None if element is None else self.simplify(_replace_branches(element))

    def _solve_indices(
        self, store: _Store, indices: list[Expr], sizes: dict[tirx.Var, Expr]
    ) -> tuple[dict[tirx.Var, Expr], Expr] | None:
        """Return the values of the store's variables at which it writes these indices, and whether they are in range.

        Values are clamped to their ranges in any case, so that they are safe to index with.
        """
        values: dict[tirx.Var, Expr] = {}
        inside: Expr = tirx.const(True, "bool")
        for index, target in zip(store.indices, indices, strict=True):
            var, start = index, tirx.const(0, "int64")
            if isinstance(index, prim.Add) and index.a in store.extents:
                var, start = index.a, substitute(index.b, sizes)
            if var in store.extents and var not in values:
                extent = substitute(store.extents[var], sizes)
                position = self.simplify(target - start)
                within = self.simplify(tirx.all(position >= 0, position < extent))
                values[var] = (
                    position if is_int(within, 1) else self.simplify(tirx.max(tirx.min(position, extent - 1), 0))
                )
            elif isinstance(index, prim.IntImm):
                within = self.simplify(tirx.EQ(target, tirx.const(index.value, "int64")))
            else:
                return None
            inside = self.simplify(tirx.all(inside, within))
        return (values, inside) if len(values) == len(store.extents) else None

    def _map_reshaped_indices(self, indices: list[Expr], shape: list[Expr], source: list[Expr]) -> list[Expr]:
        """Return the indices in a tensor of shape `source` of the element at `indices` in its reshaped form."""
        axes = [(x, n) for x, n in zip(indices, shape) if not is_int(n, 1)]
        source_sizes = [n for n in source if not is_int(n, 1)]
        if len(axes) == len(source_sizes) and all(
            self.analyzer.can_prove_equal(n, w) for (_, n), w in zip(axes, source_sizes)
        ):
            remaining = iter(x for x, _ in axes)
            return [tirx.const(0, "int64") if is_int(n, 1) else next(remaining) for n in source]
        position: Expr = tirx.const(0, "int64")
        for index, extent in zip(indices, shape):
            position = position * extent + index
        result: list[Expr] = []
        for extent in reversed(source):
            result.append(tirx.floormod(position, extent))
            position = tirx.floordiv(position, extent)
        return result[::-1]


def _has_loads(*exprs: Expr) -> bool:
    return any(isinstance(node, ir.TensorLoad) for expr in exprs for node in walk(expr))


def _get_shape(tensor: relax.Expr) -> list[Expr]:
    """Return the shape of a tensor; raise NoExpressionError if Relax does not know it."""
    shape = tensor.ty.shape if isinstance(tensor.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        raise NoExpressionError
    return list(shape.values)


def _replace_branches(expr: Expr) -> Expr:
    """Replace if_then_else by Select: all loads are safe."""

    def replace(node: Expr) -> Expr | None:
        if isinstance(node, ir.Call) and node.op == ir.Op.get("prim.if_then_else"):
            return prim.Select(*(rewrite(operand, replace) for operand in node.args))
        return None

    return rewrite(expr, replace)


def _read_stores(func: tirx.PrimFunc) -> list[_Store] | None:
    """Return the stores of a function in order; None if it does anything but data-parallel stores."""
    root = func.body
    if isinstance(root, s_tir.SBlockRealize) and not root.block.match_buffers:
        root = root.block.body
    stores = []
    for nest in tirx.stmt_list(root):
        store = _read_store(nest)
        if store is None:
            return None
        stores.append(store)
    return stores


def _read_store(nest: tirx.Stmt) -> _Store | None:
    if isinstance(nest, tirx.BufferStore):  # single numbers, such as those of a shape
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
