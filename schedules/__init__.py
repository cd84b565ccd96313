"""Schedules of functions for a target: ordered rules that replace plain TensorIR by fast kernels.

The compiler asks this package alone, never its folders `cpu` and `cuda`: which rule schedules a function, how weights
are packed, and what a device can do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import tvm
from tvm import tirx

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE

from . import cpu, cuda
from .cpu import CpuFeatures as CpuFeatures
from .cpu import choose_row_block as choose_row_block
from .cpu import panel_width as panel_width
from .cpu import read_cpu_features as read_cpu_features
from .cpu import remove_unused_features as remove_unused_features
from .cuda import CHUNK_BYTES as CHUNK_BYTES
from .cuda import DEVICES as DEVICES
from .cuda import KernelLaunch as KernelLaunch
from .cuda import count_packed_heads as count_packed_heads
from .cuda import early_launch as early_launch
from .cuda import merge_launches as merge_launches
from .cuda import read_launch as read_launch
from .reading.quantized_weights import QUAD as QUAD
from .rejections import collect_rejections
from .variant import Choose, ExternalCode, Variant, describe_choice, made

ATTRIBUTE = "lowering.schedule"
"""Attribute of a function that a rule scheduled: the name of the rule."""

SOURCE = "lowering.source"
"""Attribute of a scheduled function whose tiles were chosen externally: their origin."""

CODE = "lowering.code"
"""Attribute of a function for which `CodeLookup` has a key: that key."""

CONSIDERED = "lowering.considered"
"""Attribute of a function that was examined, as JSON, for readers of a dump.

It has the variants of the rule, the chosen one with its tiles (variant.describe_choice), and the kernels that rejected
the function, by their unmet requirements (rejections.py).
"""

LOOPS = "loops"
"""The value of ATTRIBUTE of a function scheduled by external code (variant.ExternalCode)."""

RULES = {"llvm": cpu.RULES, "cuda": cuda.RULES}
"""Rules by kind of target. A rule returns variants, functions of the same parameters, or None if it does not apply."""

ROW_BLOCKS = "row_blocks"
"""The name of the rule for rows that go through several matmuls (reading/row_segments.py), on targets that have one."""

PROLOGUE_MATMUL = "prologue_matmul"
"""The name of the rule for matmuls with a fused prologue, on targets that have one."""

EPILOGUE_MATMUL = "epilogue_matmul"
"""The name of the rule for matmuls with fused epilogues (reading/epilogues.py), on targets that have one."""

CACHE_UPDATE = "cache_update"
"""The name of the rule for cache updates, which may have an element-wise function that computes the rows."""

_ACCEPTS_SIBLINGS = {"llvm": cpu.accepts_siblings, "cuda": cuda.accepts_siblings}


class CodeLookup(Protocol):
    """Finds out for which kernels there is compiled code in a cache."""

    def key(self, func: tirx.PrimFunc, how: str) -> str | None:
        """Return the cache key of a function with this schedule; None if its code cannot be identified."""

    def has(self, key: str) -> bool:
        """Return whether the cache has that code."""


def apply_schedules(
    mod: tvm.IRModule, target: tvm.target.Target, choose: Choose | None = None, code_lookup: CodeLookup | None = None
) -> tvm.IRModule:
    """Replace each PrimFunc by a variant of the first rule of the target that has any; the others stay unchanged.

    choose selects the variant and its tiles; without it the default of each is used. Name, parameters and attributes of
    a function are preserved for its callers. ATTRIBUTE is added. A function whose code is cached stays unchanged,
    except for added attributes.

    Raises ValueError for a choice that does not exist or is illegal.
    """
    scheduled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            scheduled.update_func(name, _scheduled(func, target, choose, code_lookup))
    return scheduled


def find_variants(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[str, Sequence[Variant]] | None:
    """Return the name of the first rule of the target that accepts a function, and its variants, the default first."""
    for rule in RULES.get(target.kind.name, ()):
        rule_variants = rule(func, target)
        if rule_variants:
            return rule.__name__, rule_variants
    return None


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Return whether a function with matmuls is accepted by the target's rule for these, and can take further matmuls.

    It is False if the function is full, None if the rule does not accept it.
    """
    return _ACCEPTS_SIBLINGS[target.kind.name](func, target)


def min_seconds(flops: int, size: int, target: tvm.target.Target) -> float:
    """Return the shortest time of a GPU for so many operations, or to read and write so many bytes."""
    return cuda.min_seconds(flops, size, cuda.device(target))


def _scheduled(
    func: tirx.PrimFunc, target: tvm.target.Target, choose: Choose | None, code_lookup: CodeLookup | None
) -> tirx.PrimFunc:
    with collect_rejections() as rejected:
        rule, rule_variants = find_variants(func, target) or ("", ())
    choice = None if choose is None else choose(func, rule_variants)
    notes: dict[str, Any] = {"rejected": {rejection.kernel: rejection.needs for rejection in rejected}}
    if not rule_variants and choice is None:
        return func.with_attr(CONSIDERED, json.dumps(notes)) if rejected else func
    marks = {ATTRIBUTE: LOOPS if isinstance(choice, ExternalCode) else rule}
    if choice is not None and choice.source:
        marks[SOURCE] = choice.source
    if code_lookup is not None and not isinstance(choice, ExternalCode):
        key = code_lookup.key(func, repr((rule, choice)))
        if key is not None:
            marks[CODE] = key
            if code_lookup.has(key):
                return func.with_attr(marks)
    new = made(func, rule_variants, choice)
    notes |= {"variants": [variant.name for variant in rule_variants], "chosen": describe_choice(rule_variants, choice)}
    marks[CONSIDERED] = json.dumps(notes)
    for name, value in func.attrs.items():
        if name != BLOCK_ATTRIBUTE:
            new = new.with_attr(name, value)
    return new.with_attr(marks)
