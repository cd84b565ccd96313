"""Whether there is a file of a model, before anything that takes time is imported."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path

from ..errors import ModelError
from ..manifest import FILE

_ENDING = ".onnx"
_ENTRIES = 10_000  # of a folder that are compared with a misspelt name


def check_model_file(path: Path) -> None:
    """Raise ModelError for a missing file, with similar names in its folder."""
    if path.is_dir():
        what = "a compiled artifact" if (path / FILE).is_file() else "a folder"
        raise ModelError(f"{path} is {what}, and no .onnx file: name the model's file.")
    if not path.is_file():
        near = _near(path)
        raise ModelError(
            f"There is no file {path}." + (f" Did you mean {' or '.join(map(str, near))}?" if near else "")
        )


def _near(path: Path) -> list[Path]:
    """Return files whose path differs from this one in the name of one folder, or of the file, by a few letters."""
    try:
        missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _ENTRIES)]
        rest = path.relative_to(missing)
        if missing == path:  # the ending, which all have, would make all of them alike
            stems = [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]
            near = [stem + _ENDING for stem in difflib.get_close_matches(path.name.removesuffix(_ENDING), stems)]
        else:
            near = difflib.get_close_matches(missing.name, names)
        return [file for name in near if (file := missing.with_name(name) / rest).is_file()]
    except (OSError, ValueError, StopIteration):  # folders that nobody may read, or names that none can have
        return []
