"""The log of a command: what the library says by `logging`, under "lowering", on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stderr(logging.Handler):
    """What stderr is at the time: where a progress bar stands in for it, lines appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def shown(verbosity: int) -> Iterator[None]:
    """Around a command: stages for 1, all there is for 2."""
    handler, log = _Stderr(), logging.getLogger("lowering")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
