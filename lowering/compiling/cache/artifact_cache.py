"""Cache of artifacts on disk: a model file compiled before, in the same way by the same compiler, is copied.

They are in `artifacts` of the cache folder (cache_folder.py), each under a digest of all its inputs. A lookup imports
no module that compiles. A folder is written as every artifact is, completely or not at all, and its digests are
verified when it is copied. The least recently used artifacts are removed if the total exceeds MAX_BYTES. An artifact
larger than half of that is not cached.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf import message, text_format

from ... import cache_folder
from ...errors import ArtifactError
from ...machine import find_nvcc, host_features
from ...manifest import FILE, SIGNATURE, Manifest
from ...measuring.machine import caches
from ...runtime.artifact.checks import read_manifest
from ...runtime.artifact.copies import copy_artifact
from ...runtime.artifact.files import ArtifactFiles
from ...runtime.artifact.folders import replace_folder
from ...runtime.artifact.signature import SigningKey, sign
from ..options import CompileOptions
from . import fingerprints

MAX_BYTES = 1 << 31
_ABANDONED = 3600.0  # seconds after which a folder that is still being written is abandoned


@dataclass(frozen=True)
class ArtifactKey:
    """The key of an artifact: its name in the cache, and the state of the files that it was compiled from."""

    name: str
    files: tuple[tuple[Path, int, int], ...]

    def is_unchanged(self) -> bool:
        """Return whether the files are unchanged."""
        return self.files == _stat_files(path for path, *_ in self.files)


def folder() -> Path | None:
    """Return the folder of artifacts, None if other users may write to it."""
    return cache_folder.find_private_subfolder("artifacts")


def key(model: Path, options: CompileOptions) -> ArtifactKey | None:
    """Return the key of a model file's artifact, None if it has none.

    There is none for target 'cuda', which is the GPU of this machine, and for invalid files: the compiler reports the
    error.
    """
    if options.target == "cuda":
        return None
    try:
        files = [*_list_model_files(model), *_list_files(options.database)]
        states = _stat_files(files)
        digest = hashlib.sha256(repr(_list_inputs(options)).encode())
        for path in files:
            digest.update(_hash_file(path))
        for path in _list_files(options.database):  # their names identify machine records
            digest.update(str(path.relative_to(os.fspath(options.database or ""))).encode() + b"\0")
        for call in options.calls:
            for name, array in sorted(call.items()):
                digest.update(f"{name} {np.shape(array)} {np.asarray(array).dtype}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
    except (OSError, ValueError, TypeError, message.Error, text_format.Error):
        return None
    return ArtifactKey(digest.hexdigest()[:40], states)


def get(key: ArtifactKey, target: Path, sign_key: SigningKey | None = None) -> Manifest | None:
    """Copy the artifact of the key to an artifact folder, if it exists and is intact, and return its manifest.

    Raise ArtifactError if `target` cannot be written.
    """
    cache = folder()
    if cache is None or not (entry := cache / key.name).is_dir():
        return None
    try:
        files = ArtifactFiles(entry)
        manifest = read_manifest(files)
        if any(_hash_file(entry / name).hex() != manifest.hashes[name] for name in manifest.hashes if name != FILE):
            raise ArtifactError("artifact.file_damaged", f"'{entry}' is damaged.")
    except (ArtifactError, OSError):
        shutil.rmtree(entry, ignore_errors=True)
        return None
    signature = None if sign_key is None else sign(files.read(FILE), sign_key)
    with replace_folder(target) as new:
        copy_artifact(files, manifest, new, signature)
    with suppress(OSError):
        os.utime(entry / FILE)
    return manifest


def put(key: ArtifactKey, artifact: Path) -> None:
    """Add a new artifact to the cache, if the cache is writable and the artifact's inputs are unchanged."""
    cache = folder()
    if cache is None:
        return
    files = [path for path in artifact.iterdir() if path.name != SIGNATURE]
    with suppress(OSError, ArtifactError):
        if sum(path.stat().st_size for path in files) > MAX_BYTES // 2 or not key.is_unchanged():
            return
        cache_folder.make_private_folder(cache)
        with replace_folder(cache / key.name) as new:
            for path in files:
                shutil.copyfile(path, new / path.name)
        trim()


def size() -> tuple[int, int]:
    """Return the number of artifacts, and their total bytes."""
    sizes = [entry.size for entry in _entries() if entry.whole]
    return len(sizes), sum(sizes)


def clear() -> None:
    """Remove all artifacts."""
    for entry in _entries():
        shutil.rmtree(entry.path, ignore_errors=True)


def trim(max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used artifacts beyond max_bytes, and folders left by killed writers."""
    total = 0
    for entry in sorted(_entries(), key=lambda entry: -entry.used):
        total += entry.size if entry.whole else 0
        if total > max_bytes if entry.whole else entry.used < time.time() - _ABANDONED:
            shutil.rmtree(entry.path, ignore_errors=True)


@dataclass(frozen=True)
class _Entry:
    """A folder in the cache; `used` is in seconds since the epoch."""

    path: Path
    whole: bool
    size: int
    used: float


def _entries() -> Iterator[_Entry]:
    cache = folder()
    if cache is None:
        return
    with suppress(OSError):
        for path in list(cache.iterdir()):
            with suppress(OSError):
                sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
                whole = not path.name.startswith(".")
                yield _Entry(path, whole, sum(sizes), (path / FILE if whole else path).stat().st_mtime)


def _list_inputs(options: CompileOptions) -> tuple[object, ...]:
    """Return the inputs of an artifact other than its files, in printable form."""
    plain = {**vars(options), "donate": list(options.donate), "dims": sorted((options.dims or {}).items())}
    programs = (options.cc, "gcc", "aarch64-linux-gnu-gcc", find_nvcc())
    return (
        sorted((name, value) for name, value in plain.items() if name not in ("calls", "database")),
        platform.machine(),
        host_features() if options.target == "cpu" else (),
        caches(),  # which determine the choice of records
        [fingerprints.fingerprint_program(name) for name in programs if name and shutil.which(name)],
        fingerprints.list_libraries(),
        fingerprints.sources(),
    )


def _stat_files(files: Iterable[Path]) -> tuple[tuple[Path, int, int], ...]:
    stats = ((path, path.stat()) for path in files)
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _hash_file(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.digest()


def _list_model_files(model: Path) -> list[Path]:
    """Return the model file, and its external data files."""
    proto = onnx.load(model, load_external_data=False)
    tensors = [
        *_iterate_tensors(proto.graph),
        *(t for function in proto.functions for t in _iterate_node_tensors(function.node)),
    ]
    names = {entry.value for t in tensors for entry in t.external_data if entry.key == "location"}
    return [model, *(model.parent / name for name in sorted(names))]


def _list_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    return [] if folder is None else sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _iterate_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _iterate_node_tensors(graph.node)


def _iterate_node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors, attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _iterate_tensors(graph)
