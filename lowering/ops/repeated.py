"""Loops of the virtual machine: a body whose number of steps is known by the run only.

A virtual machine has calls and branches. So n steps are the first half of them and then, if those go on, the others:

    run(n, i, state) = step(i, state)                                           if n = 1
                       run(n - n / 2, i + n / 2, run(n / 2, i, state))          otherwise

Calls lie at most 63 deep, whatever n is, and what the steps give out is stacked half by half: it is copied log n times,
and alive twice. Where its sizes depend on data of the step they are told by the run, and asserted to be the same in all
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx
from tvm.ir import PrimType
from tvm.script.ir_builder import tirx as T

from ..importing.node import Node
from ..importing.values import SequenceValue, Shape, Size, Value, storage_dtype, storage_shape
from .asserted import asserted
from .kernels import compute, loops
from .movement import join
from .reshape import reshape_to

Step = Callable[[Value, Value, Sequence[Value]], tuple[Value, Sequence[Value]]]
"""Of the number of a step, whether it is wanted (True) and the carried values: whether to go on, and the carried values
and outputs behind the step."""

_NUMBER, _BOOL = relax.TensorType((), "int64"), relax.TensorType((), "bool")


def repeated(node: Node, count: Value, go: Value, state: Sequence[Value], step: Step) -> list[Value]:
    """The carried values, which keep their types and shapes, behind `count` (int64 scalar) steps, or those until the
    condition (bool scalar) fails; then each output of a step, stacked along a new first axis.

    Raises NodeError for values that change their types or ranks.
    """
    if any(isinstance(value, SequenceValue) for value in state):
        raise node.error(
            "it carries a sequence, and the number of steps is known by the run only, or the steps are too many to be "
            "written out.",
            "Fix the number of steps, with dims= (--dim) where it is a symbolic size.",
        )
    body = _body(node, state, step)
    run, builder = _run(node, body), node.importer.builder
    some = compute(node, "some", lambda _, n, go: tirx.all(n() > 0, go()), [count, go], (), dtype="bool")
    tensors = [node.tensor(v) for v in (count, go, *state)]
    with node.importer.scope() as steps:
        steps.result = relax.Call(run, [tensors[0], relax.const(0, "int64"), *tensors[1:], *body.captured])
    with node.importer.scope() as nothing:
        sizes = ((d, (0, *(0 if size is None else size for size in s))) for d, s in body.outputs)
        empty = (relax.op.zeros(_type(d, s).shape, storage_dtype(d)) for d, s in sizes)
        nothing.result = relax.Tuple([*tensors[1:], *map(builder.emit, empty)])
    parts = _Parts(node, body, builder.emit(relax.If(node.tensor(some), steps.sequence, nothing.sequence)))
    # What no step has changed is the same memory as before, and outputs of the model have their own.
    return [compute(node, "copy", lambda i, x: x(*i), [v], v.shape) for v in (*parts.state(), *parts.outputs())]


@dataclass
class _Body:
    """The function of one step, (i, go, *state, *captured) -> (go, *state, *outputs), each output [1, ...]."""

    carried: list[tuple[str, Shape]]  # element types and shapes of the state
    outputs: list[tuple[str, tuple[Size | None, ...]]]  # of what one step gives out; None: a size that data tells
    function: Any = None
    captured: list[Any] = field(default_factory=list)  # tensors around the loop that it reads, and a shape of symbols

    def types(self) -> list[Any]:
        """Of its parameters behind i."""
        return [_BOOL, *(_type(dtype, shape) for dtype, shape in self.carried)]

    def result(self) -> Any:
        """What `run` gives: the number of the outputs' steps is open."""
        ranks = [len(storage_shape(d, (0,) * len(s))) for d, s in self.outputs]
        open_ = [relax.TensorType(None, storage_dtype(d), ndim=n + 1) for n, (d, _) in zip(ranks, self.outputs)]
        return relax.TupleType([*self.types(), *open_])


