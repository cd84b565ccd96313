"""How a candidate says what was chosen for it: a text, annotated to the block of its `main`.

The annotation is an instruction of the trace, so that what a database keeps says it too.
"""

from __future__ import annotations

import tvm
from tvm.s_tir import Schedule, Trace

from .task import MAIN

DEFAULT = "default"
"""The text of a function as `compile` makes it, where loops are what is searched."""

_CHOICE = "lowering.choice"
_ANNOTATE = "Annotate"


def annotate(schedule: Schedule, block: str, text: str) -> None:
    schedule.annotate(schedule.get_sblock(block, MAIN), _CHOICE, text)


def without(schedule: Schedule, block: str) -> tvm.IRModule:
    """The module without the annotation."""
    schedule.unannotate(schedule.get_sblock(block, MAIN), _CHOICE)
    return schedule.mod


def annotated(module: tvm.IRModule) -> str | None:
    """The text with which the module of a candidate is annotated."""
    text = module[MAIN].body.block.annotations.get(_CHOICE)
    return None if text is None else str(text)


def recorded(trace: Trace) -> str | None:
    """The same, of a trace."""
    texts = [str(i.inputs[1]) for i in trace.insts if i.kind.name == _ANNOTATE and str(i.attrs[0]) == _CHOICE]
    return texts[-1] if texts else None
