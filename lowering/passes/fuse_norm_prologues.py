"""A norm and the products of its rows become one function, where the target has a kernel for both, on GPUs.

With few rows, as in a decode step, the norm costs a launch; the blocks of the matmul can compute it, each for itself
(schedules/cuda/prologue_matmul.py). What the norm makes stays a result of the function: others may read it, and where
rows are many it is written to memory as ever, and the matmul reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul

from ..importing.origins import Origins
from .main_function import BlockMutator, rewritten
from .stage_calls import Asked, StageCall, StageCalls, variables


def fuse_norm_prologues(mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, and where its calls come from."""
    fuser = _Fuser(mod, target, origins)
    return rewritten(mod, fuser), fuser.calls.origins


@mutator
class _Fuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.calls = StageCalls(mod, origins)
        self.asked = Asked(lambda function: schedules.variants(function, target))

    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """The bindings; a norm and the next that reads it as one, at the place of that."""
        place = {binding.var: n for n, binding in enumerate(given)}
        seen: set[relax.Var] = set()
        instead: dict[int, list[relax.Binding]] = {}
        for n, binding in enumerate(given):
            read = dict.fromkeys(variables(binding.value))
            for norm in [place[var] for var in read if var in place and var not in seen]:
                bound = self.one(given[norm], binding, kind)
                if bound:
                    instead |= {norm: [], n: bound}
                    break
            seen.update(read)
        return [new for n, binding in enumerate(given) for new in instead.get(n, [binding])]

    def one(self, norm: relax.Binding, matmul: relax.Binding, kind: type[relax.Var]) -> list[relax.Binding]:
        """Both as one call; none where the target has no kernel for it."""
        first, second = self.calls.stages(norm), self.calls.stages(matmul)
        if first is None or second is None or any(map(read_matmul, first)) or not any(map(read_matmul, second)):
            return []
        a, b = self.calls.read(norm, first, kind), self.calls.read(matmul, second, kind)
        call = StageCall(
            f"{a.name}_{b.name}", [*a.stages, *b.stages], [*a.outputs, *b.outputs],
            tuple(dict.fromkeys((*a.nodes, *b.nodes))), "", parts=(len(a.stages), len(b.stages)),
        )  # fmt: skip
        found = self.asked(call.function()[0])
        if found is None or found[0] != schedules.PROLOGUE_MATMUL:
            return []
        bound = self.calls.bound(call, kind, self.builder_)
        if len(b.outputs) > 1:
            self.fields[matmul.var] = [self.calls.names[buffer] for buffer in b.outputs]
            bound.append(relax.VarBinding(matmul.var, relax.Tuple(self.fields[matmul.var])))
        return bound
