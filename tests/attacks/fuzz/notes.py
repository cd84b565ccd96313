"""What a fuzz target raises, kept in files: one for each place that raised it, with the input that did."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The file that holds the input in hand: what is left of it when the process is killed.
CURRENT = "current"


def noted(attempt: Callable[[bytes], None], folder: Path) -> Callable[[bytes], None]:
    """The attempt, with what it raises kept in files."""

    def run(data: bytes) -> None:
        (folder / CURRENT).write_bytes(data)
        try:
            attempt(data)
        except Exception as error:
            place = place_of(error)
            digest = hashlib.sha256(place.encode()).hexdigest()[:12]
            path = folder / f"finding-{digest}"
            if not path.exists():
                path.write_bytes(data)
                path.with_suffix(".txt").write_text(f"{place}\n\n{''.join(traceback.format_exception(error))}")

    return run


def place_of(error: BaseException) -> str:
    """Type and place of an exception: the last frame of the project, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(ROOT / "lowering"))]
    last = [f"{Path(f.filename).name}:{f.name[:60]}" for f in (*ours[-1:], *frames[-1:])]
    return f"{type(error).__name__} at {' and '.join(dict.fromkeys(last))}"
