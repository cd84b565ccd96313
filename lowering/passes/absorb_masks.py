"""Turns masks that are computed in the model into formulas, so that no mask of S x T elements is ever built.

The chain of kernels behind an attention's mask is written out, element by element, over (b, h, i, j)
(lowering/passes/elements.py). What depends on i or on j alone, and what costs more than comparisons, stays a tensor, of
at most S + T elements per head: it is computed before and becomes a table of the formula. A mask with a leaf that needs
both i and j, such as one that is an input of the model, stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, te, tirx
from tvm.ir import Expr, prim

from ..attention.expr.node import PAIR
from ..attention.formula import Formula
from ..attention.plain import plain
from ..attention.problem import ATTRIBUTE, AttentionProblem, Mask
from ..importing.checks import check_condition
from ..importing.values import numpy_dtype
from ..tensorir.expressions import is_function, is_int, offset, rewrite, substitute, uses, walk
from .elements import Elements, NoExpression


def absorb_masks(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with a formula in place of the mask wherever the mask can be written as one.

    What computed the masks is left to the elimination of dead code.
    """
    main = mod["main"]
    bindings = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    builder = relax.BlockBuilder(mod)
    blocks = []
    for block in main.body.blocks:
        kept: list[relax.Binding] = []
        for binding in block.bindings:
            problem = _problem(mod, binding.value)
            absorber = None if problem is None else _Absorber(mod, builder, bindings, binding.value, problem)
            call = None if absorber is None else absorber.call()
            if absorber is None or call is None:
                kept.append(binding)
            else:
                kept += [*absorber.tables, relax.VarBinding(binding.var, builder.normalize(call))]
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind(kept))
    mod = builder.get()
    body = relax.SeqExpr(blocks, main.body.body)
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


def _problem(mod: tvm.IRModule, value: relax.Expr) -> AttentionProblem | None:
    """The problem with a mask tensor that a call solves."""
    if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_tir"):
        return None
    attrs = mod[value.args[0]].attrs
    if attrs is None or ATTRIBUTE not in attrs:
        return None
    problem = AttentionProblem.from_json(attrs[ATTRIBUTE])
    if problem.packed or problem.store.mapped or problem.qk_mode is not None:
        return None
    return problem if isinstance(problem.mask, Mask) else None


