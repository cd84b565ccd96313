"""Words: several numbers along k, side by side in 32 bits, which a machine multiplies at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr

from . import dot_bf16, dot_int8
from .vector import Machine


@dataclass(frozen=True)
class Words:
    """`together` numbers. Buffers hold words as elements of the type of the sums."""

    together: int
    of: Callable[[Expr], Expr]
    """Words of a vector of so many times as many numbers."""
    join: Callable[[list[Expr]], Expr]
    """The word of so many numbers, or of fewer and zeros."""
    dot: Callable[[Expr, Expr, Expr], Expr]
    """total + a . b in every lane."""
    using: Callable[[], AbstractContextManager[object]] = nullcontext
    """What is emitted inside may call `dot`."""


def words_for(a: str, b: str, acc: str, cpu: Machine) -> Words | None:
    """Words of such numbers, whose matmuls are added up in `acc`; None where they are multiplied one by one."""
    if cpu.bf16_dot and a == b == "bfloat16":
        return Words(2, dot_bf16.words_of, _pair, dot_bf16.dot, partial(dot_bf16.using_dot, True))
    if acc == "int32":
        return Words(4, dot_int8.words_of, dot_int8.word_of, partial(dot_int8.dot, cpu=cpu))
    return None


def _pair(numbers: list[Expr]) -> Expr:
    low, *high = numbers
    return dot_bf16.zip_rows(low, high[0] if high else None)
