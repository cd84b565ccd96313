"""Matmuls of bytes whose rows are reduced and multiplied again become one function, so that no kernel need write to
memory what lies between them: attention as tools quantize it, whose scores and probabilities are codes.

A matmul, functions that read its results, and a matmul of what they make of them are joined where the matrices are
computed, nobody else reads anything between, and the target has a kernel that takes rows through all of it
(schedules/reading/row_parts.py). The function says which of its stages were one before. Nothing is computed otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul

from ..importing.origins import Origins, bindings
from .main_function import BlockMutator, rewritten
from .stage_calls import StageCall, StageCalls, callee, variables


def fuse_row_blocks(mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, and where its calls come from."""
    fuser = _Fuser(mod, target, origins)
    return rewritten(mod, fuser), fuser.calls.origins


@mutator
class _Fuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.target, self.calls = target, StageCalls(mod, origins)
        self.of_bytes: dict[ir.GlobalVar, bool] = {}  # whether functions multiply bytes
        self.readers: Counter[relax.Var] = Counter()  # how often a variable is read
        main = mod["main"]
        self.weights = set(main.params[int(main.attrs["num_input"]) :])
        body = main.body
        for expr in (body.body, *(binding.value for binding in bindings(body))):
            self.readers.update(variables(expr))

    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """The bindings, those that belong together as one in the place of the last."""
        instead: dict[int, list[relax.Binding]] = {}
        read = [variables(binding.value) for binding in given]
        for n, binding in enumerate(given):
            if n in instead or not self.multiplies_bytes(binding):
                continue
            places = self.chain(given, read, n)
            call = self.one(given, places, kind) if places else None
            if call is not None:
                instead |= {place: [] for place in places} | {places[-1]: self.calls.bound(call, kind, self.builder_)}
        return [new for n, binding in enumerate(given) for new in instead.get(n, [binding])]

    def multiplies_bytes(self, binding: relax.Binding) -> bool:
        """Whether a call's function holds matmuls, all of bytes."""
        name = callee(binding)
        if name is not None and name not in self.of_bytes:
            matmuls = [matmul for stage in self.calls.stages(binding) or () if (matmul := read_matmul(stage))]
            self.of_bytes[name] = bool(matmuls) and all(matmul.acc == "int32" for matmul in matmuls)
        return name is not None and self.of_bytes[name]

    def chain(self, given: Sequence[relax.Binding], read: Sequence[list[relax.Var]], first: int) -> list[int]:
        """Where the matmul, what reads its results and the next matmul are; empty where others read them, too. read
        is what each binding reads."""
        inside, places, uses = {given[first].var}, [first], 0
        for n in range(first + 1, len(given)):
            own = sum(var in inside for var in read[n])
            if not own:
                continue
            stages = self.calls.stages(given[n])
            if stages is None:
                return []
            places, uses = [*places, n], uses + own
            if any(map(read_matmul, stages)):
                alone = uses == sum(self.readers[var] for var in inside)
                return places if alone and self.multiplies_bytes(given[n]) else []
            inside.add(given[n].var)
        return []

    def one(self, given: Sequence[relax.Binding], places: Sequence[int], kind: type[relax.Var]) -> StageCall | None:
        """These calls as one, if the target has a kernel for it."""
        calls = []
        for place in places:
            stages = self.calls.stages(given[place])
            assert stages is not None
            calls.append(self.calls.read(given[place], stages, kind))
        first, *middle, last = calls
        if self.by_weights(first) or self.by_weights(last):
            return None
        parts = [part for part in (first.stages, [s for call in middle for s in call.stages], last.stages) if part]
        call = StageCall(
            "_".join(call.name for call in calls), [stage for part in parts for stage in part], last.outputs,
            tuple(dict.fromkeys(node for call in calls for node in call.nodes)), "", parts=tuple(map(len, parts)),
        )  # fmt: skip
        function, _ = call.function()
        found = schedules.variants(function, self.target)
        return call if found is not None and found[0] == schedules.ROW_BLOCKS else None

    def by_weights(self, call: StageCall) -> bool:
        """Whether a call multiplies by constants: all rows share what is made of them, not those of a block."""
        matrices = [self.calls.names.get(p.b.source) for p in map(read_matmul, call.stages) if p is not None]
        return any(matrix in self.weights or isinstance(matrix, ir.GenericConst) for matrix in matrices)