class _Absorber:
    """One attention call. `tables` are the bindings that its formula needs in front of it."""

    def __init__(
        self,
        mod: tvm.IRModule,
        builder: relax.BlockBuilder,
        bindings: dict[relax.Var, relax.Expr],
        call: relax.Call,
        problem: AttentionProblem,
    ) -> None:
        assert isinstance(problem.mask, Mask)
        self.builder, self.attention = builder, call
        self.problem, self.record = problem, problem.mask
        args = list(call.args[1].fields)
        names = problem.parameters()
        self.arguments = dict(zip(names, args))
        self.mask = self.arguments["mask"]
        q, k = self.arguments["q"].ty.shape.values, self.arguments["k"].ty.shape.values
        self.S, self.T = q[problem.row_axes.index("t")], k[problem.store.axes.index("t")]
        self.indices = [tirx.Var(name, "int64") for name in PAIR]
        self.keys = self.mask.ty.shape.values[3] if self.record.pad else self.T  # keys behind are hidden
        ends = (q[0], tirx.const(problem.q_heads, "int64"), self.S, self.keys)
        self.elements = Elements(mod, bindings, dict(zip(self.indices, ends)), self.is_leaf, self.checked)
        self.tables: list[relax.Binding] = []
        # By the check that they need, which of its bounds, and how they read: the ends of indices in the formula.
        self.conditions: dict[tuple[Any, ...], tuple[Expr, Expr]] = {}
        # By the check and how they read: indices out of a table that was checked.
        self.looked_up: dict[tuple[relax.Call, str], Expr | None] = {}

    def call(self) -> relax.Call | None:
        """The attention with a formula; None where the mask is none."""
        try:
            value = self.tabulated(_without_half(self.element()))
        except NoExpression:
            return None
        if any(self.over_both(node) for node in walk(value) if isinstance(node, ir.TensorLoad)):
            return None
        tables: dict[relax.Expr, tirx.Buffer] = {}
        value = self.flattened(value, tables)
        if any(is_int(buffer.shape[0], 0) for buffer in tables.values()):
            return None
        known = {*self.indices, *tables.values()}
        sizes = [var for var in tirx.analysis.undefined_vars(value) if var not in known]
        short = self.record.pad and not self.elements.analyzer.can_prove_equal(self.keys, self.T)
        tensors = {buffer: tensor for tensor, buffer in tables.items()}
        try:
            formula, read = Formula.of(value, self.indices, sizes, list(tensors), short)
        except ValueError:
            return None
        problem = dataclasses.replace(self.problem, mask=formula)
        given = {**self.arguments, "mask_keys": self.keys}
        given |= {name: self.flat(tensors[x]) if x in tensors else x for name, x in read.items()}
        given["q"] = self.with_conditions(given["q"])
        function = plain(problem).without_attr("global_symbol")
        arguments = [given[name] for name in problem.parameters() if name in given]
        return relax.call_tir(self.builder.add_func(function, "attention"), arguments, self.attention.ty_args[0])

    def flattened(self, value: Expr, tables: dict[relax.Expr, tirx.Buffer]) -> Expr:
        """value with loads from vectors, which are put into `tables`, in place of the leaves."""
        tensors = {buffer: tensor for tensor, buffer in self.elements.leaves.items()}

        def load(node: Expr) -> Expr | None:
            if not isinstance(node, ir.TensorLoad):
                return None
            tensor, shape = tensors[node.source], list(node.source.shape)
            if tensor not in tables:
                tables[tensor] = tirx.decl_buffer([_volume(shape)], node.source.dtype, f"table_{len(tables)}")
            indices = [rewrite(index, load) for index in node.indices]
            return tirx.BufferLoad(tables[tensor], [self.elements.simplify(offset(shape, indices))])

        return rewrite(value, load)

    def flat(self, tensor: relax.Expr) -> relax.Expr:
        """The tensor as a vector."""
        shape = list(tensor.ty.shape.values)
        return (
            tensor
            if len(shape) == 1
            else self.bind(relax.op.reshape(tensor, relax.ShapeExpr([_volume(shape)])), "table")
        )

    def bind(self, value: relax.Expr, name: str) -> relax.Expr:
        value = self.builder.normalize(value)
        variable = relax.DataflowVar(name, value.ty)
        self.tables.append(relax.VarBinding(variable, value))
        return variable

    def element(self) -> Expr:
        """The mask's element, broadcast to (b, h, i, j)."""
        point: list[Expr] = []
        shape = self.mask.ty.shape.values
        for axis, (index, size) in enumerate(zip(self.indices, self.record.dims)):
            broadcast = size == 1 and not (axis == 3 and self.record.pad)
            at = tirx.min(index, shape[axis] - 1) if axis in self.record.broadcasts else index
            point.append(tirx.const(0, "int64") if broadcast else at)
        return self.elements.at(self.mask, point)

    def is_leaf(self, indices: list[Expr], element: Expr) -> bool:
        """Tensors over i or j alone are computed before, unless they are no more than arithmetic with the indices."""
        i, j = self.indices[2:]
        if any(uses(x, {i}) for x in indices) and any(uses(x, {j}) for x in indices):
            return False
        return any(isinstance(node, ir.TensorLoad) for node in walk(element)) or _costly(element)

    def checked(self, call: relax.Call, indices: list[Expr]) -> Expr | None:
        """An element of checked indices. Those that depend on positions alone are checked by their bounds, before the
        attention; of those that depend on the distance j - i a table is checked. Others over both i and j stay a
        tensor, and with it the mask."""
        value = self.elements.at(call.args[1], indices)
        bounds = call.args[2].values
        which = indices[-1] if len(bounds) > 1 else tirx.const(0, "int64")
        ends = self.elements.ends(value)
        if ends is not None and isinstance(which, prim.IntImm):
            self.conditions[(call, int(which), *map(str, ends))] = ends
            return value
        i, j = self.indices[2:]
        if not any(uses(x, {i}) for x in indices) or not any(uses(x, {j}) for x in indices):
            return None
        key = call, str(value)
        if key not in self.looked_up:
            self.looked_up[key] = self.by_distance(value, call)
        return self.looked_up[key]

    def with_conditions(self, tensor: relax.Expr) -> relax.Expr:
        """The tensor, given back where the indices that are in the formula are inside."""
        nothing = [size.equal(0) for size in self.elements.bounds.values()]
        for (call, which, *_), (low, high) in self.conditions.items():
            bound, from_the_back = call.args[2].values[which], int(call.args[3])
            inside = tirx.all(low >= (-bound if from_the_back else 0), high < bound)
            if self.elements.analyzer.can_prove(inside):
                continue
            name, bounded = (str(argument.value) for argument in call.args[4:6])
            text = f"{name} holds {{}} to {{}}, and {bounded.splitlines()[which]} is {{}}."
            check = check_condition(tensor, tirx.any(inside, *nothing), text, [low, high, bound])
            tensor = self.bind(check, "checked")
        return tensor

    def over_both(self, load: ir.TensorLoad) -> bool:
        """Whether a load needs i in one dimension and j in another: then its tensor is as large as the mask."""
        i, j = self.indices[2:]
        rows = {k for k, x in enumerate(load.indices) if uses(x, {i})}
        columns = {k for k, x in enumerate(load.indices) if uses(x, {j})}
        return bool(rows and columns and len(rows | columns) > 1)

    # What is worth a table.

    def tabulated(self, value: Expr) -> Expr:
        """value with costly parts that depend on j - i, or on one of them, looked up in tables made before."""
        if not _costly(value):
            return value
        i, j = self.indices[2:]
        d = tirx.Var("d", "int64")
        if uses(value, {i}) and uses(value, {j}):
            table = self.by_distance(value)
            if table is not None:
                return table
            return rewrite(value, lambda node: None if node is value else self.tabulated(node))
        if uses(value, {j}):
            return self.table(substitute(value, {j: d}), d, self.keys, j, 0)
        return self.table(substitute(value, {i: d}), d, self.S, i, 0)

    def by_distance(self, value: Expr, check: relax.Call | None = None) -> Expr | None:
        """value from a table over j - i; None if it depends on more than that of i and j."""
        i, j = self.indices[2:]
        d = tirx.Var("d", "int64")
        of_distance = self.elements.analyzer.simplify(substitute(value, {j: i + d}))
        if uses(of_distance, {i}):
            return None
        first = 1 - self.S
        return self.table(of_distance, d, self.S + self.keys - 1, j - i - first, first, check)

    def table(
        self,
        value: Expr,
        d: tirx.Var,
        extent: Expr,
        index: Expr,
        first: Expr | int,
        check: relax.Call | None = None,
    ) -> Expr:
        """An element of a new table with those of `value` for first <= d < first + extent, at d = first + index.

        check: the check that the table goes through.
        """
        b, h = self.indices[:2]
        q = self.arguments["q"].ty.shape.values
        leading = [(var, size) for var, size in ((b, q[0]), (h, self.problem.q_heads)) if uses(value, {var})]
        shape = [*(size for _, size in leading), extent if uses(value, {d}) else 1]
        loaded = {node.source for node in walk(value) if isinstance(node, ir.TensorLoad)}
        leaves = [(tensor, buffer) for tensor, buffer in self.elements.leaves.items() if buffer in loaded]

        def compute(*tensors: te.Tensor) -> te.Tensor:
            sources = dict(zip((buffer for _, buffer in leaves), tensors))

            def load(node: Expr) -> Expr | None:
                if isinstance(node, ir.TensorLoad):
                    return sources[node.source](*(rewrite(index, load) for index in node.indices))
                return None

            def element(*point: Expr) -> Expr:
                at = {**dict(zip((var for var, _ in leading), point)), d: point[-1] + first}
                return rewrite(substitute(value, at), load)

            return te.compute(shape, element, name="mask_table")

        call = self.builder.call_te(compute, *(tensor for tensor, _ in leaves), primfunc_name_hint="mask_table")
        variable = self.bind(call, "mask_table")
        if check is not None:
            again = relax.op.call_pure_packed(check.args[0], variable, *check.args[2:], ty_args=variable.ty)
            variable = self.bind(again, "checked_table")
        buffer = tirx.decl_buffer([tirx.convert(n) for n in shape], str(value.ty), f"table_{len(self.elements.leaves)}")
        self.elements.leaves[variable] = buffer
        return tirx.BufferLoad(
            buffer, [*(var for var, _ in leading), index if uses(value, {d}) else tirx.const(0, "int64")]
        )


