"""Back-to-back GEMM fusion: int8 matmuls whose rows are reduced and multiplied again become one function.

No kernel then needs to write the intermediate results to memory. An example is attention as tools quantize it, with
quantized scores and probabilities.

A matmul, functions that read its results, and a matmul of their results are fused under three conditions: both matrices
are computed, no other binding reads intermediate results, and the target has a kernel for the whole chain
(schedules/reading/row_segments.py). The function records the boundaries of its original functions. Results are
unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, relax

import schedules
from schedules.reading.matmul import read_matmul

from ..compile_state import CompileState
from .fuser import Fuser, fuse_groups
from .group import FusionGroup, concatenate_groups


def fuse_row_blocks(state: CompileState) -> CompileState:
    """Fuse back-to-back int8 matmuls, where the target has a kernel for the chain."""
    main = state.module["main"]
    weights = set(main.params[int(main.attrs["num_input"]) :])
    return fuse_groups(state, lambda fuser: _find_chains(fuser, weights))


def _find_chains(fuser: Fuser, weights: set[relax.Var]) -> None:
    for n in range(len(fuser.block.bindings)):
        positions = [] if n in fuser.replacements or not _is_int8_matmul(fuser, n) else _find_chain(fuser, n)
        groups = list(map(fuser.read_group, positions))
        if not groups or any(_has_weight_matrix(fuser, weights, group) for group in (groups[0], groups[-1])):
            continue
        middle = [stage for group in groups[1:-1] for stage in group.stages]
        segments = tuple(segment for segment in (groups[0].stages, middle, groups[-1].stages) if segment)
        group = replace(concatenate_groups(groups, groups[-1].outputs), segments=segments)
        fuser.fuse(schedules.ROW_BLOCKS, group, positions)


def _is_int8_matmul(fuser: Fuser, n: int) -> bool:
    """Return whether a call's function has matmuls, all of them int8."""
    matmuls = fuser.read_function(n)[1]
    return bool(matmuls) and all(matmul.acc == "int32" for matmul in matmuls)


def _find_chain(fuser: Fuser, first: int) -> list[int]:
    """Return the positions of the matmul, the readers of its results and the next matmul.

    Return [] if other bindings read intermediate results.
    """
    block = fuser.block
    inside, positions, use_count = {block.bindings[first].var}, [first], 0
    for n in range(first + 1, len(block.bindings)):
        chain_reads = sum(var in inside for var in block.reads[n])
        if not chain_reads:
            continue
        stages, matmuls = fuser.read_function(n)
        if not stages:
            return []
        positions, use_count = [*positions, n], use_count + chain_reads
        if matmuls:
            is_sole_reader = use_count == sum(block.uses[var] for var in inside)
            return positions if is_sole_reader and _is_int8_matmul(fuser, n) else []
        inside.add(block.bindings[n].var)
    return []


def _has_weight_matrix(fuser: Fuser, weights: set[relax.Var], group: FusionGroup) -> bool:
    """Return whether a group multiplies by constants: all rows share their preparation, those of a block do not."""
    matrices = [fuser.names.get(matmul.b.source) for matmul in map(read_matmul, group.stages) if matmul is not None]
    return any(matrix in weights or isinstance(matrix, ir.GenericConst) for matrix in matrices)
