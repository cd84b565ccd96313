"""Files that commands write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import LoweringError


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A file that is whole when it has its name: written beside it first. Raises LoweringError, which says where."""
    part = path.with_name(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise LoweringError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            part.unlink()
