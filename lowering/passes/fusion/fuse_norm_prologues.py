"""Prologue fusion on GPUs: a norm and the matmuls of its rows become one function, if the target has a kernel.

With few rows, as in a decode step, the norm costs a launch; each thread block of the matmul can compute it instead
(schedules/cuda/fusion/fused_matmul.py). The norm's result stays a result of the function, since other bindings may
read it. With many rows it is written to memory as before, and the matmul reads it there.
"""

from __future__ import annotations

import schedules

from ..compile_state import CompileState
from .fuser import Fuser, fuse_groups
from .group import concatenate_groups


def fuse_norm_prologues(state: CompileState) -> CompileState:
    """Fuse norms into the matmuls that read them, where the target has a kernel for both."""
    return fuse_groups(state, _find_prologues)


def _find_prologues(fuser: Fuser) -> None:
    """Fuse each norm into its first reader."""
    block = fuser.block
    for n, read in enumerate(block.reads):
        if not fuser.read_function(n)[1]:
            continue
        for norm in [block.positions[var] for var in dict.fromkeys(read) if var in block.positions]:
            stages, matmuls = fuser.read_function(norm)
            if stages and not matmuls and block.readers[block.bindings[norm].var][0] == n:
                group = concatenate_groups((fuser.read_group(norm), fuser.read_group(n)))
                if fuser.fuse(schedules.PROLOGUE_MATMUL, group, (norm, n)):
                    break
