"""Atomic writing of artifacts: code, weights, manifest, and the files for a C++ host."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..manifest import (
    BLOCK,
    FILE,
    HEADER,
    HOST,
    SIGNATURE,
    WEIGHTS,
    Manifest,
    WeightSpec,
    compute_block_digests,
    digest,
)
from ..runtime.artifact.folders import replace_folder
from ..runtime.artifact.signature import SigningKey, sign
from .cpp_header import model_header

# Size of cache lines, and of the widest vectors.
ALIGNMENT = 64

_CHUNK_BYTES = 1 << 24  # bytes of weights that are in memory at a time, or one row if that is larger


@dataclass(frozen=True)
class ArtifactPart:
    """A model, or its setup.

    libraries are the files of `manifest.code()`, weights are in the order of the compiled main's tuple.
    """

    manifest: Manifest
    libraries: tuple[bytes, ...]
    weights: dict[str, np.ndarray]


def write_artifact(folder: Path, artifacts: Sequence[ArtifactPart], sign_key: SigningKey | None = None) -> Manifest:
    """Write the folder and return its manifest, completed with the offsets of the weights and the hashes.

    An existing artifact is replaced in one step. Weights that are mapped from files are copied in chunks.

    Args:
        folder: The artifact folder.
        parts: The model, and its setup if it has one.
        sign_key: As for `Model.save`.

    Raises:
        ArtifactError: if `folder` contains something else, or cannot be written.
    """
    with replace_folder(Path(folder)) as new:
        hashes: dict[str, str] = {}
        manifests = [artifact.manifest for artifact in artifacts]
        if any(artifact.weights for artifact in artifacts):
            weight_specs, blocks, hashes[WEIGHTS] = write_weights(
                new / WEIGHTS, [artifact.weights for artifact in artifacts]
            )
            manifests = [dataclasses.replace(m, weights=specs) for m, specs in zip(manifests, weight_specs)]
            manifests[0] = dataclasses.replace(manifests[0], weights_blocks=blocks)
        manifest = dataclasses.replace(manifests[0], setup=next(iter(manifests[1:]), None))
        code = {
            name: library
            for artifact in artifacts
            for name, library in zip(artifact.manifest.code().values(), artifact.libraries, strict=True)
        }
        header = model_header(manifest, code).encode("ascii")
        host = (Path(__file__).parents[1] / "runtime" / "native" / HOST).read_bytes()
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


def write_weights(
    path: Path, weight_lists: Sequence[Mapping[str, np.ndarray]]
) -> tuple[list[tuple[WeightSpec, ...]], tuple[str, ...], str]:
    """Write weights.bin; return the specs of each artifact's weights, the digests of its blocks and of the file."""
    weight_specs, hasher = [], hashlib.sha256()
    with path.open("w+b", buffering=0) as file:  # a buffer makes writes of this size five times slower

        def append(data: bytes | memoryview) -> None:
            hasher.update(data)
            while data:
                data = data[file.write(data) :]

        for weights in weight_lists:
            specs = []
            for name, array in weights.items():
                specs.append(WeightSpec(name, array.dtype.name, array.shape, file.tell(), array.nbytes))
                for rows in _split_rows(array):
                    append(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
                # At least one byte: a file of empty weights could not be read into its own memory.
                append(bytes(ALIGNMENT - file.tell() % ALIGNMENT))
            weight_specs.append(tuple(specs))
        size = file.tell()

        def read(position: int, count: int) -> bytes:
            return os.pread(file.fileno(), count, position)

        blocks = tuple(compute_block_digests(size, read, range(-(-size // BLOCK))))
    return weight_specs, blocks, hasher.hexdigest()


def _split_rows(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in chunks of rows, since a mapped array need not fit into memory."""
    if array.ndim < 2 or array.size == 0:
        yield array
        return
    rows = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
