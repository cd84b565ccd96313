"""Artifacts, kept on disk: a model file that was compiled before, in the same way by the same compiler, is copied.

They lie in `artifacts` of the cache folder (cache_folder.py), each under a digest of all that it was made of: to find
one nothing is imported that compiles. A folder is written as every artifact is, whole or not at all, and its digests
are looked at when it is copied. The least recently used ones go when all together are more than MOST bytes, and what is
larger than half of that is not kept.
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

from .. import cache_folder
from ..errors import ArtifactError
from ..machine import find_nvcc, host_features
from ..manifest import FILE, SIGNATURE, Manifest
from ..measuring.machine import caches
from ..runtime.checks import read_manifest
from ..runtime.copies import copy_artifact
from ..runtime.files import ArtifactFiles
from ..runtime.folders import replace_folder
from ..runtime.signature import SigningKey, sign
from . import fingerprints
from .options import Options

MOST = 1 << 31
_ABANDONED = 3600.0  # seconds after which a folder that is still being written is nobody's


@dataclass(frozen=True)
class Key:
    """Of an artifact: its name in the cache, and the files that it was made of as they were then."""

    name: str
    files: tuple[tuple[Path, int, int], ...]

    def unchanged(self) -> bool:
        """Whether the files are still those."""
        return self.files == _states(path for path, *_ in self.files)


def folder() -> Path | None:
    """Where artifacts are kept; None where others may write."""
    return cache_folder.part("artifacts")


def key(model: Path, options: Options) -> Key | None:
    """What stands for the artifact of a model file; None where there is none.

    That is for target 'cuda', which is the GPU that is here, and for files with which something is wrong: the compiler
    says what.
    """
    if options.target == "cuda":
        return None
    try:
        files = [*_files(model), *_all_files(options.database)]
        states = _states(files)
        digest = hashlib.sha256(repr(_made_by(options)).encode())
        for path in files:
            digest.update(_digest(path))
        for path in _all_files(options.database):  # whose names say what machine records are of
            digest.update(str(path.relative_to(os.fspath(options.database or ""))).encode() + b"\0")
        for call in options.calls:
            for name, array in sorted(call.items()):
                digest.update(f"{name} {np.shape(array)} {np.asarray(array).dtype}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
    except (OSError, ValueError, TypeError, message.Error, text_format.Error):
        return None
    return Key(digest.hexdigest()[:40], states)


def get(key: Key, target: Path, sign_key: SigningKey | None = None) -> Manifest | None:
    """Copies what was kept under the key to an artifact folder, if it is there and whole; its manifest.

    Raises ArtifactError where `target` cannot be written.
    """
    kept = folder()
    if kept is None or not (place := kept / key.name).is_dir():
        return None
    try:
        files = ArtifactFiles(place)
        manifest = read_manifest(files)
        if any(_digest(place / name).hex() != manifest.hashes[name] for name in manifest.hashes if name != FILE):
            raise ArtifactError(f"'{place}' is damaged.")
    except (ArtifactError, OSError):
        shutil.rmtree(place, ignore_errors=True)
        return None
    signature = None if sign_key is None else sign(files.read(FILE), sign_key)
    with replace_folder(target) as new:
        copy_artifact(files, manifest, new, signature)
    with suppress(OSError):
        os.utime(place / FILE)
    return manifest


def put(key: Key, artifact: Path) -> None:
    """Keeps an artifact that was just made, where that can be written and what it was made of has not changed."""
    place = folder()
    if place is None:
        return
    parts = [path for path in artifact.iterdir() if path.name != SIGNATURE]
    with suppress(OSError, ArtifactError):
        if sum(path.stat().st_size for path in parts) > MOST // 2 or not key.unchanged():
            return
        cache_folder.make(place)
        with replace_folder(place / key.name) as new:
            for path in parts:
                shutil.copyfile(path, new / path.name)
        trim()


def size() -> tuple[int, int]:
    """How many artifacts there are, and the bytes of all."""
    found = [entry.size for entry in _entries() if entry.whole]
    return len(found), sum(found)


def clear() -> None:
    """Removes all."""
    for entry in _entries():
        shutil.rmtree(entry.path, ignore_errors=True)


def trim(most: int = MOST) -> None:
    """Removes the least recently used ones beyond so many bytes, and what killed writers left."""
    total = 0
    for entry in sorted(_entries(), key=lambda entry: -entry.used):
        total += entry.size if entry.whole else 0
        if total > most if entry.whole else entry.used < time.time() - _ABANDONED:
            shutil.rmtree(entry.path, ignore_errors=True)


@dataclass(frozen=True)
class _Entry:
    """A folder in the cache; `used` is in seconds since the epoch."""

    path: Path
    whole: bool
    size: int
    used: float


def _entries() -> Iterator[_Entry]:
    place = folder()
    if place is None:
        return
    with suppress(OSError):
        for path in list(place.iterdir()):
            with suppress(OSError):
                sizes = [part.stat().st_size for part in path.iterdir() if part.is_file()]
                whole = not path.name.startswith(".")
                yield _Entry(path, whole, sum(sizes), (path / FILE if whole else path).stat().st_mtime)


def _made_by(options: Options) -> tuple[object, ...]:
    """What the artifact depends on besides its files, as something to print."""
    plain = {**vars(options), "donate": list(options.donate), "dims": sorted((options.dims or {}).items())}
    programs = (options.cc, "gcc", "aarch64-linux-gnu-gcc", find_nvcc())
    return (
        sorted((name, value) for name, value in plain.items() if name not in ("calls", "database")),
        platform.machine(),
        host_features() if options.target == "cpu" else (),
        caches(),  # by which records are chosen
        [fingerprints.program(name) for name in programs if name and shutil.which(name)],
        fingerprints.libraries(),
        fingerprints.sources(),
    )


def _states(files: Iterable[Path]) -> tuple[tuple[Path, int, int], ...]:
    stats = ((path, path.stat()) for path in files)
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.digest()


def _files(model: Path) -> list[Path]:
    """The model file, and those in which it keeps tensors."""
    proto = onnx.load(model, load_external_data=False)
    tensors = [*_tensors(proto.graph), *(t for function in proto.functions for t in _of_nodes(function.node))]
    names = {entry.value for t in tensors for entry in t.external_data if entry.key == "location"}
    return [model, *(model.parent / name for name in sorted(names))]


def _all_files(folder: str | os.PathLike[str] | None) -> list[Path]:
    return [] if folder is None else sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors, attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _tensors(graph)
