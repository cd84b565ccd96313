"""What a compile is at: for who watches it, the name of a stage and how many of its parts are done; for the log
"lowering", how long each stage took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Watch: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, and how many of how many parts of it are done; of none where nobody can say."""

LOG = logging.getLogger("lowering")
"""Of stages and what takes long at level INFO, of every pass and kernel at DEBUG."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(by: Watch) -> Iterator[None]:
    """Around compiling: `by` is told of each stage as it begins, and of its parts as they end."""
    before = _watch.set(by)
    try:
        yield
    finally:
        _watch.reset(before)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Around a stage: who watches is told as it begins, and the log as it ends."""
    at(name)
    begin = time.perf_counter()
    yield
    LOG.info("%s: %.2f s", name, time.perf_counter() - begin)


def at(stage: str, done: int = 0, of: int = 0) -> None:
    """Tells who watches, if somebody does."""
    watch = _watch.get()
    if watch is not None:
        watch(stage, done, of)
