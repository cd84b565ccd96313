"""Loops of the virtual machine: a body whose number of steps is dynamic.

A virtual machine has calls and branches. So n steps are the first half of them and, if those continue, the second half:

    run(n, i, state) = step(i, state)                                           if n = 1
                       run(n - n / 2, i + n / 2, run(n / 2, i, state))          otherwise

Calls are at most 63 deep for any n. The outputs of the steps are stacked half by half: they are copied log n times, and
two copies are live. Where their sizes depend on data of the step, they are bound at run time, and asserted to be the
same in all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx
from tvm.ir import PrimType
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import SequenceValue, Shape, Size, Value, storage_dtype, storage_shape
from ..helpers.assertions import assert_shape
from ..helpers.kernels import compute, emit_loops
from ..tensor.concat import emit_concat
from ..tensor.reshape import reshape_to

LoopStep = Callable[[Value, Value, Sequence[Value]], tuple[Value, Sequence[Value]]]
"""A function of the step number, a true condition and the carried values.

It returns whether to continue, and the carried values and outputs after the step.
"""

_NUMBER, _BOOL = relax.TensorType((), "int64"), relax.TensorType((), "bool")


def emit_vm_loop(node: Node, count: Value, go: Value, state: Sequence[Value], step: LoopStep) -> list[Value]:
    """Return the carried values after the loop, then each output stacked along a new first axis.

    The carried values preserve their types and shapes. There are `count` (int64 scalar) steps, or those until the
    condition (bool scalar) fails.

    Raises:
        NodeError: A value changes its type or rank.
    """
    if any(isinstance(value, SequenceValue) for value in state):
        raise node.error(
            "node.sequence_carried",
            "it carries a sequence, and the number of steps is computed at run time, or is too large to unroll.",
            "Make the number of steps a constant, with dims= (--dim) if it is a symbolic size.",
        )
    body = _lower_body(node, state, step)
    run, builder = _define_run(node, body), node.importer.builder
    has_steps = compute(node, "some", lambda _, n, go: tirx.all(n() > 0, go()), [count, go], (), dtype="bool")
    tensors = [node.tensor(v) for v in (count, go, *state)]
    with node.importer.scope() as steps:
        steps.result = relax.Call(run, [tensors[0], relax.const(0, "int64"), *tensors[1:], *body.captured])
    with node.importer.scope() as no_steps:
        sizes = ((d, (0, *(0 if size is None else size for size in s))) for d, s in body.outputs)
        empty = (relax.op.zeros(_make_type(d, s).shape, storage_dtype(d)) for d, s in sizes)
        no_steps.result = relax.Tuple([*tensors[1:], *map(builder.emit, empty)])
    run_result = _RunResult(
        node, body, builder.emit(relax.If(node.tensor(has_steps), steps.sequence, no_steps.sequence))
    )
    # A value that no step changes shares its memory with the input, and outputs of the model need their own.
    return [
        compute(node, "copy", lambda i, x: x(*i), [v], v.shape) for v in (*run_result.state(), *run_result.outputs())
    ]


@dataclass
class _LoopBody:
    """The function of one step, (i, go, *state, *captured) -> (go, *state, *outputs), each output [1, ...]."""

    carried: list[tuple[str, Shape]]  # element types and shapes of the state
    outputs: list[tuple[str, tuple[Size | None, ...]]]  # of one step; None: a data-dependent size
    function: Any = None
    captured: list[Any] = field(default_factory=list)  # outer tensors that it reads, and a shape of symbols

    def types(self) -> list[Any]:
        """Return the types of its parameters after i."""
        return [_BOOL, *(_make_type(dtype, shape) for dtype, shape in self.carried)]

    def result(self) -> Any:
        """Return the result type of `run`: the number of the outputs' steps is open."""
        ranks = [len(storage_shape(d, (0,) * len(s))) for d, s in self.outputs]
        open_ = [relax.TensorType(None, storage_dtype(d), ndim=n + 1) for n, (d, _) in zip(ranks, self.outputs)]
        return relax.TupleType([*self.types(), *open_])


