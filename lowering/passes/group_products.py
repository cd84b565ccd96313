"""Which functions products are computed in: what the matrix kernel takes is in a function of its own, and whole.

Fusion puts operators together by the order in which they stand. What the target's matrix kernel takes is another
question, which this pass asks it (schedules.joins), after fusion:

1. A function that holds a product and is not taken as it is, is cut: products stand alone, with the element-wise stages
   around them that the kernel takes.
2. Products of one matrix with several constant ones (gate and up, queries, keys and values) become one function, in
   which what reads several of them is computed from the sums. A sum that nobody else reads is never stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

import schedules
from schedules.reading.product import PRODUCTS, read_product
from schedules.reading.stages import Axis, Stage, read_stages, renamed, write_stages

from ..importing.origins import Origins, bindings
from ..tensorir.expressions import Expr, loads, walk
from .main_function import rewritten

_CALL_TIR = ir.Op.get("relax.call_tir")


def group_products(mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, which FuseTIR wrote, with other functions around its products, and where these come from."""
    grouper = _Grouper(mod, target, origins)
    return rewritten(mod, grouper), grouper.origins


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a function of stages, over tensors and symbols of the caller, of which `outputs` are results.

    nodes are the ONNX nodes that it computes; binding is what it was read from, while that is all it is. multiplied is
    how products of float32 are computed (PRODUCTS), "" as usual.
    """

    name: str
    stages: list[Stage]
    outputs: list[tirx.Buffer]
    nodes: tuple[str, ...]
    multiplied: str
    binding: relax.Binding | None = None

    def inputs(self) -> list[tirx.Buffer]:
        made = {stage.output for stage in self.stages}
        read = (node.source for stage in self.stages for node in loads(stage.value))
        return [buffer for buffer in dict.fromkeys(read) if buffer not in made]

    def function(self) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
        """The function, and what it takes before its outputs: tensors, and integers that are no size of these."""
        tensors = [*self.inputs(), *self.outputs]
        known = {extent for buffer in tensors for extent in buffer.shape}
        known |= {axis.var for stage in self.stages for axis in (*stage.axes, *stage.reduce)}
        used = [*(extent for buffer in tensors for extent in buffer.shape), *self._expressions()]
        free = (node for expr in used for node in walk(expr) if isinstance(node, tirx.Var) and node not in known)
        given = [*self.inputs(), *dict.fromkeys(free)]
        func = write_stages(self.stages, [*given, *self.outputs])
        if self.multiplied and any(map(read_product, self.stages)):
            func = func.with_attr(PRODUCTS, self.multiplied)
        return func, given

    def _expressions(self) -> Iterator[Expr]:
        for stage in self.stages:
            yield from (*(axis.extent for axis in (*stage.axes, *stage.reduce)), *stage.output.shape, stage.value)


_Item: TypeAlias = _Call | relax.Binding


@mutator
class _Grouper(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.mod, self.target, self.origins = mod, target, dict(origins)
        self.tensors: dict[relax.Expr, tirx.Buffer] = {}  # what the caller has
        self.names: dict[tirx.Buffer, relax.Expr] = {}  # the other way round
        self.answers: dict[int, list[tuple[tirx.PrimFunc, bool | None]]] = {}
        self.readers: Counter[relax.Var] = Counter()  # how often a variable is read
        body = mod["main"].body
        for expr in (body.body, *(binding.value for binding in bindings(body))):
            tvm_ffi.structural_walk(expr, (relax.Var, lambda var: self.readers.update([var])))

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return relax.BindingBlock(self.regrouped(super().visit_binding_block_(block).bindings, relax.Var))

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        return relax.DataflowBlock(self.regrouped(super().visit_dataflow_block_(block).bindings, relax.DataflowVar))

    def regrouped(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        items: list[_Item] = []
        for binding in given:
            call = self.read(binding, kind)
            parts = [] if call is None else self.cut(call, kind)
            if call is None or (len(call.outputs) > 1 and len(parts) == 1):
                items.append(binding)
                continue
            items += parts
            if len(call.outputs) > 1:
                fields = relax.Tuple([self.names[buffer] for buffer in call.outputs])
                items.append(relax.VarBinding(binding.var, fields))
        return [b for item in self.joined(items) for b in self.bound(item, kind)]

    # -- between calls and their stages -------------------------------------------------------------------------------

    def tensor(self, expr: relax.Expr, name: str) -> tirx.Buffer:
        if expr not in self.tensors:
            self.tensors[expr] = tirx.decl_buffer(list(expr.ty.shape.values), str(expr.ty.dtype), name)
            self.names[self.tensors[expr]] = expr
        return self.tensors[expr]

    def read(self, binding: relax.Binding, kind: type[relax.Var]) -> _Call | None:
        """A call of a function that holds a product of matrices."""
        value = binding.value
        if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
            return None
        func = self.mod[value.args[0]]
        stages = read_stages(func)
        if not stages or not any(read_product(stage) for stage in stages):
            return None
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
        multiplied = str(func.attrs.get(PRODUCTS, ""))
        return _Call(value.args[0].name_hint, moved, outputs, nodes, multiplied, binding)

    def bound(self, item: _Item, kind: type[relax.Var]) -> list[relax.Binding]:
        """The bindings that compute a call."""
        if not isinstance(item, _Call):
            return [item]
        if item.binding is not None:
            return [item.binding]
        function, given = item.function()
        variable = self.builder_.add_func(function, item.name)
        results = [self.names[buffer] for buffer in item.outputs]
        types = [result.ty for result in results]
        call = relax.call_tir(variable, [self.names.get(var, var) for var in given], types if types[1:] else types[0])
        call = self.builder_.normalize(call)
        if len(results) == 1:
            self.origins[results[0].name] = item.nodes
            return [relax.VarBinding(results[0], call)]
        both = kind("_".join(result.name for result in results), relax.TupleType(types))
        self.origins[both.name] = item.nodes
        fields = [self.builder_.normalize(relax.TupleGetItem(both, n)) for n in range(len(results))]
        return [relax.VarBinding(both, call), *map(relax.VarBinding, results, fields)]

    def joins(self, call: _Call) -> bool | None:
        """What the rule says of the call's function (schedules.joins); functions that are equal are asked for once."""
        function, _ = call.function()
        known = self.answers.setdefault(tvm_ffi.structural_hash(function), [])
        for other, answer in known:
            if tvm_ffi.structural_equal(other, function):
                return answer
        known.append((function, schedules.joins(function, self.target)))
        return known[-1][1]

    # -- what belongs together ----------------------------------------------------------------------------------------

    def cut(self, call: _Call, kind: type[relax.Var]) -> list[_Call]:
        """The call, or calls of its parts where the kernel takes a product in it, but not with all that is there."""
        if self.joins(call) is not None:
            return [call]
        taken = [bool(stage.reduce) and self.joins(_part(call, [stage])) is not None for stage in call.stages]
        if not any(taken):
            return [call]
        parts: list[list[Stage]] = []
        holds = False  # a product that the kernel takes is in the last part
        for stage, is_taken in zip(call.stages, taken):
            wider = [*parts[-1], stage] if parts else [stage]
            if not (holds or is_taken) or self.joins(_part(call, wider)) is not None:
                parts[-1:], holds = [wider], holds or is_taken
            else:
                parts.append([stage])
                holds = is_taken
        if len(parts) == 1:
            return [call]
        calls = [_part(call, part, f"{call.name}_{n}") for n, part in enumerate(parts)]
        for buffer in (output for part in calls for output in part.outputs if output not in self.names):
            variable = kind(buffer.name, relax.TensorType(relax.ShapeExpr(list(buffer.shape)), buffer.dtype))
            self.tensors[variable], self.names[buffer] = buffer, variable
        return calls

    def joined(self, items: Sequence[_Item]) -> list[_Item]:
        """Products of one tensor with constant ones as one call, at the place of the first."""
        result: list[_Item] = []
        made: dict[tirx.Buffer, int] = {}  # by what item of the result
        first: dict[tirx.Buffer, int] = {}  # the item that multiplies a tensor
        for item in items:
            factor = self.factor(item) if isinstance(item, _Call) else None
            place = first.get(factor, -1) if factor is not None else -1
            both = None
            if isinstance(item, _Call) and place >= 0 and all(made.get(b, -1) <= place for b in item.inputs()):
                both = self.both(result[place], item)
            if both is not None:
                result[place] = both
            else:
                place = len(result)
                result.append(item)
                if factor is not None:
                    first[factor] = place
            for output in item.outputs if isinstance(item, _Call) else [self.tensors.get(item.var)]:
                made[output] = place
        return result

    def factor(self, call: _Call) -> tirx.Buffer | None:
        """The tensor that all products of a call multiply by constant matrices."""
        if not self.joins(call):
            return None
        sources = {p.a.source for p in map(read_product, call.stages) if p is not None}
        return sources.pop() if len(sources) == 1 else None

    def both(self, a: _Item, b: _Call) -> _Call | None:
        """Two calls as one; None where the kernel does not take it."""
        assert isinstance(a, _Call)
        read = Counter(self.names[buffer] for buffer in b.inputs() if buffer in self.names)
        inside = [buffer for buffer in a.outputs if self.readers[self.names[buffer]] <= read[self.names[buffer]]]
        outputs = [buffer for buffer in (*a.outputs, *b.outputs) if buffer not in inside]
        nodes = tuple(dict.fromkeys((*a.nodes, *b.nodes)))
        call = _Call(f"{a.name}_{b.name}", [*a.stages, *b.stages], outputs, nodes, a.multiplied)
        return call if self.joins(call) is not None else None


def _part(call: _Call, stages: list[Stage], name: str = "") -> _Call:
    """Some stages of a call; what others read of them are outputs."""
    others = [stage for stage in call.stages if stage not in stages]
    read = {node.source for stage in others for node in loads(stage.value)} | set(call.outputs)
    return _Call(name, stages, [stage.output for stage in stages if stage.output in read], call.nodes, call.multiplied)


def _renamed(stage: Stage, tensors: Mapping[tirx.Buffer, tirx.Buffer], symbols: Mapping[tirx.Var, Expr]) -> Stage:
    axes, reduce = (
        tuple(Axis(axis.var, renamed(axis.extent, {}, symbols)) for axis in part) for part in (stage.axes, stage.reduce)
    )
    init = None if stage.init is None else renamed(stage.init, tensors, symbols)
    return Stage(tensors[stage.output], axes, reduce, init, renamed(stage.value, tensors, symbols))
