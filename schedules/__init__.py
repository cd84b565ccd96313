"""How functions run on a target: ordered rules that replace plain TensorIR by fast kernels."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from lowering.tensorir.blocks import FORM

from . import cpu, cuda
from .variant import Choose, Code, Variant, made

ATTRIBUTE = "lowering.schedule"
"""Of a function that a rule made: the name of the rule."""

SOURCE = "lowering.source"
"""Of such a function whose tiles were chosen from outside: where they come from."""

LOOPS = "loops"
"""In place of a rule's name: the function is scheduled by what is not ours (variant.Code)."""

RULES = {"llvm": cpu.RULES, "cuda": cuda.RULES}
"""By kind of target. A rule answers with variants, functions of the same parameters, or None for "not mine"."""

_JOINS = {"llvm": cpu.joins, "cuda": cuda.joins}


def apply(mod: tvm.IRModule, target: tvm.target.Target, choose: Choose | None = None) -> tvm.IRModule:
    """Replaces each PrimFunc by a variant of the first rule of the target that has any; the others stay as they are.

    choose says which variant, and its tiles; without it the default of each is taken. Name, parameters and attributes
    of a function survive: its callers need not know. ATTRIBUTE is added.

    Raises ValueError for a choice that does not exist or is illegal.
    """
    scheduled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            scheduled.update_func(name, _scheduled(func, target, choose))
    return scheduled


def variants(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[str, Sequence[Variant]] | None:
    """The name of the first rule of the target that takes a function, and the ways to run it, the default first."""
    for rule in RULES.get(target.kind.name, ()):
        found = rule(func, target)
        if found:
            return rule.__name__, found
    return None


def joins(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether a function that holds products is one of the target's rule for these, and others may join it: False where
    it is full, None where the rule does not take it."""
    return _JOINS[target.kind.name](func, target)


def _scheduled(func: tirx.PrimFunc, target: tvm.target.Target, choose: Choose | None) -> tirx.PrimFunc:
    rule, found = variants(func, target) or ("", ())
    choice = None if choose is None else choose(func, found)
    if not found and choice is None:
        return func
    new = made(func, found, choice)
    for key, value in func.attrs.items():
        if key != FORM:
            new = new.with_attr(key, value)
    made_by = LOOPS if isinstance(choice, Code) else rule
    return new.with_attr({ATTRIBUTE: made_by, **({SOURCE: choice.source} if choice and choice.source else {})})
