"""Prologue fusion on GPUs: a norm and the matmuls of its rows become one function, if the target has a kernel.

With few rows, as in a decode step, the norm costs a launch; each thread block of the matmul can compute it instead
(schedules/cuda/fusion/prologue_matmul.py). The norm's result stays a result of the function, since other bindings may
read it. With many rows it is written to memory as before, and the matmul reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import relax
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul

from ...importing.origins import Origins
from ..compile_state import CompileState
from ..main_function import BlockMutator, rewrite_main
from .stage_calls import FunctionMemo, StageCall, StageCalls, list_reads


def fuse_norm_prologues(state: CompileState) -> CompileState:
    """Fuse norms into the matmuls that read them, where the target has a kernel for both."""
    fuser = _PrologueFuser(state.module, state.target.tvm, state.origins)
    return replace(state, module=rewrite_main(state.module, fuser), origins=fuser.calls.origins)


@mutator
class _PrologueFuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.calls = StageCalls(mod, origins)
        self.variants = FunctionMemo(lambda function: schedules.find_variants(function, target))

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """Return the bindings; a norm and its first reader are fused at the reader's position."""
        positions = {binding.var: n for n, binding in enumerate(bindings)}
        seen: set[relax.Var] = set()
        replacements: dict[int, list[relax.Binding]] = {}
        for n, binding in enumerate(bindings):
            read = dict.fromkeys(list_reads(binding.value))
            for norm in [positions[var] for var in read if var in positions and var not in seen]:
                fused = self.fuse_pair(bindings[norm], binding, kind)
                if fused:
                    replacements |= {norm: [], n: fused}
                    break
            seen.update(read)
        return [new for n, binding in enumerate(bindings) for new in replacements.get(n, [binding])]

    def fuse_pair(self, norm: relax.Binding, matmul: relax.Binding, kind: type[relax.Var]) -> list[relax.Binding]:
        """Return both as one call; [] if the target has no kernel for it."""
        first, second = self.calls.find_stages(norm), self.calls.find_stages(matmul)
        if first is None or second is None or any(map(read_matmul, first)) or not any(map(read_matmul, second)):
            return []
        a, b = self.calls.read_call(norm, first, kind), self.calls.read_call(matmul, second, kind)
        call = StageCall(
            f"{a.name}_{b.name}", [*a.stages, *b.stages], [*a.outputs, *b.outputs],
            tuple(dict.fromkeys((*a.nodes, *b.nodes))), "", stage_counts=(len(a.stages), len(b.stages)),
        )  # fmt: skip
        variant = self.variants(call.build_function()[0])
        if variant is None or variant[0] != schedules.PROLOGUE_MATMUL:
            return []
        new_bindings = self.calls.emit_bindings(call, kind, self.builder_)
        if len(b.outputs) > 1:
            self.fields[matmul.var] = [self.calls.names[buffer] for buffer in b.outputs]
            new_bindings.append(relax.VarBinding(matmul.var, relax.Tuple(self.fields[matmul.var])))
        return new_bindings
