"""Writing an artifact: code, weights, manifest, and what a C++ host needs; all of it or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..manifest import BLOCK, FILE, HEADER, HOST, SIGNATURE, WEIGHTS, Manifest, WeightSpec, block_digests, digest
from ..runtime.folders import replace_folder
from ..runtime.signature import SigningKey, sign
from .cpp_header import model_header

# Cache lines, and the widest vectors.
ALIGNMENT = 64

_PART = 1 << 24  # bytes of weights that are in memory at a time, or a row


@dataclass(frozen=True)
class Part:
    """A model, or its setup: libraries are the files of `manifest.code()`, weights are in the order of the compiled
    main's tuple."""

    manifest: Manifest
    libraries: tuple[bytes, ...]
    weights: dict[str, np.ndarray]


def write(folder: Path, parts: Sequence[Part], sign_key: SigningKey | None = None) -> Manifest:
    """Writes the folder and returns the manifest in it, completed with the places of the weights and the hashes.

    parts are the model, and its setup if it has one. Weights that are mapped from files are copied piece by piece. An
    artifact that is there is replaced in one step. sign_key is as for `Model.save`. Raises ArtifactError where `folder`
    holds something else, or cannot be written.
    """
    with replace_folder(Path(folder)) as new:
        hashes: dict[str, str] = {}
        manifests = [part.manifest for part in parts]
        if any(part.weights for part in parts):
            places, blocks, hashes[WEIGHTS] = _write_weights(new / WEIGHTS, [part.weights for part in parts])
            manifests = [dataclasses.replace(m, weights=specs) for m, specs in zip(manifests, places)]
            manifests[0] = dataclasses.replace(manifests[0], weights_blocks=blocks)
        manifest = dataclasses.replace(manifests[0], setup=next(iter(manifests[1:]), None))
        code = {
            name: library
            for part in parts
            for name, library in zip(part.manifest.code().values(), part.libraries, strict=True)
        }
        header = model_header(manifest, code).encode("ascii")
        host = (Path(__file__).parents[1] / "runtime" / HOST).read_bytes()
        for name, content in {**code, HEADER: header, HOST: host}.items():
            (new / name).write_bytes(content)
            hashes[name] = digest(content)
        manifest = dataclasses.replace(manifest, hashes=hashes)
        manifest = dataclasses.replace(manifest, hashes={**hashes, FILE: manifest.digest()})
        text = manifest.to_json().encode("ascii")
        (new / FILE).write_bytes(text)
        if sign_key is not None:
            (new / SIGNATURE).write_bytes(sign(text, sign_key))
    return manifest


def _write_weights(
    path: Path, parts: Sequence[Mapping[str, np.ndarray]]
) -> tuple[list[tuple[WeightSpec, ...]], tuple[str, ...], str]:
    """Writes weights.bin; the places of each part's weights, the digests of its blocks and that of the file."""
    places, hasher = [], hashlib.sha256()
    with path.open("w+b", buffering=0) as file:  # a buffer makes writes of this size five times slower

        def put(data: bytes | memoryview) -> None:
            hasher.update(data)
            while data:
                data = data[file.write(data) :]

        for weights in parts:
            specs = []
            for name, array in weights.items():
                specs.append(WeightSpec(name, array.dtype.name, array.shape, file.tell(), array.nbytes))
                for rows in _rows(array):
                    put(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
                # At least one byte: a file of empty weights could not be read into memory of its own.
                put(bytes(ALIGNMENT - file.tell() % ALIGNMENT))
            places.append(tuple(specs))
        size = file.tell()

        def read(position: int, count: int) -> bytes:
            return os.pread(file.fileno(), count, position)

        blocks = tuple(block_digests(size, read, range(-(-size // BLOCK))))
    return places, blocks, hasher.hexdigest()


def _rows(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in parts of some rows: the whole of a mapped one need not fit into memory."""
    if array.ndim < 2 or array.size == 0:
        yield array
        return
    rows = max(1, _PART * len(array) // array.nbytes)
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
