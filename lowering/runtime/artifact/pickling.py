"""Models as bytes for other processes: pickle, multiprocessing, joblib, Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...manifest import Manifest
from .copies import copy_artifact
from .files import ArtifactFiles
from .folders import is_artifact_file

if TYPE_CHECKING:
    from ..model import Model


def pack_model(files: ArtifactFiles, manifest: Manifest) -> dict[str, bytes]:
    """Return the files of an artifact by name. Raises ArtifactError if they were written to since the load."""
    with tempfile.TemporaryDirectory() as folder:
        copy_artifact(files, manifest, Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def unpack_model(contents: dict[str, bytes], threads: int | None, device: int) -> Model:
    """Load a model from its files. If this machine cannot run it, calls raise the error. Raises ArtifactError."""
    from .. import open_compiled  # avoids an import cycle

    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            if is_artifact_file(name):
                (Path(folder) / name).write_bytes(content)
        return open_compiled(Path(folder), threads, device)


unpacked = unpack_model  # pickles of version 0.1 name it so
