"""Programs (reading/values.py) as bodies of scalar and vector loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, rewrite, substitute, uses, walk
from lowering.tensorir.moves import is_reinterpreted

from ...reading.values import Program
from ..primitives.vector import let

_ZERO = tirx.const(0, "int64")
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")
_REINTERPRET = ir.Op.get("tirx.reinterpret")


def is_vectorizable(program: Program, index: tirx.Var) -> bool:
    """Return whether a loop over `index` around the program can be vectorized.

    A condition that guards a load and differs between lanes cannot be vectorized, nor can a function without a vector
    form. TVM would scalarize integer divisions, and loads at indices rounded from floats: a result that is only such a
    load gains nothing from vector lanes. TVM cannot broadcast a bfloat16 that is equal in all lanes.
    """
    varying = {index}
    if any(result.ty == "bfloat16" and not _varies(program, result, index) for result in program.results):
        return False
    for var, expr in [*program.bindings, *((None, result) for result in program.results)]:
        if not uses(expr, varying):
            continue
        if any(uses(node, varying) and not _has_vector_form(node, varying) for node in walk(expr)):
            return False
        if var is not None:
            varying.add(var)
    bound = dict(program.bindings)
    return not any(_is_rounded(bound.get(result, result), varying) for result in program.results)


def _varies(program: Program, result: Expr, index: tirx.Var) -> bool:
    varying = {index}
    for var, expr in program.bindings:
        if uses(expr, varying):
            varying.add(var)
    return uses(result, varying)


def emit_program(program: Program, values: Mapping[tirx.Var, Expr]) -> list[Expr]:
    """Emit the bindings at the IRBuilder's insertion point, with free variables replaced, and return the results."""
    return hoist_before_loop(program, tirx.Var("none", "int64"), values)(1)(_ZERO, _ZERO)


def hoist_before_loop(program: Program, index: tirx.Var, values: Mapping[tirx.Var, Expr]) -> LoopBody:
    """Emit the loop-invariant bindings before a loop over `index`, with free variables replaced.

    Return the loop's body. Positions in it are a variable plus a multiple of the index.
    """
    uses_of = Counter(node for expr in program.expressions for node in walk(expr) if isinstance(node, tirx.Var))
    # TVM 0.27 cannot reinterpret a constant 0, nor broadcast a bfloat16 over lanes, once it proves that bits are
    # constant.
    stored_bits = {result.args[0] for result in program.results if is_reinterpreted(result)}
    hoist = _Hoist(index, values)
    bindings = []
    for var, expr in program.bindings:
        expr = hoist.expression(expr)
        varies = uses(expr, hoist.varying)
        short = uses_of[var] == 1 or isinstance(expr, prim.IntImm | prim.FloatImm | tirx.Var)
        if short and var not in stored_bits:
            hoist.values[var] = expr
        elif varies:
            bindings.append((var, expr))
            hoist.varying.add(var)
        else:
            hoist.values[var] = let(expr)
    return LoopBody(index, bindings, [hoist.expression(result) for result in program.results])


@dataclass(frozen=True, eq=False)
class LoopBody:
    """A loop's body: body(lanes) allocates its variables, then emits itself for (index, lane) inside the loop.

    A variable is an element of a small buffer that LLVM promotes to a register. TVM's own bindings are not used: its
    simplifier replaces a bound variable by its definition at every use, which takes minutes where definitions nest.
    """

    index: tirx.Var
    bindings: list[tuple[tirx.Var, Expr]]
    results: list[Expr]

    def __call__(self, lanes: int) -> Callable[[Expr, Expr], list[Expr]]:
        registers = [T.alloc_buffer((lanes,), str(expr.ty)) for _, expr in self.bindings]

        def write(index: Expr, lane: Expr) -> list[Expr]:
            values = {self.index: index}
            for (var, expr), register in zip(self.bindings, registers):
                T.buffer_store(register, substitute(expr, values), [lane])
                values[var] = T.bind(register[lane])
            return [substitute(result, values) for result in self.results]

        return write


class _Hoist:
    """The hoisting of expressions that are equal for all values of `index` out of the loop."""

    def __init__(self, index: tirx.Var, values: Mapping[tirx.Var, Expr]) -> None:
        self.index = index
        self.values = dict(values)
        self.varying = {index}
        self.hoisted: list[tuple[Expr, Expr]] = []
        self.analyzer = Analyzer()

    def expression(self, expr: Expr) -> Expr:
        expr = rewrite(substitute(expr, self.values), self.load)
        return self.position(expr) if expr.ty == "int64" else expr

    def load(self, node: Expr) -> Expr | None:
        if not isinstance(node, ir.TensorLoad):
            return None
        (position,) = node.indices
        return tirx.BufferLoad(node.source, [self.position(rewrite(position, self.load))])

    def position(self, expr: Expr) -> Expr:
        """Return start + step * index, with `start` hoisted out of the loop, if the expression has that form."""
        if not uses(expr, self.varying):
            return self.name(expr)
        following = substitute(expr, {self.index: self.index + 1})
        step = self.analyzer.simplify(following - expr)
        start = self.analyzer.simplify(substitute(expr, {self.index: _ZERO}))
        if not isinstance(step, prim.IntImm) or uses(start, self.varying):
            return expr
        return self.name(start) + self.index * step

    def name(self, expr: Expr) -> Expr:
        if isinstance(expr, tirx.Var | prim.IntImm):
            return expr
        for expression, var in self.hoisted:
            if prim.expr_deep_equal(expression, expr):
                return var
        self.hoisted.append((expr, let(expr)))
        return self.hoisted[-1][1]


def _is_rounded(expr: Expr, varying: set[tirx.Var]) -> bool:
    """Return whether the expression is a load whose index is rounded from floating-point numbers."""
    nodes = [node for i in expr.indices for node in walk(i)] if isinstance(expr, ir.TensorLoad) else []
    casts = [node for node in nodes if isinstance(node, prim.Cast) and uses(node, varying)]
    return any(str(cast.value.ty).startswith("float") for cast in casts)


def _has_vector_form(node: Expr, varying: set[tirx.Var]) -> bool:
    if isinstance(node, prim.FloorDiv | prim.FloorMod | prim.Div | prim.Mod):
        return not str(node.ty).startswith(("int", "uint"))
    if not isinstance(node, ir.Call) or node.op.same_as(_REINTERPRET):
        return True
    if node.op.same_as(_IF_THEN_ELSE):
        return not uses(node.args[0], varying)
    return bool(node.op.get_attr("TVectorizable"))