def _lower_body(node: Node, state: Sequence[Value], step: LoopStep) -> _LoopBody:
    body = _LoopBody([(v.dtype, v.shape) for v in state], [])
    params = [relax.Var("i", _NUMBER), *(relax.Var(f"state{k}", kind) for k, kind in enumerate(body.types()))]
    with node.importer.scope() as scope:
        carried = [Value(v.dtype, v.shape, var) for v, var in zip(state, params[2:])]
        number = Value("int64", (), params[0])
        with node.importer.random.inside_step(number):
            condition, results = step(number, Value("bool", (), params[1]), carried)
        carried_results = [_assert_carried(node, k, v, like) for k, (v, like) in enumerate(zip(results, state))]
        step_outputs = results[len(state) :]
        single = [reshape_to(node, v, (1, *v.shape)) for v in step_outputs]
        scope.result = relax.Tuple(
            [node.tensor(v) for v in (reshape_to(node, condition, ()), *carried_results, *single)]
        )
    body.outputs = [(v.dtype, (None,) * v.rank) for v in step_outputs]  # for the result type; the sizes follow
    free = (v for v in relax.analysis.free_vars(scope.sequence) if not isinstance(v.ty, PrimType))  # symbols: below
    tensors = [v for v in free if not _contains(v, params)]
    function = relax.Function([*params, *tensors], scope.sequence, body.result(), is_pure=True)
    outer_symbols = _collect_symbols([p.ty for p in function.params])
    inner_symbols = [s for s in relax.analysis.defined_symbolic_vars(function) if not _contains(s, outer_symbols)]
    body.outputs = [
        (v.dtype, tuple(None if _depends_on(size, inner_symbols) else size for size in v.shape)) for v in step_outputs
    ]
    sizes = _collect_symbols(
        [_make_type("int64", tuple(d for d in shape if d is not None)) for _, shape in body.outputs]
    )
    symbols = [*outer_symbols]
    for symbol in (*sizes, *relax.analysis.free_symbolic_vars(function)):
        if not _contains(symbol, symbols):
            symbols.append(symbol)
    body.captured = [*tensors, *([relax.ShapeExpr(symbols)] if symbols else [])]
    sizes_parameter = [relax.Var("sizes", relax.ShapeType(symbols))] if symbols else []
    function = relax.Function([*function.params, *sizes_parameter], scope.sequence, body.result(), is_pure=True)
    body.function = node.importer.builder.add_func(relax.utils.copy_with_new_vars(function), "step")
    return body


def _collect_symbols(types: Sequence[Any]) -> list[Any]:
    """Return the symbols of the types, each once."""
    symbols: list[Any] = []
    for symbol in (s for kind in types for s in relax.analysis.tir_vars_in_type(kind)):
        if not _contains(symbol, symbols):
            symbols.append(symbol)
    return symbols


def _contains(symbol: Any, symbols: Sequence[Any]) -> bool:
    return any(symbol.same_as(s) for s in symbols)


def _depends_on(size: Size, symbols: Sequence[Any]) -> bool:
    """Return whether a size is computed from one of the symbols."""
    return any(_contains(symbol, symbols) for symbol in _collect_symbols([_make_type("int64", (size,))]))


def _assert_carried(node: Node, k: int, value: Value, like: Value) -> Value:
    if value.dtype != like.dtype or value.rank != like.rank:
        kinds = [f"{v.dtype} of rank {v.rank}" for v in (like, value)]
        raise node.error(
            "node.carried_type_mismatch",
            f"carried value {k} is {kinds[0]}, and {kinds[1]} after a step.",
            "Keep the types and ranks of carried values the same in all steps, or make the number of steps a constant.",
        )
    return assert_shape(node, value, like.shape, f"carried value {k} behind a step")


