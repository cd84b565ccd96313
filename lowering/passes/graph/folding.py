"""Expression of tensors that an attention reads element by element, which its kernel evaluates on demand.

The chain of kernels that computes such a tensor is expressed over (b, h, i, j) (lowering/passes/graph/elements.py).
Subexpressions of i or of j only, and those that cost more than comparisons, stay tensors of at most S + T elements per
head. They are computed before and become tables of the expression. The passes fold_masks and fold_scores choose the
tensors, and use the expressions.
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

from ...attention.codegen.plain import build_plain_attention
from ...attention.expr.node import PAIR
from ...attention.record.problem import ATTRIBUTE, AttentionProblem
from ...importing.checks import check_condition
from ...importing.values import numpy_dtype
from ...tensorir.expressions import flatten_index, is_function, rewrite, substitute, uses, walk
from .elements import ElementExpressions

Bindings = Mapping[relax.Var, relax.Expr]


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """A call of the kernel of a problem. arguments are its tensors and scalars by name."""

    call: relax.Call
    problem: AttentionProblem
    arguments: dict[str, Any]

    @staticmethod
    def read(mod: tvm.IRModule, value: relax.Expr) -> AttentionCall | None:
        """Return the attention that the value calls, None for other values.

        Also return None for an attention over ragged rows or mapped slots, or with a qk output.
        """
        if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_tir"):
            return None
        attrs = mod[value.args[0]].attrs
        if attrs is None or ATTRIBUTE not in attrs:
            return None
        problem = AttentionProblem.from_json(attrs[ATTRIBUTE])
        if problem.is_ragged or problem.layout.is_mapped or problem.qk_mode is not None:
            return None
        return AttentionCall(value, problem, dict(zip(problem.parameters(), value.args[1].fields)))

    @property
    def sizes(self) -> tuple[Any, int, Any, Any]:
        """The numbers of batches, query heads, query rows, and keys."""
        q, k = self.arguments["q"].ty.shape.values, self.arguments["k"].ty.shape.values
        rows, keys = q[self.problem.row_axes.index("t")], k[self.problem.layout.axes.index("t")]
        return q[0], self.problem.q_heads, rows, keys

    def call_problem(
        self, builder: relax.BlockBuilder, problem: AttentionProblem, values: Mapping[str, Any], outputs: Any = None
    ) -> relax.Call:
        """Return the call for another problem with these arguments by name; outputs have other types if given."""
        function = build_plain_attention(problem).without_attr("global_symbol")
        arguments = [values[name] for name in problem.inputs()]
        return relax.call_tir(builder.add_func(function, "attention"), arguments, outputs or self.call.ty_args[0])


def replace_attentions(
    mod: tvm.IRModule,
    replace: Callable[[relax.BlockBuilder, Bindings, AttentionCall], tuple[list[relax.Binding], relax.Call] | None],
) -> tvm.IRModule:
    """Return the module with attentions replaced by other calls, after the bindings that they need.

    `replace` returns None for an attention that stays. Unused producers of removed tensors are left to dead code
    elimination.
    """
    main = mod["main"]
    bindings = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    builder = relax.BlockBuilder(mod)
    blocks = []
    for block in main.body.blocks:
        new_bindings: list[relax.Binding] = []
        for binding in block.bindings:
            attention = AttentionCall.read(mod, binding.value)
            replacement = None if attention is None else replace(builder, bindings, attention)
            if replacement is None:
                new_bindings.append(binding)
            else:
                new_bindings += [*replacement[0], relax.VarBinding(binding.var, builder.normalize(replacement[1]))]
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind(new_bindings))
    mod = builder.get()
    body = relax.SeqExpr(blocks, main.body.body)
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


class OperandFolder:
    """An attention, and expressions over the indices (b, h, i, j) of its queries and of `keys` keys.

    `score`, if present, is another variable: a number that only the kernel has. `tables` are the bindings that the
    expressions need before it.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        builder: relax.BlockBuilder,
        bindings: Bindings,
        attention: AttentionCall,
        keys: Expr,
        score: tirx.Var | None = None,
    ) -> None:
        self.builder, self.attention, self.keys, self.score = builder, attention, keys, score
        self.batches, self.heads, self.rows, _ = attention.sizes
        self.indices = [tirx.Var(name, "int64") for name in PAIR]
        ends = self.batches, tirx.const(self.heads, "int64"), self.rows, keys
        self.elements = ElementExpressions(
            mod, bindings, dict(zip(self.indices, ends)), self.is_leaf, self.check_element
        )
        self.tables: list[relax.Binding] = []
        # Bounds of indices in the formula, by their check, the number of its bound, and their text.
        self.conditions: dict[tuple[Any, ...], tuple[Expr, Expr]] = {}
        # Indices loaded from a checked table, by the check and their text.
        self.checked_loads: dict[tuple[relax.Call, str], Expr | None] = {}

    def flatten_loads(self, value: Expr, tables: dict[relax.Expr, tirx.Buffer]) -> Expr:
        """Return value with loads from tables instead of leaves; the tables are added to `tables` by tensor.

        Tables are vectors. Tensors read over i and j in two dimensions keep these, as only they allow bounds over a
        tile.
        """
        tensors = {buffer: tensor for tensor, buffer in self.elements.leaves.items()}
        loads = [node for node in walk(value) if isinstance(node, ir.TensorLoad)]
        two_dimensional = {node.source for node in loads if self.needs_both(node)}

        def load(node: Expr) -> Expr | None:
            if not isinstance(node, ir.TensorLoad):
                return None
            tensor, shape = tensors[node.source], list(node.source.shape)
            if tensor not in tables:
                flat = shape if node.source in two_dimensional else [_multiply(shape)]
                tables[tensor] = tirx.decl_buffer(flat, node.source.dtype, f"table_{len(tables)}")
            indices = [rewrite(index, load) for index in node.indices]
            if node.source not in two_dimensional:
                indices = [self.elements.simplify(flatten_index(shape, indices))]
            return tirx.BufferLoad(tables[tensor], indices)

        return rewrite(value, load)

    def find_sizes(self, value: Expr, tables: Mapping[relax.Expr, tirx.Buffer]) -> list[tirx.Var]:
        """Return the sizes that an expression uses: its variables that are neither indices nor tables."""
        bound = {*self.indices, self.score, *tables.values()}
        return [var for var in tirx.analysis.undefined_vars(value) if var not in bound]

    def arguments(
        self, read: Mapping[str, tirx.Var | tirx.Buffer], tables: Mapping[relax.Expr, tirx.Buffer]
    ) -> dict[str, Any]:
        """Return the kernel's arguments for the operands of a formula, by name: tensors of tables, and sizes."""
        tensors = {buffer: tensor for tensor, buffer in tables.items()}
        return {name: self.reshape_to_table(tensors[x], x) if x in tensors else x for name, x in read.items()}

    def reshape_to_table(self, tensor: relax.Expr, table: tirx.Buffer) -> relax.Expr:
        """Return the tensor in the shape of its table."""
        if len(tensor.ty.shape.values) == len(table.shape):
            return tensor
        return self.bind(relax.op.reshape(tensor, relax.ShapeExpr(list(table.shape))), "table")

    def bind(self, value: relax.Expr, name: str) -> relax.Expr:
        value = self.builder.normalize(value)
        variable = relax.DataflowVar(name, value.ty)
        self.tables.append(relax.VarBinding(variable, value))
        return variable

    def is_leaf(self, indices: list[Expr], element: Expr) -> bool:
        """Return whether a tensor over i or j only is computed before: it is more than arithmetic of indices."""
        i, j = self.indices[2:]
        if any(uses(x, {i}) for x in indices) and any(uses(x, {j}) for x in indices):
            return False
        return any(isinstance(node, ir.TensorLoad) for node in walk(element)) or _is_expensive(element)

    def check_element(self, call: relax.Call, indices: list[Expr]) -> Expr | None:
        """Return an element of checked indices.

        Indices that depend on positions only are checked by their bounds, before the attention. For those that depend
        on the distance j - i a table is checked. Others over both i and j stay a tensor.
        """
        value = self.elements.read_element(call.args[1], indices)
        bounds = call.args[2].values
        bound_index = indices[-1] if len(bounds) > 1 else tirx.const(0, "int64")
        ends = self.elements.find_bounds(value)
        if ends is not None and isinstance(bound_index, prim.IntImm):
            self.conditions[(call, int(bound_index), *map(str, ends))] = ends
            return value
        i, j = self.indices[2:]
        if not any(uses(x, {i}) for x in indices) or not any(uses(x, {j}) for x in indices):
            return None
        key = call, str(value)
        if key not in self.checked_loads:
            self.checked_loads[key] = self.tabulate_by_distance(value, call)
        return self.checked_loads[key]

    def add_conditions(self, tensor: relax.Expr) -> relax.Expr:
        """Return the tensor, checked for the bounds of all indices in the formula."""
        is_empty = [size.equal(0) for size in self.elements.bounds.values()]
        for (call, bound_index, *_), (low, high) in self.conditions.items():
            bound, from_the_back = call.args[2].values[bound_index], int(call.args[3])
            inside = tirx.all(low >= (-bound if from_the_back else 0), high < bound)
            if self.elements.analyzer.can_prove(inside):
                continue
            name, bounded = (str(argument.value) for argument in call.args[4:6])
            text = f"{name} holds {{}} to {{}}, and {bounded.splitlines()[bound_index]} is {{}}."
            check = check_condition(
                tensor, tirx.any(inside, *is_empty), "run.index_out_of_range", text, [low, high, bound]
            )
            tensor = self.bind(check, "checked")
        return tensor

    def needs_both(self, load: ir.TensorLoad) -> bool:
        """Return whether a load needs i in one dimension and j in another: then its tensor is as large as the mask."""
        i, j = self.indices[2:]
        rows = {k for k, x in enumerate(load.indices) if uses(x, {i})}
        columns = {k for k, x in enumerate(load.indices) if uses(x, {j})}
        return bool(rows and columns and len(rows | columns) > 1)

    # Expressions that are worth a table.

    def tabulate(self, value: Expr) -> Expr:
        """Return value with expensive subexpressions of j - i, or of one of them, loaded from precomputed tables."""
        if not _is_expensive(value):
            return value
        i, j = self.indices[2:]
        d = tirx.Var("d", "int64")
        uses_score = self.score is not None and uses(value, {self.score})
        if uses_score or (uses(value, {i}) and uses(value, {j})):
            table = None if uses_score else self.tabulate_by_distance(value)
            if table is not None:
                return table
            return rewrite(value, lambda node: None if node is value else self.tabulate(node))
        if uses(value, {j}):
            return self.make_table(substitute(value, {j: d}), d, self.keys, j, 0)
        return self.make_table(substitute(value, {i: d}), d, self.rows, i, 0)

    def tabulate_by_distance(self, value: Expr, check: relax.Call | None = None) -> Expr | None:
        """Return value loaded from a table over j - i; None if it depends on i and j in another way."""
        i, j = self.indices[2:]
        d = tirx.Var("d", "int64")
        distance_value = self.elements.analyzer.simplify(substitute(value, {j: i + d}))
        if uses(distance_value, {i}):
            return None
        first = 1 - self.rows
        return self.make_table(distance_value, d, self.rows + self.keys - 1, j - i - first, first, check)

    def make_table(
        self,
        value: Expr,
        d: tirx.Var,
        extent: Expr,
        index: Expr,
        first: Expr | int,
        check: relax.Call | None = None,
    ) -> Expr:
        """Return an element of a new table of `value` for first <= d < first + extent, at d = first + index.

        check is the check of the table, if any.
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
                points = [coordinate.astype("int64") for coordinate in point]  # TVM counts short axes in 32 bits
                values = {**dict(zip((var for var, _ in leading), points)), d: points[-1] + first}
                return rewrite(substitute(value, values), load)

            return te.compute(shape, element, name="mask_table")

        call = self.builder.call_te(compute, *(tensor for tensor, _ in leaves), primfunc_name_hint="mask_table")
        variable = self.bind(call, "mask_table")
        if check is not None:
            check_call = relax.op.call_pure_packed(check.args[0], variable, *check.args[2:], ty_args=variable.ty)
            variable = self.bind(check_call, "checked_table")
        buffer = tirx.decl_buffer([tirx.convert(n) for n in shape], str(value.ty), f"table_{len(self.elements.leaves)}")
        self.elements.leaves[variable] = buffer
        return tirx.BufferLoad(
            buffer, [*(var for var, _ in leading), index if uses(value, {d}) else tirx.const(0, "int64")]
        )


def _multiply(shape: list[Expr]) -> Expr:
    return functools.reduce(operator.mul, shape, tirx.const(1, "int64"))


def _is_expensive(value: Expr) -> bool:
    """Return whether an element costs more than comparisons and sums: functions, quotients, chained loads."""
    for node in walk(value):
        if is_function(node) or isinstance(node, prim.Div | prim.FloorDiv | prim.FloorMod | prim.Mod):
            return True
        if isinstance(node, ir.TensorLoad) and any(isinstance(n, ir.TensorLoad) for x in node.indices for n in walk(x)):
            return True
    return False


def widen_half(value: Expr) -> Expr:
    """Return arithmetic in float32 instead of half precision; constants are rounded as the model says."""

    def replace(node: Expr) -> Expr | None:
        if isinstance(node, prim.FloatImm) and str(node.ty) in ("float16", "bfloat16"):
            return tirx.const(node.value, "float32")
        if isinstance(node, ir.TensorLoad) and str(node.ty) in ("float16", "bfloat16"):
            return prim.Cast("float32", node)
        if isinstance(node, prim.Cast) and str(node.ty) in ("float16", "bfloat16"):
            return _round_constants(widen_half(node.value), str(node.ty))
        return None

    return rewrite(value, replace)


def _round_constants(value: Expr, dtype: str) -> Expr:
    """Return value as float32; constants, also those that conditions select, are rounded to dtype: they may be -inf."""
    if isinstance(value, prim.Select):
        return prim.Select(
            value.condition, _round_constants(value.true_value, dtype), _round_constants(value.false_value, dtype)
        )
    if isinstance(value, prim.FloatImm):
        with np.errstate(over="ignore"):
            return tirx.const(float(numpy_dtype(dtype).type(value.value)), "float32")
    return value if str(value.ty) == "float32" else prim.Cast("float32", value)
