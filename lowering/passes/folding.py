"""Writes tensors that an attention reads element by element as expressions, which its kernel evaluates where it needs
them.

The chain of kernels behind such a tensor is written out over (b, h, i, j) (lowering/passes/elements.py). What depends
on i or on j alone, and what costs more than comparisons, stays a tensor, of at most S + T elements per head: it is
computed before and becomes a table of the expression. The passes fold_masks and fold_scores say which tensors, and
what becomes of the expressions.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, te, tirx
from tvm.ir import Expr, prim

from ..attention.expr.node import PAIR
from ..attention.plain import plain
from ..attention.problem import ATTRIBUTE, AttentionProblem
from ..importing.checks import check_condition
from ..importing.values import numpy_dtype
from ..tensorir.expressions import is_function, offset, rewrite, substitute, uses, walk
from .elements import Elements

Bindings = Mapping[relax.Var, relax.Expr]


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of the kernel of a problem. arguments are its tensors and scalars by name."""

    call: relax.Call
    problem: AttentionProblem
    arguments: dict[str, Any]

    @staticmethod
    def of(mod: tvm.IRModule, value: relax.Expr) -> Attention | None:
        """The attention that the value is; None for anything else, and for one over packed rows or mapped slots, or
        with a qk output."""
        if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_tir"):
            return None
        attrs = mod[value.args[0]].attrs
        if attrs is None or ATTRIBUTE not in attrs:
            return None
        problem = AttentionProblem.from_json(attrs[ATTRIBUTE])
        if problem.packed or problem.layout.mapped or problem.qk_mode is not None:
            return None
        return Attention(value, problem, dict(zip(problem.parameters(), value.args[1].fields)))

    @property
    def sizes(self) -> tuple[Any, int, Any, Any]:
        """Batches, query heads, query rows, keys."""
        q, k = self.arguments["q"].ty.shape.values, self.arguments["k"].ty.shape.values
        rows, keys = q[self.problem.row_axes.index("t")], k[self.problem.layout.axes.index("t")]
        return q[0], self.problem.q_heads, rows, keys

    def solving(
        self, builder: relax.BlockBuilder, problem: AttentionProblem, given: Mapping[str, Any], outputs: Any = None
    ) -> relax.Call:
        """The call for another problem with these arguments by name; with the same outputs, or of other types."""
        function = plain(problem).without_attr("global_symbol")
        arguments = [given[name] for name in problem.inputs()]
        return relax.call_tir(builder.add_func(function, "attention"), arguments, outputs or self.call.ty_args[0])


def replaced(
    mod: tvm.IRModule,
    instead: Callable[[relax.BlockBuilder, Bindings, Attention], tuple[list[relax.Binding], relax.Call] | None],
) -> tvm.IRModule:
    """The module with other calls, behind bindings that they need, in place of attentions; `instead` gives None for
    one that stays.

    What computed the tensors that are gone is left to the elimination of dead code.
    """
    main = mod["main"]
    bindings = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    builder = relax.BlockBuilder(mod)
    blocks = []
    for block in main.body.blocks:
        kept: list[relax.Binding] = []
        for binding in block.bindings:
            attention = Attention.of(mod, binding.value)
            found = None if attention is None else instead(builder, bindings, attention)
            if found is None:
                kept.append(binding)
            else:
                kept += [*found[0], relax.VarBinding(binding.var, builder.normalize(found[1]))]
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind(kept))
    mod = builder.get()
    body = relax.SeqExpr(blocks, main.body.body)
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


