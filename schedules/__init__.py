"""How functions run on a target: ordered rules that replace plain TensorIR by fast kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import tvm
from tvm import tirx

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE

from . import cpu, cuda
from .rejections import collect_rejections
from .variant import Choose, ExternalCode, Variant, describe_choice, made

ATTRIBUTE = "lowering.schedule"
"""Of a function that a rule made: the name of the rule."""

SOURCE = "lowering.source"
"""Of such a function whose tiles were chosen from outside: where they come from."""

CODE = "lowering.code"
"""Of a function that `Known` was asked about: the key that it gave."""

CONSIDERED = "lowering.considered"
"""Of a function that was looked at, as JSON: which variants the rule had, which of them runs with which tiles
(variant.described), and which kernels rejected, by what they need (rejections.py). For those who read a dump."""

LOOPS = "loops"
"""In place of a rule's name: the function is scheduled by what is not ours (variant.Code)."""

RULES = {"llvm": cpu.RULES, "cuda": cuda.RULES}
"""By kind of target. A rule answers with variants, functions of the same parameters, or None for "not mine"."""

ROW_BLOCKS = "row_blocks"
"""The name of the rule that takes rows through several matmuls (reading/row_segments.py), where a target has one."""

PROLOGUE_MATMUL = "prologue_matmul"
"""The name of the rule that takes matmuls whose rows are computed first, where a target has one."""

EPILOGUE_MATMUL = "epilogue_matmul"
"""The name of the rule that takes matmuls with epilogues (reading/epilogues.py), where a target has one."""

_ACCEPTS_SIBLINGS = {"llvm": cpu.accepts_siblings, "cuda": cuda.accepts_siblings}


class CodeLookup(Protocol):
    """Tells of which kernels there is code, from before."""

    def key(self, func: tirx.PrimFunc, how: str) -> str | None:
        """What stands for the code of a function that is scheduled so; None where nobody will know."""

    def has(self, key: str) -> bool:
        """Whether there is that code."""


def apply_schedules(
    mod: tvm.IRModule, target: tvm.target.Target, choose: Choose | None = None, known: CodeLookup | None = None
) -> tvm.IRModule:
    """Replaces each PrimFunc by a variant of the first rule of the target that has any; the others stay as they are.

    choose says which variant, and its tiles; without it the default of each is taken. Name, parameters and attributes
    of a function survive: its callers need not know. ATTRIBUTE is added. A function whose code is known stays as it is,
    but for what is said of it.

    Raises ValueError for a choice that does not exist or is illegal.
    """
    scheduled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            scheduled.update_func(name, _scheduled(func, target, choose, known))
    return scheduled


def find_variants(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[str, Sequence[Variant]] | None:
    """The name of the first rule of the target that takes a function, and the ways to run it, the default first."""
    for rule in RULES.get(target.kind.name, ()):
        found = rule(func, target)
        if found:
            return rule.__name__, found
    return None


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether a function that holds matmuls is one of the target's rule for these, and others may join it: False where
    it is full, None where the rule does not take it."""
    return _ACCEPTS_SIBLINGS[target.kind.name](func, target)


def _scheduled(
    func: tirx.PrimFunc, target: tvm.target.Target, choose: Choose | None, known: CodeLookup | None
) -> tirx.PrimFunc:
    with collect_rejections() as rejected:
        rule, found = find_variants(func, target) or ("", ())
    choice = None if choose is None else choose(func, found)
    noted: dict[str, Any] = {"rejected": {each.kernel: each.needs for each in rejected}}
    if not found and choice is None:
        return func.with_attr(CONSIDERED, json.dumps(noted)) if rejected else func
    marks = {ATTRIBUTE: LOOPS if isinstance(choice, ExternalCode) else rule}
    if choice is not None and choice.source:
        marks[SOURCE] = choice.source
    if known is not None and not isinstance(choice, ExternalCode):
        key = known.key(func, repr((rule, choice)))
        if key is not None:
            marks[CODE] = key
            if known.has(key):
                return func.with_attr(marks)
    new = made(func, found, choice)
    noted |= {"variants": [variant.name for variant in found], "chosen": describe_choice(found, choice)}
    marks[CONSIDERED] = json.dumps(noted)
    for name, value in func.attrs.items():
        if name != BLOCK_ATTRIBUTE:
            new = new.with_attr(name, value)
    return new.with_attr(marks)
