"""The choice of a candidate: a text that annotates the block of its `main`.

The annotation is an instruction of the trace, so that records in a database have it too.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, Trace

from .task import MAIN

DEFAULT = "default"
"""The choice for the function that `compile` generates by default, when loops are searched."""

ROOT = "root"
"""The block that is annotated when loops are searched."""

_CHOICE = "lowering.choice"
_ANNOTATE = "Annotate"


def annotate_choice(schedule: Schedule, block: str, text: str) -> None:
    """Annotate a block of the candidate with its choice."""
    schedule.annotate(schedule.get_sblock(block, MAIN), _CHOICE, text)


def strip_choice(schedule: Schedule, block: str) -> tvm.IRModule:
    """Return the module without the annotation."""
    schedule.unannotate(schedule.get_sblock(block, MAIN), _CHOICE)
    return schedule.mod


def read_choice(module: tvm.IRModule) -> str | None:
    """Return the choice that annotates the module of a candidate."""
    text = module[MAIN].body.block.annotations.get(_CHOICE)
    return None if text is None else str(text)


def extract_scheduled_function(module: tvm.IRModule) -> tirx.PrimFunc | None:
    """Return the function of a candidate, or None for the unscheduled default."""
    if read_choice(module) in (None, DEFAULT):
        return None
    return strip_choice(Schedule(module), ROOT)[MAIN]


def read_trace_choice(trace: Trace) -> str | None:
    """Return the choice that a trace annotates."""
    texts = [str(i.inputs[1]) for i in trace.insts if i.kind.name == _ANNOTATE and str(i.attrs[0]) == _CHOICE]
    return texts[-1] if texts else None
