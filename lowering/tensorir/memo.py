"""Results cached for equal functions, or for equal expressions over the same variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import tvm_ffi

T = TypeVar("T")


class Memo(Generic[T]):
    """Results by the expression or function they were computed from, as long as the memo lives."""

    def __init__(self) -> None:
        self._answers: dict[int, list[tuple[Any, T]]] = {}

    def __call__(self, node: Any, answer: Callable[[Any], T]) -> T:
        """Return the result for an expression or function, cached from an equal one if there is one."""
        candidates = self._answers.setdefault(tvm_ffi.structural_hash(node), [])
        for other, result in candidates:
            if tvm_ffi.structural_equal(other, node):
                return result
        candidates.append((node, answer(node)))
        return candidates[-1][1]
