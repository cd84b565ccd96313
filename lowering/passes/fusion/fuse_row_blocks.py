"""Back-to-back GEMM fusion: int8 matmuls whose rows are reduced and multiplied again become one function.

No kernel then needs to write the intermediate results to memory. An example is attention as tools quantize it, with
quantized scores and probabilities.

A matmul, functions that read its results, and a matmul of their results are fused under three conditions: both matrices
are computed, no other binding reads intermediate results, and the target has a kernel for the whole chain
(schedules/reading/row_segments.py). The function records the boundaries of its original functions. Results are
unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.matmul import read_matmul

from ...importing.origins import Origins, iterate_bindings
from ..compile_state import CompileState
from ..main_function import BlockMutator, rewrite_main
from .stage_calls import StageCall, StageCalls, list_reads, read_callee


def fuse_row_blocks(state: CompileState) -> CompileState:
    """Fuse back-to-back int8 matmuls, where the target has a kernel for the chain."""
    fuser = _RowBlockFuser(state.module, state.target.tvm, state.origins)
    return replace(state, module=rewrite_main(state.module, fuser), origins=fuser.calls.origins)


@mutator
class _RowBlockFuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.target, self.calls = target, StageCalls(mod, origins)
        self.int8_functions: dict[ir.GlobalVar, bool] = {}  # whether functions are int8 matmuls
        self.readers: Counter[relax.Var] = Counter()  # how often a variable is read
        main = mod["main"]
        self.weights = set(main.params[int(main.attrs["num_input"]) :])
        body = main.body
        for expr in (body.body, *(binding.value for binding in iterate_bindings(body))):
            self.readers.update(list_reads(expr))

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """Return the bindings, with chains fused at the position of their last binding."""
        replacements: dict[int, list[relax.Binding]] = {}
        read = [list_reads(binding.value) for binding in bindings]
        for n, binding in enumerate(bindings):
            if n in replacements or not self.is_int8_matmul(binding):
                continue
            positions = self.find_chain(bindings, read, n)
            call = self.fuse_chain(bindings, positions, kind) if positions else None
            if call is not None:
                replacements |= {position: [] for position in positions} | {
                    positions[-1]: self.calls.emit_bindings(call, kind, self.builder_)
                }
        return [new for n, binding in enumerate(bindings) for new in replacements.get(n, [binding])]

    def is_int8_matmul(self, binding: relax.Binding) -> bool:
        """Return whether a call's function has matmuls, all of them int8."""
        name = read_callee(binding)
        if name is not None and name not in self.int8_functions:
            matmuls = [matmul for stage in self.calls.find_stages(binding) or () if (matmul := read_matmul(stage))]
            self.int8_functions[name] = bool(matmuls) and all(matmul.acc == "int32" for matmul in matmuls)
        return name is not None and self.int8_functions[name]

    def find_chain(self, bindings: Sequence[relax.Binding], read: Sequence[list[relax.Var]], first: int) -> list[int]:
        """Return the positions of the matmul, the readers of its results and the next matmul.

        Return [] if other bindings read intermediate results. read are the reads of each binding.
        """
        inside, positions, use_count = {bindings[first].var}, [first], 0
        for n in range(first + 1, len(bindings)):
            chain_reads = sum(var in inside for var in read[n])
            if not chain_reads:
                continue
            stages = self.calls.find_stages(bindings[n])
            if stages is None:
                return []
            positions, use_count = [*positions, n], use_count + chain_reads
            if any(map(read_matmul, stages)):
                is_sole_reader = use_count == sum(self.readers[var] for var in inside)
                return positions if is_sole_reader and self.is_int8_matmul(bindings[n]) else []
            inside.add(bindings[n].var)
        return []

    def fuse_chain(
        self, bindings: Sequence[relax.Binding], positions: Sequence[int], kind: type[relax.Var]
    ) -> StageCall | None:
        """Return these calls as one, None if the target has no kernel for it."""
        calls = []
        for position in positions:
            stages = self.calls.find_stages(bindings[position])
            assert stages is not None
            calls.append(self.calls.read_call(bindings[position], stages, kind))
        first, *middle, last = calls
        if self.has_weight_matrix(first) or self.has_weight_matrix(last):
            return None
        segments = [
            segment for segment in (first.stages, [s for call in middle for s in call.stages], last.stages) if segment
        ]
        call = StageCall(
            "_".join(call.name for call in calls), [stage for segment in segments for stage in segment], last.outputs,
            tuple(dict.fromkeys(node for call in calls for node in call.nodes)), "",
            stage_counts=tuple(map(len, segments)),
        )  # fmt: skip
        function, _ = call.build_function()
        variant = schedules.find_variants(function, self.target)
        return call if variant is not None and variant[0] == schedules.ROW_BLOCKS else None

    def has_weight_matrix(self, call: StageCall) -> bool:
        """Return whether a call multiplies by constants: all rows share their preparation, those of a block do not."""
        matrices = [self.calls.names.get(p.b.source) for p in map(read_matmul, call.stages) if p is not None]
        return any(matrix in self.weights or isinstance(matrix, ir.GenericConst) for matrix in matrices)
