"""Calls of functions of stages, read into stages over what the caller has, and written anew: for passes that draw the
lines between functions otherwise than fusion does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from schedules.reading.epilogues import Update
from schedules.reading.matmul import MATMULS, read_matmul
from schedules.reading.row_parts import PARTS
from schedules.reading.stages import Axis, Stage, read_stages, renamed, write_stages

from ..importing.origins import Origins
from ..tensorir.expressions import Expr, loads, walk
from ..tensorir.memo import Memo
from ..tensorir.scatter import write

T = TypeVar("T")

_CALL_TIR = ir.Op.get("relax.call_tir")


@dataclass(frozen=True, eq=False)
class StageCall:
    """A call of a function of stages, over tensors and symbols of the caller, of which `outputs` are results.

    nodes are the ONNX nodes that it computes; binding is what it was read from, while that is all it is. multiplied is
    how matmuls of float32 are computed (MATMULS), "" as usual; parts are how many stages belong together (PARTS).
    updates of caches come behind the stages.
    """

    name: str
    stages: list[Stage]
    outputs: list[tirx.Buffer]
    nodes: tuple[str, ...]
    multiplied: str
    binding: relax.Binding | None = None
    parts: tuple[int, ...] = ()
    updates: tuple[Update, ...] = ()

    def inputs(self) -> list[tirx.Buffer]:
        made = {stage.output for stage in self.stages}
        read = [node.source for stage in self.stages for node in loads(stage.value)]
        read += [buffer for update in self.updates for buffer in update.inputs()]
        return [buffer for buffer in dict.fromkeys(read) if buffer not in made]

    def function(self) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
        """The function, and what it takes before its outputs: tensors, and integers that are no size of these."""
        tensors = [*self.inputs(), *self.outputs]
        known = {extent for buffer in tensors for extent in buffer.shape}
        known |= {axis.var for stage in self.stages for axis in (*stage.axes, *stage.reduce)}
        used = [*(extent for buffer in tensors for extent in buffer.shape), *self._expressions()]
        free = (node for expr in used for node in walk(expr) if isinstance(node, tirx.Var) and node not in known)
        given = [*self.inputs(), *dict.fromkeys(free)]
        func = write_stages(self.stages, [*given, *self.outputs], self._write_updates)
        if self.multiplied and any(map(read_matmul, self.stages)):
            func = func.with_attr(MATMULS, self.multiplied)
        if self.parts:
            func = func.with_attr(PARTS, list(self.parts))
        return func, given

    def _write_updates(self, own: Callable[[tirx.Buffer], tirx.Buffer]) -> None:
        for each in self.updates:
            indices = None if each.indices is None else own(each.indices)
            write(Update(each.record, own(each.rows), own(each.cache), indices).bound())

    def _expressions(self) -> Iterator[Expr]:
        for stage in self.stages:
            yield from (*(axis.extent for axis in (*stage.axes, *stage.reduce)), *stage.output.shape, stage.value)


class Asked(Generic[T]):
    """What is asked about functions, once about those that are equal: a model has the same ones in every layer."""

    def __init__(self, question: Callable[[tirx.PrimFunc], T]) -> None:
        self._question = question
        self._answers = Memo[T]()

    def __call__(self, function: tirx.PrimFunc) -> T:
        return self._answers(function, self._question)


def callee(binding: relax.Binding) -> ir.GlobalVar | None:
    """The function that a binding calls, None where it calls none of TensorIR."""
    value = binding.value
    return value.args[0] if isinstance(value, relax.Call) and value.op == _CALL_TIR else None


def variables(expr: relax.Expr) -> list[relax.Var]:
    """All that an expression reads, as often as it does."""
    found: list[relax.Var] = []
    tvm_ffi.structural_walk(expr, (relax.Var, found.append))
    return found


class StageCalls:
    """The calls of a module's `main`: tensors of the caller are buffers, one for each."""

    def __init__(self, mod: tvm.IRModule, origins: Origins) -> None:
        self.mod, self.origins = mod, dict(origins)
        self.tensors: dict[relax.Expr, tirx.Buffer] = {}  # what the caller has
        self.names: dict[tirx.Buffer, relax.Expr] = {}  # the other way round

    def stages(self, binding: relax.Binding) -> list[Stage] | None:
        """Those of the function that a binding calls, None where it calls none of stages."""
        name = callee(binding)
        return None if name is None else read_stages(self.mod[name])

    def tensor(self, expr: relax.Expr, name: str) -> tirx.Buffer:
        if expr not in self.tensors:
            self.tensors[expr] = tirx.decl_buffer(list(expr.ty.shape.values), str(expr.ty.dtype), name)
            self.names[self.tensors[expr]] = expr
        return self.tensors[expr]

    def read(self, binding: relax.Binding, stages: list[Stage], kind: type[relax.Var]) -> StageCall:
        """The call of a function of these stages."""
        value = binding.value
        func = self.mod[value.args[0]]
        given = list(value.args[1].fields)
        symbols: dict[tirx.Var, Expr] = {}
        tensors: dict[tirx.Buffer, tirx.Buffer] = {}
        fields = binding.var.ty.fields if isinstance(binding.var.ty, relax.TupleType) else None
        results = [kind(f"{binding.var.name}_{n}", ty) for n, ty in enumerate(fields)] if fields else [binding.var]
        for param, expr in zip(func.params, (*given, *results), strict=True):
            if tirx.is_buffer_var(param):
                tensors[param] = self.tensor(expr, param.name)
                symbols.update((a, b) for a, b in zip(param.shape, expr.ty.shape.values) if isinstance(a, tirx.Var))
            else:
                symbols[param] = expr
        for stage in stages:  # calls of one function have insides of their own
            shape = [renamed(extent, {}, symbols) for extent in stage.output.shape]
            tensors.setdefault(stage.output, tirx.decl_buffer(shape, stage.output.dtype, stage.output.name))
        outputs, nodes = [self.tensors[result] for result in results], self.origins.get(binding.var.name, ())
        moved = [_renamed(stage, tensors, symbols) for stage in stages]
        multiplied = str(func.attrs.get(MATMULS, ""))
        return StageCall(value.args[0].name_hint, moved, outputs, nodes, multiplied, binding)

    def bound(self, item: StageCall, kind: type[relax.Var], builder: relax.BlockBuilder) -> list[relax.Binding]:
        """The bindings that compute a call, whose function is added to what is built."""
        if item.binding is not None:
            return [item.binding]
        function, given = item.function()
        variable = builder.add_func(function, item.name)
        results = [self.names[buffer] for buffer in item.outputs]
        types = [result.ty for result in results]
        call = relax.call_tir(variable, [self.names.get(var, var) for var in given], types if types[1:] else types[0])
        call = builder.normalize(call)
        if len(results) == 1:
            self.origins[results[0].name] = item.nodes
            return [relax.VarBinding(results[0], call)]
        both = kind("_".join(result.name for result in results), relax.TupleType(types))
        self.origins[both.name] = item.nodes
        fields = [builder.normalize(relax.TupleGetItem(both, n)) for n in range(len(results))]
        return [relax.VarBinding(both, call), *map(relax.VarBinding, results, fields)]


def _renamed(stage: Stage, tensors: Mapping[tirx.Buffer, tirx.Buffer], symbols: Mapping[tirx.Var, Expr]) -> Stage:
    axes, reduce = (
        tuple(Axis(axis.var, renamed(axis.extent, {}, symbols)) for axis in part) for part in (stage.axes, stage.reduce)
    )
    init = None if stage.init is None else renamed(stage.init, tensors, symbols)
    return Stage(tensors[stage.output], axes, reduce, init, renamed(stage.value, tensors, symbols))