def _define_run(node: Node, body: _LoopBody) -> Any:
    """Define the function `run`, (n, i, go, *state, *captured) -> (go, *state, *outputs), of at least one step."""
    builder = node.importer.builder
    params = [relax.Var("n", _NUMBER), relax.Var("i", _NUMBER)]
    params += [relax.Var(f"state{k}", kind) for k, kind in enumerate(body.types())]
    kinds = (relax.ShapeType(c.values) if isinstance(c, relax.ShapeExpr) else c.ty for c in body.captured)
    captured = [relax.Var(f"captured{k}", kind) for k, kind in enumerate(kinds)]
    count, step_number, go, *state = params
    empty = relax.Function.create_empty([*params, *captured], body.result())
    run = builder.add_func(relax.utils.copy_with_new_vars(empty), "run")
    with node.importer.scope() as scope:
        single, half, second_half, middle = _emit_split(
            node, Value("int64", (), count), Value("int64", (), step_number)
        )
        with node.importer.scope() as one_step:
            one_step.result = relax.Call(body.function, [step_number, go, *state, *captured])
        with node.importer.scope() as several_steps:
            first = _RunResult(node, body, builder.emit(relax.Call(run, [half, step_number, go, *state, *captured])))
            with node.importer.scope() as continued:
                arguments = [second_half, middle, first.read_condition(), *map(node.tensor, first.state()), *captured]
                then = _RunResult(node, body, builder.emit(relax.Call(run, arguments)))
                pairs = zip(first.outputs(), then.outputs())
                stacked = [emit_concat(node, [a, _assert_step_shape(node, b, a)], 0) for a, b in pairs]
                continued.result = relax.Tuple(
                    [then.read_condition(), *(node.tensor(v) for v in (*then.state(), *stacked))]
                )
            with node.importer.scope() as stopped:
                stopped.result = first.tuple
            several_steps.result = relax.If(first.read_condition(), continued.sequence, stopped.sequence)
        scope.result = relax.If(single, one_step.sequence, several_steps.sequence)
    function = relax.Function([*params, *captured], scope.sequence, body.result(), is_pure=True)
    builder.update_func(run, relax.utils.copy_with_new_vars(function))
    return run


def _assert_step_shape(node: Node, value: Value, like: Value) -> Value:
    """Return an output of later steps, asserted to have the sizes of earlier steps."""
    return assert_shape(node, value, (value.shape[0], *like.shape[1:]), "what a later step gives out")


def _emit_split(node: Node, count: Value, step_number: Value) -> list[Any]:
    """Return whether there is one step, the lengths of both halves, and the start of the second."""

    def statements(n: Any, i: Any, single: Any, half: Any, second_half: Any, middle: Any) -> None:
        first = tirx.shift_right(n[()], tirx.const(1, "int64"))
        for buffer, value in (
            (single, n[()] < 2),
            (half, first),
            (second_half, n[()] - first),
            (middle, i[()] + first),
        ):
            T.buffer_store(buffer, value, [])

    outputs: list[tuple[Shape, str]] = [((), "bool"), ((), "int64"), ((), "int64"), ((), "int64")]
    return [node.tensor(v) for v in emit_loops(node, "split", statements, [count, step_number], outputs)]


class _RunResult:
    """The result of a call of `run`."""

    def __init__(self, node: Node, body: _LoopBody, result: Any) -> None:
        self._node, self._body, self.tuple = node, body, result

    def _read_item(self, k: int) -> Any:
        return self._node.importer.builder.emit(relax.TupleGetItem(self.tuple, k))

    def read_condition(self) -> Any:
        return self._read_item(0)

    def state(self) -> list[Value]:
        return [Value(d, s, self._read_typed(1 + k, _make_type(d, s))) for k, (d, s) in enumerate(self._body.carried)]

    def _read_typed(self, k: int, kind: Any) -> Any:
        """Return an item, of this type, which Relax may not infer."""
        item = self._read_item(k)
        return item if item.ty.shape is not None else self._node.importer.builder.match_cast(item, kind)

    def outputs(self) -> list[Value]:
        """Return the outputs, each [steps, ...], with a symbol for the number of steps."""
        if not self._body.outputs:
            return []
        steps, first = self._node.symbols.fresh("steps"), 1 + len(self._body.carried)
        shapes = [
            (dtype, (steps, *(self._node.symbols.fresh("size") if size is None else size for size in shape)))
            for dtype, shape in self._body.outputs
        ]
        return [Value(d, s, self._read_typed(first + k, _make_type(d, s))) for k, (d, s) in enumerate(shapes)]


def _make_type(dtype: str, shape: Shape) -> Any:
    sizes = [tirx.IntImm("int64", d) if isinstance(d, int) else d for d in storage_shape(dtype, shape)]
    return relax.TensorType(relax.ShapeExpr(sizes), storage_dtype(dtype))
