"""Kernels that compute new rows of a cache store them directly, on GPUs (schedules/cuda/cache/cache_rows.py).

The keys of a decoder are rotated, written, read again and moved to their slots by two small kernels, of which one waits
for the other. If an in-place update is the only reader of an element-wise function's result, one function does both, at
the position of the update. Its inputs must not be written before that, nor by the update.
"""

from __future__ import annotations

from dataclasses import replace

import schedules

from ..compile_state import CompileState
from .fuser import Fuser, fuse_groups
from .group import concatenate_groups


def fuse_cache_writes(state: CompileState) -> CompileState:
    """Return the module, without dataflow blocks, with in-place updates that compute their rows."""
    return fuse_groups(state, _find_cache_writes)


def _find_cache_writes(fuser: Fuser) -> None:
    for n, binding in enumerate(fuser.block.bindings):
        sole_reader = fuser.block.find_sole_reader(binding.var) if fuser.is_elementwise(n) else None
        if sole_reader is None or not fuser.is_update(sole_reader[1]):
            continue
        (views, reader), producer = sole_reader, fuser.read_group(n)
        update = fuser.read_update(reader, producer.stages[-1].output, producer.stages)
        group = replace(concatenate_groups((producer, update), ()), name=f"{producer.name}_into_cache")
        fuser.fuse(schedules.CACHE_UPDATE, group, (n, *views, reader))
