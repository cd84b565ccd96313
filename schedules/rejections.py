"""Reasons for which kernels reject a function: reported at the check, collected for the active collector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A kernel, and its unmet requirements."""

    kernel: str
    needs: tuple[str, ...]


_COLLECTED: ContextVar[list[Rejection] | None] = ContextVar("heard", default=None)


def fits(kernel: str, needs: Mapping[str, bool]) -> bool:
    """Return whether all requirements of the kernel are met; report unmet ones to the active collector.

    needs maps the text of each requirement to whether it is met.
    """
    unmet = tuple(need for need, is_met in needs.items() if not is_met)
    collected = _COLLECTED.get()
    if unmet and collected is not None:
        collected.append(Rejection(kernel, unmet))
    return not unmet


@contextmanager
def collect_rejections() -> Iterator[list[Rejection]]:
    """Yield a list to which the rejections of kernels inside the context are appended."""
    collected: list[Rejection] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)
