"""Why a kernel does not take a function: said where that is decided, kept for whoever listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A kernel, and what it needs that does not hold."""

    kernel: str
    needs: tuple[str, ...]


_COLLECTED: ContextVar[list[Rejection] | None] = ContextVar("heard", default=None)


def fits(kernel: str, needs: Mapping[str, bool]) -> bool:
    """Whether all that the kernel needs holds, by what it says; what does not is told to who listens."""
    broken = tuple(need for need, holds in needs.items() if not holds)
    heard = _COLLECTED.get()
    if broken and heard is not None:
        heard.append(Rejection(kernel, broken))
    return not broken


@contextmanager
def collect_rejections() -> Iterator[list[Rejection]]:
    """Gives a list that fills with what kernels reject inside."""
    heard: list[Rejection] = []
    token = _COLLECTED.set(heard)
    try:
        yield heard
    finally:
        _COLLECTED.reset(token)
