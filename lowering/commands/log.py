"""The log of a command: messages of the logger "lowering", on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stderr(logging.Handler):
    """A handler for the current stderr: where a progress bar replaces it, lines appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def show_log(verbosity: int) -> Iterator[None]:
    """Show the log of a command: stages for 1, everything for 2."""
    handler, log = _Stderr(), logging.getLogger("lowering")
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(previous_level)
