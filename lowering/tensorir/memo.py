"""Answers that are found again for equal functions, or for equal expressions over the same variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import tvm_ffi

T = TypeVar("T")


class Memo(Generic[T]):
    """Answers by what was asked about, for as long as who holds it lives."""

    def __init__(self) -> None:
        self._answers: dict[int, list[tuple[Any, T]]] = {}

    def __call__(self, node: Any, answer: Callable[[Any], T]) -> T:
        """Return the answer for a node, an expression or a function; the one for an equal node where there is one."""
        known = self._answers.setdefault(tvm_ffi.structural_hash(node), [])
        for other, found in known:
            if tvm_ffi.structural_equal(other, node):
                return found
        known.append((node, answer(node)))
        return known[-1][1]