def _volume(shape: list[Expr]) -> Expr:
    return functools.reduce(operator.mul, shape, tirx.const(1, "int64"))


def _costly(value: Expr) -> bool:
    """Whether an element costs more than comparisons and sums: functions, quotients, chained look-ups."""
    for node in walk(value):
        if is_function(node) or isinstance(node, prim.Div | prim.FloorDiv | prim.FloorMod | prim.Mod):
            return True
        if isinstance(node, ir.TensorLoad) and any(isinstance(n, ir.TensorLoad) for x in node.indices for n in walk(x)):
            return True
    return False


def _without_half(value: Expr) -> Expr:
    """Arithmetic in float32 instead of half precision; constants are rounded as the model says."""

    def replace(node: Expr) -> Expr | None:
        if isinstance(node, prim.FloatImm) and str(node.ty) in ("float16", "bfloat16"):
            return tirx.const(node.value, "float32")
        if isinstance(node, ir.TensorLoad) and str(node.ty) in ("float16", "bfloat16"):
            return prim.Cast("float32", node)
        if isinstance(node, prim.Cast) and str(node.ty) in ("float16", "bfloat16"):
            return _rounded(_without_half(node.value), str(node.ty))
        return None

    return rewrite(value, replace)


def _rounded(value: Expr, dtype: str) -> Expr:
    """value as float32; constants, and those among which conditions choose, rounded to dtype: a minimum may be -inf."""
    if isinstance(value, prim.Select):
        return prim.Select(value.condition, _rounded(value.true_value, dtype), _rounded(value.false_value, dtype))
    if isinstance(value, prim.FloatImm):
        with np.errstate(over="ignore"):
            return tirx.const(float(numpy_dtype(dtype).type(value.value)), "float32")
    return value if str(value.ty) == "float32" else prim.Cast("float32", value)
