"""Choice of the functions in which matmuls are computed: all that the matrix kernel supports, in separate functions.

Fusion groups operators by their order. This pass queries the target's matrix kernel instead
(schedules.accepts_siblings), after fusion:

1. A function with a matmul that the kernel does not support is split: matmuls become separate functions, with the
   adjacent element-wise stages that the kernel supports.
2. Matmuls of one matrix with several constant ones (gate and up, queries, keys and values) become one function. In it,
   readers of several of them are computed from the accumulators. An accumulator without other readers is never stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul
from schedules.reading.stages import Stage

from ...importing.origins import Origins, iterate_bindings
from ...tensorir.expressions import loads
from ..compile_state import CompileState
from ..main_function import BlockMutator, rewrite_main
from .stage_calls import FunctionMemo, StageCall, StageCalls, list_reads


def group_matmuls(state: CompileState) -> CompileState:
    """Move the matmuls of a module that FuseTIR wrote to functions of their own, alone or grouped."""
    grouper = _MatmulGrouper(state.module, state.target.tvm, state.origins)
    return replace(state, module=rewrite_main(state.module, grouper), origins=grouper.calls.origins)


_BlockItem: TypeAlias = StageCall | relax.Binding

_MAX_MATMULS = 6
"""Maximum number of matmuls of a function.

Code grows with each, and its compile time grows faster: there are dozens of matmuls of one style vector, or of a source
that all layers attend to. One layer has five: queries, keys, values, gate and up.
"""


@mutator
class _MatmulGrouper(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.calls = StageCalls(mod, origins)
        self.sibling_memo = FunctionMemo(lambda function: schedules.accepts_siblings(function, target))
        self.readers: Counter[relax.Var] = Counter()  # how often a variable is read
        body = mod["main"].body
        for expr in (body.body, *(binding.value for binding in iterate_bindings(body))):
            self.readers.update(list_reads(expr))

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        items: list[_BlockItem] = []
        for binding in bindings:
            stages = self.calls.find_stages(binding)
            has_matmul = stages is not None and any(read_matmul(stage) for stage in stages)
            call = self.calls.read_call(binding, stages, kind) if stages is not None and has_matmul else None
            calls = [] if call is None else self.split_call(call, kind)
            if call is None or (len(call.outputs) > 1 and len(calls) == 1):
                items.append(binding)
                continue
            items += calls
            if len(call.outputs) > 1:
                fields = relax.Tuple([self.calls.names[buffer] for buffer in call.outputs])
                items.append(relax.VarBinding(binding.var, fields))
        return [
            binding
            for item in self.join_calls(items)
            for binding in (
                self.calls.emit_bindings(item, kind, self.builder_) if isinstance(item, StageCall) else [item]
            )
        ]

    def accepts_siblings(self, call: StageCall) -> bool | None:
        """Return the rule's answer for the call's function (schedules.accepts_siblings)."""
        return self.sibling_memo(call.build_function()[0])

    # -- grouping -----------------------------------------------------------------------------------------------------

    def split_call(self, call: StageCall, kind: type[relax.Var]) -> list[StageCall]:
        """Return the call, or several calls if the kernel supports a matmul in it, but not the whole call."""
        if self.accepts_siblings(call) is not None:
            return [call]
        supported = [
            bool(stage.reduce) and self.accepts_siblings(_make_part(call, [stage])) is not None for stage in call.stages
        ]
        if not any(supported):
            return [call]
        segments: list[list[Stage]] = []
        has_matmul = False  # whether the last segment has a matmul that the kernel supports
        for stage, is_supported in zip(call.stages, supported):
            wider = [*segments[-1], stage] if segments else [stage]
            if not (has_matmul or is_supported) or self.accepts_siblings(_make_part(call, wider)) is not None:
                segments[-1:], has_matmul = [wider], has_matmul or is_supported
            else:
                segments.append([stage])
                has_matmul = is_supported
        if len(segments) == 1:
            return [call]
        calls = [_make_part(call, segment, f"{call.name}_{n}") for n, segment in enumerate(segments)]
        for buffer in (output for segment in calls for output in segment.outputs if output not in self.calls.names):
            variable = kind(buffer.name, relax.TensorType(relax.ShapeExpr(list(buffer.shape)), buffer.dtype))
            self.calls.tensors[variable], self.calls.names[buffer] = buffer, variable
        return calls

    def join_calls(self, items: Sequence[_BlockItem]) -> list[_BlockItem]:
        """Fuse matmuls of one tensor with constant matrices into one call, at the position of the first."""
        result: list[_BlockItem] = []
        producers: dict[tirx.Buffer, int] = {}  # the index of the item in the result that computes a tensor
        first: dict[tirx.Buffer, int] = {}  # the index of the item that multiplies a tensor
        for item in items:
            factor = self.find_shared_operand(item) if isinstance(item, StageCall) else None
            index = first.get(factor, -1) if factor is not None else -1
            joined = None
            if isinstance(item, StageCall) and index >= 0 and all(producers.get(b, -1) <= index for b in item.inputs()):
                joined = self.join_pair(result[index], item)
            if joined is not None:
                result[index] = joined
            else:
                index = len(result)
                result.append(item)
                if factor is not None:
                    first[factor] = index
            for output in item.outputs if isinstance(item, StageCall) else [self.calls.tensors.get(item.var)]:
                producers[output] = index
        return result

    def find_shared_operand(self, call: StageCall) -> tirx.Buffer | None:
        """Return the tensor that all matmuls of a call multiply by constant matrices."""
        if not self.accepts_siblings(call):
            return None
        sources = {p.a.source for p in map(read_matmul, call.stages) if p is not None}
        return sources.pop() if len(sources) == 1 else None

    def join_pair(self, a: _BlockItem, b: StageCall) -> StageCall | None:
        """Return two calls as one; None if the kernel does not support it, or has too many matmuls."""
        assert isinstance(a, StageCall)
        if sum(read_matmul(stage) is not None for stage in (*a.stages, *b.stages)) > _MAX_MATMULS:
            return None
        read = Counter(self.calls.names[buffer] for buffer in b.inputs() if buffer in self.calls.names)
        inside = [
            buffer for buffer in a.outputs if self.readers[self.calls.names[buffer]] <= read[self.calls.names[buffer]]
        ]
        outputs = [buffer for buffer in (*a.outputs, *b.outputs) if buffer not in inside]
        nodes = tuple(dict.fromkeys((*a.nodes, *b.nodes)))
        call = StageCall(f"{a.name}_{b.name}", [*a.stages, *b.stages], outputs, nodes, a.matmul_mode)
        return call if self.accepts_siblings(call) is not None else None


def _make_part(call: StageCall, stages: list[Stage], name: str = "") -> StageCall:
    """Return a call of some stages of a call; stages that others read are outputs."""
    other_stages = [stage for stage in call.stages if stage not in stages]
    read = {node.source for stage in other_stages for node in loads(stage.value)} | set(call.outputs)
    return StageCall(
        name, stages, [stage.output for stage in stages if stage.output in read], call.nodes, call.matmul_mode
    )