def _body(node: Node, state: Sequence[Value], step: Step) -> _Body:
    body = _Body([(v.dtype, v.shape) for v in state], [])
    params = [relax.Var("i", _NUMBER), *(relax.Var(f"state{k}", kind) for k, kind in enumerate(body.types()))]
    with node.importer.scope() as scope:
        carried = [Value(v.dtype, v.shape, var) for v, var in zip(state, params[2:])]
        number = Value("int64", (), params[0])
        with node.importer.random.inside_step(number):
            goes_on, results = step(number, Value("bool", (), params[1]), carried)
        kept = [_kept(node, k, v, like) for k, (v, like) in enumerate(zip(results, state))]
        given = results[len(state) :]
        single = [reshape_to(node, v, (1, *v.shape)) for v in given]
        scope.result = relax.Tuple([node.tensor(v) for v in (reshape_to(node, goes_on, ()), *kept, *single)])
    body.outputs = [(v.dtype, (None,) * v.rank) for v in given]  # for the type of the result; the sizes follow
    free = (v for v in relax.analysis.free_vars(scope.sequence) if not isinstance(v.ty, PrimType))  # symbols: below
    tensors = [v for v in free if not _among(v, params)]
    function = relax.Function([*params, *tensors], scope.sequence, body.result(), is_pure=True)
    around = _symbols([p.ty for p in function.params])
    made = [s for s in relax.analysis.defined_symbolic_vars(function) if not _among(s, around)]
    body.outputs = [(v.dtype, tuple(None if _reads(size, made) else size for size in v.shape)) for v in given]
    sizes = _symbols([_type("int64", tuple(d for d in shape if d is not None)) for _, shape in body.outputs])
    symbols = [*around]
    for symbol in (*sizes, *relax.analysis.free_symbolic_vars(function)):
        if not _among(symbol, symbols):
            symbols.append(symbol)
    body.captured = [*tensors, *([relax.ShapeExpr(symbols)] if symbols else [])]
    more = [relax.Var("sizes", relax.ShapeType(symbols))] if symbols else []
    function = relax.Function([*function.params, *more], scope.sequence, body.result(), is_pure=True)
    body.function = node.importer.builder.add_func(relax.utils.copy_with_new_vars(function), "step")
    return body


def _symbols(types: Sequence[Any]) -> list[Any]:
    """Those of the types, each once."""
    found: list[Any] = []
    for symbol in (s for kind in types for s in relax.analysis.tir_vars_in_type(kind)):
        if not _among(symbol, found):
            found.append(symbol)
    return found


def _among(symbol: Any, symbols: Sequence[Any]) -> bool:
    return any(symbol.same_as(s) for s in symbols)


def _reads(size: Size, symbols: Sequence[Any]) -> bool:
    """Whether a size is computed of one of the symbols."""
    return any(_among(symbol, symbols) for symbol in _symbols([_type("int64", (size,))]))


def _kept(node: Node, k: int, value: Value, like: Value) -> Value:
    if value.dtype != like.dtype or value.rank != like.rank:
        kinds = [f"{v.dtype} of rank {v.rank}" for v in (like, value)]
        raise node.error(
            f"carried value {k} is {kinds[0]}, and {kinds[1]} behind a step.",
            "Where the number of steps is known by the run only, carried values keep their types and shapes.",
        )
    return asserted(node, value, like.shape, f"carried value {k} behind a step")


