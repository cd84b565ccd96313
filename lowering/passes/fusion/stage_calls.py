"""Calls of stage functions, read into stages over the caller's tensors, and written again.

They are for passes that draw other boundaries between functions than fusion does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from schedules.reading.epilogues import EpilogueUpdate
from schedules.reading.matmul import MATMULS, read_matmul
from schedules.reading.row_segments import SEGMENTS
from schedules.reading.stages import Axis, Stage, read_stages, replace_symbols, write_stages

from ...importing.origins import Origins
from ...tensorir.expressions import Expr, loads, walk
from ...tensorir.memo import Memo
from ...tensorir.scatter import emit_update

T = TypeVar("T")

_CALL_TIR = ir.Op.get("relax.call_tir")


@dataclass(frozen=True, eq=False)
class StageCall:
    """A call of a function of stages, over tensors and symbols of the caller; `outputs` are its results.

    nodes are the ONNX nodes that it computes. binding is the unchanged binding that it was read from, if any.
    matmul_mode is how float32 matmuls are computed (MATMULS), "" by default. stage_counts are the sizes of stage groups
    (PARTS). updates of caches follow the stages.
    """

    name: str
    stages: list[Stage]
    outputs: list[tirx.Buffer]
    nodes: tuple[str, ...]
    matmul_mode: str
    binding: relax.Binding | None = None
    stage_counts: tuple[int, ...] = ()
    updates: tuple[EpilogueUpdate, ...] = ()

    def inputs(self) -> list[tirx.Buffer]:
        computed = {stage.output for stage in self.stages}
        read = [node.source for stage in self.stages for node in loads(stage.value)]
        read += [buffer for update in self.updates for buffer in update.inputs()]
        return [buffer for buffer in dict.fromkeys(read) if buffer not in computed]

    def build_function(self) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
        """Return the function, and its arguments before outputs: tensors, and integers that are not sizes of these."""
        tensors = [*self.inputs(), *self.outputs]
        bound = {extent for buffer in tensors for extent in buffer.shape}
        bound |= {axis.var for stage in self.stages for axis in (*stage.axes, *stage.reduce)}
        used = [*(extent for buffer in tensors for extent in buffer.shape), *self._expressions()]
        free = (node for expr in used for node in walk(expr) if isinstance(node, tirx.Var) and node not in bound)
        arguments = [*self.inputs(), *dict.fromkeys(free)]
        func = write_stages(self.stages, [*arguments, *self.outputs], self._write_updates)
        if self.matmul_mode and any(map(read_matmul, self.stages)):
            func = func.with_attr(MATMULS, self.matmul_mode)
        if self.stage_counts:
            func = func.with_attr(SEGMENTS, list(self.stage_counts))
        return func, arguments

    def _write_updates(self, to_buffer: Callable[[tirx.Buffer], tirx.Buffer]) -> None:
        for update in self.updates:
            indices = None if update.indices is None else to_buffer(update.indices)
            emit_update(EpilogueUpdate(update.record, to_buffer(update.rows), to_buffer(update.cache), indices).bound())

    def _expressions(self) -> Iterator[Expr]:
        for stage in self.stages:
            yield from (*(axis.extent for axis in (*stage.axes, *stage.reduce)), *stage.output.shape, stage.value)


class FunctionMemo(Generic[T]):
    """Memoizes a query about functions, shared by equal ones: a model has the same functions in every layer."""

    def __init__(self, query: Callable[[tirx.PrimFunc], T]) -> None:
        self._question = query
        self._answers = Memo[T]()

    def __call__(self, function: tirx.PrimFunc) -> T:
        return self._answers(function, self._question)


def read_callee(binding: relax.Binding) -> ir.GlobalVar | None:
    """Return the TensorIR function that a binding calls, None if it calls none."""
    value = binding.value
    return value.args[0] if isinstance(value, relax.Call) and value.op == _CALL_TIR else None


def list_reads(expr: relax.Expr) -> list[relax.Var]:
    """Return all variables that an expression reads, each as often as it is read."""
    reads: list[relax.Var] = []
    tvm_ffi.structural_walk(expr, (relax.Var, reads.append))
    return reads


class StageCalls:
    """The calls of a module's `main`: each tensor of the caller is a buffer."""

    def __init__(self, mod: tvm.IRModule, origins: Origins) -> None:
        self.mod, self.origins = mod, dict(origins)
        self.tensors: dict[relax.Expr, tirx.Buffer] = {}  # buffers of the caller's tensors
        self.names: dict[tirx.Buffer, relax.Expr] = {}  # the inverse

    def find_stages(self, binding: relax.Binding) -> list[Stage] | None:
        """Return the stages of the function that a binding calls, None if it is not a stage function."""
        name = read_callee(binding)
        return None if name is None else read_stages(self.mod[name])

    def get_buffer(self, expr: relax.Expr, name: str) -> tirx.Buffer:
        if expr not in self.tensors:
            self.tensors[expr] = tirx.decl_buffer(list(expr.ty.shape.values), str(expr.ty.dtype), name)
            self.names[self.tensors[expr]] = expr
        return self.tensors[expr]

    def read_call(self, binding: relax.Binding, stages: list[Stage], kind: type[relax.Var]) -> StageCall:
        """Return the call of a function of these stages."""
        value = binding.value
        func = self.mod[value.args[0]]
        arguments = list(value.args[1].fields)
        symbols: dict[tirx.Var, Expr] = {}
        tensors: dict[tirx.Buffer, tirx.Buffer] = {}
        fields = binding.var.ty.fields if isinstance(binding.var.ty, relax.TupleType) else None
        results = [kind(f"{binding.var.name}_{n}", ty) for n, ty in enumerate(fields)] if fields else [binding.var]
        for param, expr in zip(func.params, (*arguments, *results), strict=True):
            if tirx.is_buffer_var(param):
                tensors[param] = self.get_buffer(expr, param.name)
                symbols.update((a, b) for a, b in zip(param.shape, expr.ty.shape.values) if isinstance(a, tirx.Var))
            else:
                symbols[param] = expr
        for stage in stages:  # calls of one function have separate intermediate buffers
            shape = [replace_symbols(extent, {}, symbols) for extent in stage.output.shape]
            tensors.setdefault(stage.output, tirx.decl_buffer(shape, stage.output.dtype, stage.output.name))
        outputs, nodes = [self.tensors[result] for result in results], self.origins.get(binding.var.name, ())
        moved = [_rename_stage(stage, tensors, symbols) for stage in stages]
        multiplied = str(func.attrs.get(MATMULS, ""))
        return StageCall(value.args[0].name_hint, moved, outputs, nodes, multiplied, binding)

    def emit_bindings(self, item: StageCall, kind: type[relax.Var], builder: relax.BlockBuilder) -> list[relax.Binding]:
        """Return the bindings that compute a call; its function is added to the builder."""
        if item.binding is not None:
            return [item.binding]
        function, arguments = item.build_function()
        variable = builder.add_func(function, item.name)
        results = [self.names[buffer] for buffer in item.outputs]
        types = [result.ty for result in results]
        call = relax.call_tir(
            variable, [self.names.get(var, var) for var in arguments], types if types[1:] else types[0]
        )
        call = builder.normalize(call)
        if len(results) == 1:
            self.origins[results[0].name] = item.nodes
            return [relax.VarBinding(results[0], call)]
        results_tuple = kind("_".join(result.name for result in results), relax.TupleType(types))
        self.origins[results_tuple.name] = item.nodes
        fields = [builder.normalize(relax.TupleGetItem(results_tuple, n)) for n in range(len(results))]
        return [relax.VarBinding(results_tuple, call), *map(relax.VarBinding, results, fields)]


def _rename_stage(stage: Stage, tensors: Mapping[tirx.Buffer, tirx.Buffer], symbols: Mapping[tirx.Var, Expr]) -> Stage:
    axes, reduce = (
        tuple(Axis(axis.var, replace_symbols(axis.extent, {}, symbols)) for axis in group)
        for group in (stage.axes, stage.reduce)
    )
    init = None if stage.init is None else replace_symbols(stage.init, tensors, symbols)
    return Stage(tensors[stage.output], axes, reduce, init, replace_symbols(stage.value, tensors, symbols))
