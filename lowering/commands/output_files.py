"""Output files of commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import LoweringError


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the file is complete.

    Raises:
        LoweringError: The file cannot be written; the text names it.
    """
    temporary = path.with_name(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise LoweringError(
            "argument.path_unwritable", f"'{path}' cannot be written: {error.strerror or error}."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