class OperandFolder:
    """One attention, and expressions over the indices (b, h, i, j) of its queries and of so many keys; and over
    `score`, if there is one, a number that only the kernel knows.

    `tables` are the bindings that the expressions need in front of it.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        builder: relax.BlockBuilder,
        bindings: Bindings,
        attention: Attention,
        keys: Expr,
        score: tirx.Var | None = None,
    ) -> None:
        self.builder, self.attention, self.keys, self.score = builder, attention, keys, score
        self.batches, self.heads, self.rows, _ = attention.sizes
        self.indices = [tirx.Var(name, "int64") for name in PAIR]
        ends = self.batches, tirx.const(self.heads, "int64"), self.rows, keys
        self.elements = Elements(mod, bindings, dict(zip(self.indices, ends)), self.is_leaf, self.checked)
        self.tables: list[relax.Binding] = []
        # By the check that they need, which of its bounds, and how they read: the ends of indices in the formula.
        self.conditions: dict[tuple[Any, ...], tuple[Expr, Expr]] = {}
        # By the check and how they read: indices out of a table that was checked.
        self.looked_up: dict[tuple[relax.Call, str], Expr | None] = {}

    def flattened(self, value: Expr, tables: dict[relax.Expr, tirx.Buffer]) -> Expr:
        """value with loads from tables, which are put into `tables` by tensor, in place of the leaves: vectors, but for
        what is read over i and j in two dimensions, of which bounds over a tile can only be told in these."""
        tensors = {buffer: tensor for tensor, buffer in self.elements.leaves.items()}
        loads = [node for node in walk(value) if isinstance(node, ir.TensorLoad)]
        both = {node.source for node in loads if self.over_both(node)}

        def load(node: Expr) -> Expr | None:
            if not isinstance(node, ir.TensorLoad):
                return None
            tensor, shape = tensors[node.source], list(node.source.shape)
            if tensor not in tables:
                flat = shape if node.source in both else [_volume(shape)]
                tables[tensor] = tirx.decl_buffer(flat, node.source.dtype, f"table_{len(tables)}")
            indices = [rewrite(index, load) for index in node.indices]
            if node.source not in both:
                indices = [self.elements.simplify(offset(shape, indices))]
            return tirx.BufferLoad(tables[tensor], indices)

        return rewrite(value, load)

    def sizes_in(self, value: Expr, tables: Mapping[relax.Expr, tirx.Buffer]) -> list[tirx.Var]:
        """The sizes that an expression uses: its variables that are neither indices nor tables."""
        known = {*self.indices, self.score, *tables.values()}
        return [var for var in tirx.analysis.undefined_vars(value) if var not in known]

    def arguments(
        self, read: Mapping[str, tirx.Var | tirx.Buffer], tables: Mapping[relax.Expr, tirx.Buffer]
    ) -> dict[str, Any]:
        """What the kernel is given for what a formula reads, by name: the tensors of tables, sizes as they are."""
        tensors = {buffer: tensor for tensor, buffer in tables.items()}
        return {name: self.shaped(tensors[x], x) if x in tensors else x for name, x in read.items()}

    def shaped(self, tensor: relax.Expr, table: tirx.Buffer) -> relax.Expr:
        """The tensor in the shape of its table."""
        if len(tensor.ty.shape.values) == len(table.shape):
            return tensor
        return self.bind(relax.op.reshape(tensor, relax.ShapeExpr(list(table.shape))), "table")

    def bind(self, value: relax.Expr, name: str) -> relax.Expr:
        value = self.builder.normalize(value)
        variable = relax.DataflowVar(name, value.ty)
        self.tables.append(relax.VarBinding(variable, value))
        return variable

    def is_leaf(self, indices: list[Expr], element: Expr) -> bool:
        """Tensors over i or j alone are computed before, unless they are no more than arithmetic with the indices."""
        i, j = self.indices[2:]
        if any(uses(x, {i}) for x in indices) and any(uses(x, {j}) for x in indices):
            return False
        return any(isinstance(node, ir.TensorLoad) for node in walk(element)) or _costly(element)

    def checked(self, call: relax.Call, indices: list[Expr]) -> Expr | None:
        """An element of checked indices. Those that depend on positions alone are checked by their bounds, before the
        attention; of those that depend on the distance j - i a table is checked. Others over both i and j stay a
        tensor."""
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
        of_score = self.score is not None and uses(value, {self.score})
        if of_score or (uses(value, {i}) and uses(value, {j})):
            table = None if of_score else self.by_distance(value)
            if table is not None:
                return table
            return rewrite(value, lambda node: None if node is value else self.tabulated(node))
        if uses(value, {j}):
            return self.table(substitute(value, {j: d}), d, self.keys, j, 0)
        return self.table(substitute(value, {i: d}), d, self.rows, i, 0)

    def by_distance(self, value: Expr, check: relax.Call | None = None) -> Expr | None:
        """value from a table over j - i; None if it depends on more than that of i and j."""
        i, j = self.indices[2:]
        d = tirx.Var("d", "int64")
        of_distance = self.elements.analyzer.simplify(substitute(value, {j: i + d}))
        if uses(of_distance, {i}):
            return None
        first = 1 - self.rows
        return self.table(of_distance, d, self.rows + self.keys - 1, j - i - first, first, check)

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
        leading = [(var, size) for var, size in ((b, self.batches), (h, self.heads)) if uses(value, {var})]
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
                places = [place.astype("int64") for place in point]  # TVM counts what is known to be short in 32 bits
                at = {**dict(zip((var for var, _ in leading), places)), d: places[-1] + first}
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


def without_half(value: Expr) -> Expr:
    """Arithmetic in float32 instead of half precision; constants are rounded as the model says."""

    def replace(node: Expr) -> Expr | None:
        if isinstance(node, prim.FloatImm) and str(node.ty) in ("float16", "bfloat16"):
            return tirx.const(node.value, "float32")
        if isinstance(node, ir.TensorLoad) and str(node.ty) in ("float16", "bfloat16"):
            return prim.Cast("float32", node)
        if isinstance(node, prim.Cast) and str(node.ty) in ("float16", "bfloat16"):
            return _rounded(without_half(node.value), str(node.ty))
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
