"""How functions run on a target: ordered rules that replace plain TensorIR by fast kernels."""

from __future__ import annotations

import tvm
from tvm import tirx

from . import cpu

RULES = {"llvm": cpu.RULES}
"""By kind of target. A rule answers with a function of the same parameters, or None for "not mine"."""


def apply(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Replaces each PrimFunc by the answer of the first rule of the target that has one; the others stay as they are.

    Name, parameters and attributes of a function survive: its callers need not know.
    """
    rules = RULES.get(target.kind.name, ())
    scheduled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            new = next((new for rule in rules if (new := rule(func, target)) is not None), func)
            for key, value in func.attrs.items() if new is not func else ():
                new = new.with_attr(key, value)
            scheduled.update_func(name, new)
    return scheduled
