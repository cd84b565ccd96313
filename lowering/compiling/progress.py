"""Progress of a compile: the current stage and its steps for a watcher, durations of stages for the log "lowering"."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Watch: TypeAlias = Callable[[str, int, int], None]
"""A function of a stage, its completed steps and its total steps; the total is 0 if it is unknown."""

LOG = logging.getLogger("lowering")
"""Logs stages and slow passes at level INFO, every pass and kernel at DEBUG."""

_current_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watch_progress(watch: Watch) -> Iterator[None]:
    """Report the progress of a compile to `by`: each stage as it begins, and its steps as they end."""
    before = _current_watch.set(watch)
    try:
        yield
    finally:
        _current_watch.reset(before)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Report a stage to the watcher as it begins, and to the log as it ends."""
    report(name)
    begin = time.perf_counter()
    yield
    LOG.info("%s: %.2f s", name, time.perf_counter() - begin)


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Report progress to the watcher, if there is one."""
    watch = _current_watch.get()
    if watch is not None:
        watch(stage, done, total)
