"""The values of stages at one point, as straight-line code that a target emits into its loops.

Stages are evaluated on demand: a value that a stage reads from another one is computed at that point and bound to a
variable, once per point. So a chain of stages becomes one loop body whose size is the sum of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, flatten_index, is_int, loads, rebuild, rewrite, walk
from lowering.tensorir.facts import Facts
from lowering.tensorir.moves import BITS, constant_to_bits, find_moved_loads, is_reinterpreted, read_choice, to_bits

from ..half_precision import is_half, narrow, round_to_half, widen
from .stages import Stage

_ZERO = tirx.const(0, "int64")
_REINTERPRET = ir.Op.get("tirx.reinterpret")


@dataclass(frozen=True, eq=False)
class Program:
    """Variables bound in order, and the results in terms of them."""

    bindings: list[tuple[tirx.Var, Expr]]
    results: list[Expr]

    @property
    def expressions(self) -> list[Expr]:
        return [*(expr for _, expr in self.bindings), *self.results]


ComputedValues = dict[tirx.Buffer, list[tuple[list[Expr], Expr]]]
"""Computed values: by buffer, the points at which it is computed and the value there."""


@dataclass(frozen=True)
class View:
    """A row-major buffer as a vector; `leading` dimensions are not in memory: it contains one row of the buffer."""

    memory: tirx.Buffer
    leading: int = 0


Bind: TypeAlias = Callable[[Expr], Expr]
"""Binds a value to a variable, so that it is computed once."""

Expand: TypeAlias = Callable[[ir.Op, list[Expr], Bind], Expr | None]
"""Expands a function of float32 operands; returns None if the target has the function, or it is not supported."""

Lower: TypeAlias = Callable[[Expr, bool], Expr]
"""Returns an expression in terms of memory and variables. The flag is whether parts of it may be computed beforehand.
"""


class Evaluator:
    """Builds programs for expressions of stages' values.

    Buffers that have a view are loaded from memory. The others are computed; functions that the target does not have
    are expanded by `expand`.
    """

    def __init__(self, stages: list[Stage], views: dict[tirx.Buffer, View], expand: Expand | None = None) -> None:
        self.stages = {stage.output: stage for stage in stages}
        self.views, self.expand = views, expand
        self.inputs = set(views)
        self.moved = find_moved_outputs(stages, self.inputs)

    @staticmethod
    def of(stages: list[Stage], memory: Mapping[tirx.Buffer, tirx.Buffer], expand: Expand | None = None) -> Evaluator:
        """Return an evaluator for which all tensors not computed by a stage are in memory.

        memory maps the function's tensors to vectors (`flat_view`).
        """
        outputs = {stage.output for stage in stages}
        return Evaluator(
            stages, {buffer: View(flat) for buffer, flat in memory.items() if buffer not in outputs}, expand
        )

    def program(
        self,
        targets: list[Expr],
        facts: Facts,
        computed: ComputedValues | None = None,
        stored: Sequence[str] = (),
        rounds: bool = True,
    ) -> Program:
        """Build a program for `targets`, whose free variables have bounds in `facts`.

        Results are in float32 instead of half precision, except the leading ones, which are to be stored in the types
        of `stored`. Those of half precision are in that type, and keep all bits of an element that is moved. Without
        `rounds` the caller rounds: moved elements are then bits as uint16, and computed values stay float32.
        """
        writer = _Writer(
            self,
            facts,
            {buffer: list(points) for buffer, points in (computed or {}).items()},
        )
        types = [*stored, *("" for _ in targets[len(stored) :])]
        return Program(writer.bindings, [writer.result(*target, rounds) for target in zip(targets, types)])

    def may_move(self, expr: Expr) -> bool:
        """Return whether a half-precision `expr` may be an element that is moved."""
        return any(load.source in self.moved | self.inputs for load in find_moved_loads(expr))


class _Writer:
    def __init__(self, evaluator: Evaluator, facts: Facts, computed: ComputedValues) -> None:
        self.evaluator = evaluator
        self.facts = facts
        self.computed = computed
        self.computed_bits: ComputedValues = {}
        self.bindings: list[tuple[tirx.Var, Expr]] = []

    def result(self, expr: Expr, dtype: str, rounds: bool) -> Expr:
        """Return `expr` as it is stored; dtype is the type of the memory, or empty for a value that is not stored."""
        if not is_half(dtype):
            return self.lower(expr, bind=True)
        if expr.ty == dtype and self.evaluator.may_move(expr):
            bits = self.lower_bits(expr, bind=True)
            return tirx.reinterpret(dtype, self.bind("bits", bits)) if rounds else bits
        value = self.lower(expr, bind=True)
        return narrow(self.bind("rounded", value), dtype) if rounds else value

    def lower(self, expr: Expr, bind: bool) -> Expr:
        """Lower `expr` to memory, computed values and bound variables; float32 if `expr` is half precision.

        bind: whether the expression is evaluated unconditionally, so that subexpressions may be computed beforehand.
        """

        def replace(node: Expr) -> Expr | None:
            if isinstance(node, ir.TensorLoad):
                indices = [self.facts.simplify(self.lower(index, bind)) for index in node.indices]
                return self.load(node.source, indices, bind)
            if (choice := read_choice(node)) is not None:
                return self.choose(*choice, bind)
            if isinstance(node, prim.Cast):
                return self.cast(self.lower(node.value, bind), str(node.ty), bind)
            if isinstance(node, prim.FloatImm) and is_half(node.ty):
                return prim.FloatImm("float32", node.value)
            if isinstance(node, ir.Call):
                return self.call(node, bind)
            return None

        return rewrite(expr, replace)

    def cast(self, value: Expr, dtype: str, bind: bool) -> Expr:
        if is_half(dtype):
            value = self.cast(value, "float32", bind)
            return round_to_half(self.bind("x", value) if bind else value, dtype)
        if value.ty == "bool" and dtype != "bool":  # TVM's analysis of a bound vector fails on a comparison in it
            return prim.Select(value, tirx.const(1, dtype), tirx.const(0, dtype))
        return value if value.ty == dtype else prim.Cast(dtype, value)

    def call(self, node: ir.Call, bind: bool) -> Expr:
        operands = [self.lower(operand, bind) for operand in node.args]
        if node.op.same_as(_REINTERPRET):
            if is_half(node.args[0].ty):
                operands = [narrow(operands[0], str(node.args[0].ty))]
            bits = rebuild(node, operands)
            return widen(bits) if is_half(node.ty) else bits
        expand = self.evaluator.expand if bind else None
        expanded = expand(node.op, operands, functools.partial(self.bind, "t")) if expand is not None else None
        if expanded is not None:
            return expanded
        return ir.Call(
            node.op,
            operands,
            node.attrs,
            node.ty_args,
            ret_ty="float32" if is_half(node.ty) else node.ty,
        )

    def choose(self, condition: Expr, if_true: Expr, if_false: Expr, bind: bool, lower: Lower | None = None) -> Expr:
        """Emit a Select if both values can be computed safely, as vectors need; else a branch."""
        lower, done = lower or self.lower, loads(condition)
        condition = self.facts.simplify(self.lower(condition, bind))
        if is_int(condition, 1) or is_int(condition, 0):
            return lower(if_true if is_int(condition, 1) else if_false, bind)
        if self.is_harmless(if_true, done) and self.is_harmless(if_false, done):
            return prim.Select(condition, lower(if_true, bind), lower(if_false, bind))
        return tirx.if_then_else(condition, lower(if_true, False), lower(if_false, False))

    def is_harmless(self, expr: Expr, done: Sequence[ir.TensorLoad]) -> bool:
        """Return whether evaluating `expr` can neither access a buffer out of bounds nor divide by zero.

        Loads in `done` are executed anyway.
        """
        for node in walk(expr):
            if isinstance(node, ir.TensorLoad) and not any(prim.expr_deep_equal(node, other) for other in done):
                for index, extent in zip(node.indices, node.source.shape):
                    if loads(index) or not self.facts.can_prove(tirx.all(index >= 0, index < extent)):
                        return False
            if isinstance(node, prim.FloorDiv | prim.FloorMod | prim.Div | prim.Mod):
                integer = not str(node.ty).startswith(("float", "bfloat"))
                if integer and not (isinstance(node.b, prim.IntImm) and node.b.value > 0):
                    return False
        return True

    def lower_bits(self, expr: Expr, bind: bool) -> Expr:
        """Return the bits of a half-precision `expr`: those in memory for an element that is moved."""
        alternatives = read_choice(expr)
        if alternatives is not None:
            return self.choose(*alternatives, bind, self.lower_bits)
        if isinstance(expr, ir.TensorLoad):
            return self.load_bits(expr, bind)
        if is_reinterpreted(expr):
            return self.lower(expr.args[0], bind)
        if isinstance(expr, prim.FloatImm):
            return constant_to_bits(expr)
        return self.narrow_to_bits(self.lower(expr, bind), str(expr.ty), bind)

    def load_bits(self, node: ir.TensorLoad, bind: bool) -> Expr:
        buffer, indices = node.source, [self.facts.simplify(self.lower(index, bind)) for index in node.indices]
        view = self.evaluator.views.get(buffer)
        if view is not None and view.memory.dtype == buffer.dtype:
            return tirx.reinterpret(BITS, tirx.BufferLoad(view.memory, [self.position(view, buffer, indices)]))
        if view is not None or buffer not in self.evaluator.moved:
            return self.narrow_to_bits(self.load(buffer, indices, bind), buffer.dtype, bind)
        for point, bits in self.computed_bits.get(buffer, ()):
            if all(map(prim.expr_deep_equal, point, indices)):
                return bits
        bits = self.lower_bits(self.evaluator.stages[buffer].at(indices), bind)
        if bind:
            bits = self.bind(buffer.name, bits)
            self.computed_bits.setdefault(buffer, []).append((indices, bits))
        return bits

    def narrow_to_bits(self, value: Expr, dtype: str, bind: bool) -> Expr:
        """Return the bits of a float32 value that is rounded to half precision."""
        return to_bits(narrow(self.bind("rounded", value) if bind else value, dtype))

    def position(self, view: View, buffer: tirx.Buffer, indices: list[Expr]) -> Expr:
        return self.facts.simplify(flatten_index(buffer.shape[view.leading :], indices[view.leading :]))

    def load(self, buffer: tirx.Buffer, indices: list[Expr], bind: bool) -> Expr:
        for point, value in self.computed.get(buffer, ()):
            if all(map(prim.expr_deep_equal, point, indices)):
                return value
        if buffer in self.evaluator.views:
            view = self.evaluator.views[buffer]
            return load_widened(view.memory, self.position(view, buffer, indices))
        value = self.lower(self.evaluator.stages[buffer].at(indices), bind)
        if not bind or isinstance(value, tirx.Var | prim.IntImm | prim.FloatImm):
            return value
        value = self.bind(buffer.name, value)
        self.computed.setdefault(buffer, []).append((indices, value))
        return value

    def bind(self, name: str, value: Expr) -> Expr:
        if value.ty == "bool":  # TVM cannot bind vectors of bool
            return value
        var = tirx.Var(name, value.ty)
        self.bindings.append((var, value))
        return var


def find_moved_outputs(stages: Sequence[Stage], inputs: Iterable[tirx.Buffer]) -> set[tirx.Buffer]:
    """Return the outputs of half precision whose elements may be moved, from the inputs or from each other."""
    moved, input_set = set[tirx.Buffer](), set(inputs)
    for stage in stages:
        may_move = any(load.source in moved | input_set for load in find_moved_loads(stage.value))
        if is_half(stage.output.dtype) and not stage.reduce and may_move:
            moved.add(stage.output)
    return moved


def choose_scratch_dtype(output: tirx.Buffer, moved: Container[tirx.Buffer]) -> str:
    """Return the type in which a kernel stores the elements of a stage's output; moved ones keep their bits."""
    return "float32" if is_half(output.dtype) and output not in moved else output.dtype


def flat_view(buffer: tirx.Buffer) -> tirx.Buffer:
    """Declare the elements of a row-major parameter as a vector, at the insertion point of the IRBuilder.

    Not for scratch memory: TVM's StorageRewrite overlooks views when it decides whether two allocations may share
    memory (`workspace` is a single allocation, and safe).
    """
    size: Expr = tirx.const(1, "int64")
    for extent in buffer.shape:
        size = size * extent
    return T.decl_buffer((Analyzer().simplify(size),), buffer.dtype, data=buffer.data, layout=None)


def load_widened(memory: tirx.Buffer, position: Expr) -> Expr:
    """Load an element, in float32 if it is half precision."""
    value = tirx.BufferLoad(memory, [position])
    return widen(value) if is_half(memory.dtype) else value
