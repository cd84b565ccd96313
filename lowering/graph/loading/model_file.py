"""Checks that a model's file exists, before slow imports."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from ...errors import ModelError
from ...manifest import FILE

_ENDING = ".onnx"
_MAX_ENTRIES = 10_000  # maximum entries of a folder that are compared with a misspelt name


def check_model_file(path: Path) -> None:
    """Raise ModelError for a missing file, with similar names in its folder."""
    if path.is_dir():
        what = "a compiled artifact" if (path / FILE).is_file() else "a folder"
        raise ModelError("model.file_is_folder", f"{path} is {what}, not an .onnx file. Name the model's file.")
    if not path.is_file():
        similar = _find_similar(path)
        raise ModelError(
            "model.file_missing",
            f"There is no file {path}." + (f" Did you mean {' or '.join(map(str, similar))}?" if similar else ""),
        )


def check_format(path: Path) -> None:
    """Raise ModelError for a file of a recognized other format, with a remedy."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    problem = "it is empty. Write or download it again." if not header else None
    for has_format, message in _FORMATS:
        if problem is None and has_format(header):
            problem = message
    if problem is not None:
        raise ModelError("model.format_unknown", f"{path} is not an ONNX model: {problem}")


def _is_safetensors(header: bytes) -> bool:
    return header[8:10] == b'{"' and 0 < int.from_bytes(header[:8], "little") < 1 << 32


_HEADER_BYTES = 64  # bytes that identify a format
_EXPORT = "Export the module by torch.onnx.export."
_FORMATS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda b: b.startswith(b"PK\x03\x04"), f"it is a zip file, as PyTorch's checkpoints and programs are. {_EXPORT}"),
    (
        lambda b: b[:1] == b"\x80" and b[1:2] in b"\2\3\4\5",
        f"it is a pickle, as old PyTorch checkpoints are. {_EXPORT}",
    ),
    (_is_safetensors, f"it is a safetensors file, which contains only weights. {_EXPORT}"),
    (lambda b: b.startswith(b"GGUF"), "it is a GGUF file. Export the model it was made of."),
    (lambda b: b[4:8] == b"ORTM", "it is in ONNX Runtime's own format. Compile the .onnx file it was made of."),
    (
        lambda b: b.startswith(b"version https://git-lfs"),
        "it is a pointer of Git LFS. Fetch the file by `git lfs pull`.",
    ),
    (lambda b: b.startswith(b"\x1f\x8b"), "it is compressed by gzip. Unpack it."),
    (lambda b: b.lower().startswith((b"<!doctype", b"<html")), "it is a page of HTML. Download the file itself."),
)


def _find_similar(path: Path) -> list[Path]:
    """Return files whose path differs from this one in the name of one folder, or of the file, by a few letters."""
    try:
        missing = next(ancestor for ancestor in (*reversed(path.parents), path) if not ancestor.exists())
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
        remainder = path.relative_to(missing)
        if missing == path:  # the common ending would make all names similar
            stems = [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]
            similar = [stem + _ENDING for stem in difflib.get_close_matches(path.name.removesuffix(_ENDING), stems)]
        else:
            similar = difflib.get_close_matches(missing.name, names)
        return [file for name in similar if (file := missing.with_name(name) / remainder).is_file()]
    except (OSError, ValueError, StopIteration):  # unreadable folders, or invalid names
        return []