def _run(node: Node, body: _Body) -> Any:
    """The function `run`, (n, i, go, *state, *captured) -> (go, *state, *outputs), of at least one step."""
    builder = node.importer.builder
    params = [relax.Var("n", _NUMBER), relax.Var("i", _NUMBER)]
    params += [relax.Var(f"state{k}", kind) for k, kind in enumerate(body.types())]
    kinds = (relax.ShapeType(c.values) if isinstance(c, relax.ShapeExpr) else c.ty for c in body.captured)
    captured = [relax.Var(f"captured{k}", kind) for k, kind in enumerate(kinds)]
    count, at, go, *state = params
    empty = relax.Function.create_empty([*params, *captured], body.result())
    run = builder.add_func(relax.utils.copy_with_new_vars(empty), "run")
    with node.importer.scope() as scope:
        single, half, others, middle = _split(node, Value("int64", (), count), Value("int64", (), at))
        with node.importer.scope() as one:
            one.result = relax.Call(body.function, [at, go, *state, *captured])
        with node.importer.scope() as many:
            first = _Parts(node, body, builder.emit(relax.Call(run, [half, at, go, *state, *captured])))
            with node.importer.scope() as more:
                arguments = [others, middle, first.goes_on(), *map(node.tensor, first.state()), *captured]
                then = _Parts(node, body, builder.emit(relax.Call(run, arguments)))
                pairs = zip(first.outputs(), then.outputs())
                stacked = [join(node, [a, _alike(node, b, a)], 0) for a, b in pairs]
                more.result = relax.Tuple([then.goes_on(), *(node.tensor(v) for v in (*then.state(), *stacked))])
            with node.importer.scope() as enough:
                enough.result = first.tuple
            many.result = relax.If(first.goes_on(), more.sequence, enough.sequence)
        scope.result = relax.If(single, one.sequence, many.sequence)
    function = relax.Function([*params, *captured], scope.sequence, body.result(), is_pure=True)
    builder.update_func(run, relax.utils.copy_with_new_vars(function))
    return run


def _alike(node: Node, value: Value, like: Value) -> Value:
    """What later steps give out, whose sizes are those of earlier steps."""
    return asserted(node, value, (value.shape[0], *like.shape[1:]), "what a later step gives out")


def _split(node: Node, count: Value, at: Value) -> list[Any]:
    """Whether there is one step, how many are the first half and the second, and where that begins."""

    def statements(n: Any, i: Any, single: Any, half: Any, others: Any, middle: Any) -> None:
        first = tirx.shift_right(n[()], tirx.const(1, "int64"))
        for buffer, value in ((single, n[()] < 2), (half, first), (others, n[()] - first), (middle, i[()] + first)):
            T.buffer_store(buffer, value, [])

    outputs: list[tuple[Shape, str]] = [((), "bool"), ((), "int64"), ((), "int64"), ((), "int64")]
    return [node.tensor(v) for v in loops(node, "split", statements, [count, at], outputs)]


class _Parts:
    """What a call of `run` gives."""

    def __init__(self, node: Node, body: _Body, result: Any) -> None:
        self._node, self._body, self.tuple = node, body, result

    def _part(self, k: int) -> Any:
        return self._node.importer.builder.emit(relax.TupleGetItem(self.tuple, k))

    def goes_on(self) -> Any:
        return self._part(0)

    def state(self) -> list[Value]:
        return [Value(d, s, self._of(1 + k, _type(d, s))) for k, (d, s) in enumerate(self._body.carried)]

    def _of(self, k: int, kind: Any) -> Any:
        """A part, of this type; Relax may not see that it is."""
        part = self._part(k)
        return part if part.ty.shape is not None else self._node.importer.builder.match_cast(part, kind)

    def outputs(self) -> list[Value]:
        """Each [steps, ...], with a symbol for the number of steps."""
        if not self._body.outputs:
            return []
        steps, first = self._node.symbols.fresh("steps"), 1 + len(self._body.carried)
        shapes = [
            (dtype, (steps, *(self._node.symbols.fresh("size") if size is None else size for size in shape)))
            for dtype, shape in self._body.outputs
        ]
        return [Value(d, s, self._of(first + k, _type(d, s))) for k, (d, s) in enumerate(shapes)]


def _type(dtype: str, shape: Shape) -> Any:
    sizes = [tirx.IntImm("int64", d) if isinstance(d, int) else d for d in storage_shape(dtype, shape)]
    return relax.TensorType(relax.ShapeExpr(sizes), storage_dtype(dtype))
