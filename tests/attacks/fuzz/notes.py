"""Notes of the exceptions of a fuzz target: a file for each location that raised one, with the input."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The file with the current input, which stays when the process is killed.
CURRENT = "current"


def noted(attempt: Callable[[bytes], None], folder: Path) -> Callable[[bytes], None]:
    """Return the attempt, with its exceptions saved in files."""

    def run(data: bytes) -> None:
        (folder / CURRENT).write_bytes(data)
        try:
            attempt(data)
        except Exception as error:
            location = describe_location(error)
            digest = hashlib.sha256(location.encode()).hexdigest()[:12]
            path = folder / f"finding-{digest}"
            if not path.exists():
                path.write_bytes(data)
                path.with_suffix(".txt").write_text(f"{location}\n\n{''.join(traceback.format_exception(error))}")

    return run


def describe_location(error: BaseException) -> str:
    """Return type and location of an exception: the last frame of the compiler, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [f for f in frames if f.filename.startswith(str(ROOT / "lowering"))]
    last = [f"{Path(f.filename).name}:{f.name[:60]}" for f in (*own_frames[-1:], *frames[-1:])]
    return f"{type(error).__name__} at {' and '.join(dict.fromkeys(last))}"
