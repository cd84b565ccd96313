"""Packed lanes: several values along k in 32 bits, which one instruction multiplies (VNNI quadruples, bf16 pairs)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr

from ..primitives.vector import CpuFeatures
from . import dot_bf16, dot_int8


@dataclass(frozen=True)
class PackedLanes:
    """The packing of `k_per_lane` values of k into one 32-bit lane. Buffers hold packed lanes as accumulator
    elements."""

    k_per_lane: int
    pack_vector: Callable[[Expr], Expr]
    """Reinterpret a vector of n * k_per_lane values as n packed lanes."""
    pack_values: Callable[[list[Expr]], Expr]
    """Pack up to `k_per_lane` values into one lane; missing ones become zeros."""
    dot: Callable[[Expr, Expr, Expr], Expr]
    """Return total + a . b in every lane."""
    open_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Open the context in which emitted code may call `dot`."""


def choose_packing(a: str, b: str, acc: str, cpu: CpuFeatures) -> PackedLanes | None:
    """Return the packing of operands whose matmuls accumulate in `acc`, or None if values are multiplied one by one."""
    if cpu.bf16_dot and a == b == "bfloat16":
        return PackedLanes(2, dot_bf16.pack_vector, _pair, dot_bf16.dot, partial(dot_bf16.import_dot, True))
    if acc == "int32":
        return PackedLanes(4, dot_int8.pack_vector, dot_int8.pack_bytes, partial(dot_int8.dot, cpu=cpu))
    return None


def _pair(values: list[Expr]) -> Expr:
    low, *high = values
    return dot_bf16.interleave_rows(low, high[0] if high else None)
