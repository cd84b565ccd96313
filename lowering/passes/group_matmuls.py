"""Which functions matmuls are computed in: what the matrix kernel takes is in a function of its own, and whole.

Fusion puts operators together by the order in which they stand. What the target's matrix kernel takes is another
question, which this pass asks it (schedules.accepts_siblings), after fusion:

1. A function that holds a matmul and is not taken as it is, is cut: matmuls stand alone, with the element-wise stages
   around them that the kernel takes.
2. Matmuls of one matrix with several constant ones (gate and up, queries, keys and values) become one function, in
   which what reads several of them is computed from the sums. A sum that nobody else reads is never stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul
from schedules.reading.stages import Stage

from ..importing.origins import Origins, bindings
from ..tensorir.expressions import loads
from .main_function import BlockMutator, rewritten
from .stage_calls import Asked, StageCall, StageCalls, variables


def group_matmuls(mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, which FuseTIR wrote, with other functions around its matmuls, and where these come from."""
    grouper = _Grouper(mod, target, origins)
    return rewritten(mod, grouper), grouper.calls.origins


_Item: TypeAlias = StageCall | relax.Binding

_MOST = 6
"""Matmuls of a function. Code grows with each, and the time to compile it by more than that: matmuls of one style
vector, or of a source that all layers look at, are dozens. One layer has five: queries, keys, values, gate and up.
"""


@mutator
class _Grouper(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.calls = StageCalls(mod, origins)
        self.asked = Asked(lambda function: schedules.accepts_siblings(function, target))
        self.readers: Counter[relax.Var] = Counter()  # how often a variable is read
        body = mod["main"].body
        for expr in (body.body, *(binding.value for binding in bindings(body))):
            self.readers.update(variables(expr))

    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        items: list[_Item] = []
        for binding in given:
            stages = self.calls.stages(binding)
            holds = stages is not None and any(read_matmul(stage) for stage in stages)
            call = self.calls.read(binding, stages, kind) if stages is not None and holds else None
            parts = [] if call is None else self.cut(call, kind)
            if call is None or (len(call.outputs) > 1 and len(parts) == 1):
                items.append(binding)
                continue
            items += parts
            if len(call.outputs) > 1:
                fields = relax.Tuple([self.calls.names[buffer] for buffer in call.outputs])
                items.append(relax.VarBinding(binding.var, fields))
        return [
            binding
            for item in self.joined(items)
            for binding in (self.calls.bound(item, kind, self.builder_) if isinstance(item, StageCall) else [item])
        ]

    def accepts_siblings(self, call: StageCall) -> bool | None:
        """What the rule says of the call's function (schedules.accepts_siblings)."""
        return self.asked(call.function()[0])

    # -- what belongs together ----------------------------------------------------------------------------------------

    def cut(self, call: StageCall, kind: type[relax.Var]) -> list[StageCall]:
        """The call, or calls of its parts where the kernel takes a matmul in it, but not with all that is there."""
        if self.accepts_siblings(call) is not None:
            return [call]
        taken = [
            bool(stage.reduce) and self.accepts_siblings(_part(call, [stage])) is not None for stage in call.stages
        ]
        if not any(taken):
            return [call]
        parts: list[list[Stage]] = []
        holds = False  # a matmul that the kernel takes is in the last part
        for stage, is_taken in zip(call.stages, taken):
            wider = [*parts[-1], stage] if parts else [stage]
            if not (holds or is_taken) or self.accepts_siblings(_part(call, wider)) is not None:
                parts[-1:], holds = [wider], holds or is_taken
            else:
                parts.append([stage])
                holds = is_taken
        if len(parts) == 1:
            return [call]
        calls = [_part(call, part, f"{call.name}_{n}") for n, part in enumerate(parts)]
        for buffer in (output for part in calls for output in part.outputs if output not in self.calls.names):
            variable = kind(buffer.name, relax.TensorType(relax.ShapeExpr(list(buffer.shape)), buffer.dtype))
            self.calls.tensors[variable], self.calls.names[buffer] = buffer, variable
        return calls

    def joined(self, items: Sequence[_Item]) -> list[_Item]:
        """Matmuls of one tensor with constant ones as one call, at the place of the first."""
        result: list[_Item] = []
        made: dict[tirx.Buffer, int] = {}  # by what item of the result
        first: dict[tirx.Buffer, int] = {}  # the item that multiplies a tensor
        for item in items:
            factor = self.factor(item) if isinstance(item, StageCall) else None
            place = first.get(factor, -1) if factor is not None else -1
            both = None
            if isinstance(item, StageCall) and place >= 0 and all(made.get(b, -1) <= place for b in item.inputs()):
                both = self.both(result[place], item)
            if both is not None:
                result[place] = both
            else:
                place = len(result)
                result.append(item)
                if factor is not None:
                    first[factor] = place
            for output in item.outputs if isinstance(item, StageCall) else [self.calls.tensors.get(item.var)]:
                made[output] = place
        return result

    def factor(self, call: StageCall) -> tirx.Buffer | None:
        """The tensor that all matmuls of a call multiply by constant matrices."""
        if not self.accepts_siblings(call):
            return None
        sources = {p.a.source for p in map(read_matmul, call.stages) if p is not None}
        return sources.pop() if len(sources) == 1 else None

    def both(self, a: _Item, b: StageCall) -> StageCall | None:
        """Two calls as one; None where the kernel does not take it, or they are too many."""
        assert isinstance(a, StageCall)
        if sum(read_matmul(stage) is not None for stage in (*a.stages, *b.stages)) > _MOST:
            return None
        read = Counter(self.calls.names[buffer] for buffer in b.inputs() if buffer in self.calls.names)
        inside = [
            buffer for buffer in a.outputs if self.readers[self.calls.names[buffer]] <= read[self.calls.names[buffer]]
        ]
        outputs = [buffer for buffer in (*a.outputs, *b.outputs) if buffer not in inside]
        nodes = tuple(dict.fromkeys((*a.nodes, *b.nodes)))
        call = StageCall(f"{a.name}_{b.name}", [*a.stages, *b.stages], outputs, nodes, a.multiplied)
        return call if self.accepts_siblings(call) is not None else None


def _part(call: StageCall, stages: list[Stage], name: str = "") -> StageCall:
    """Some stages of a call; what others read of them are outputs."""
    others = [stage for stage in call.stages if stage not in stages]
    read = {node.source for stage in others for node in loads(stage.value)} | set(call.outputs)
    return StageCall(
        name, stages, [stage.output for stage in stages if stage.output in read], call.nodes, call.multiplied
    )
