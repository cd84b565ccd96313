"""Writing an artifact: code, weights, manifest, and what a C++ host needs; all of it or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..manifest import FILE, HEADER, HOST, SIGNATURE, WEIGHTS, Manifest, WeightSpec, digest, weights_sample
from ..runtime.folders import replaced_folder
from ..runtime.signature import SigningKey, sign
from .cpp_header import model_header

# Cache lines, and the widest vectors.
ALIGNMENT = 64

_PART = 1 << 24  # bytes of weights that are in memory at a time, or a row


def write(
    folder: Path,
    libraries: Sequence[bytes],
    manifest: Manifest,
    weights: Mapping[str, np.ndarray],
    sign_key: SigningKey | None = None,
) -> Manifest:
    """Writes the folder and returns the manifest in it, completed with the places of the weights and the hashes.

    libraries are the files of `manifest.code()`. weights are in the order of the compiled main's tuple; arrays mapped
    from files are copied piece by piece. An artifact that is there is replaced in one step. sign_key is as for
    `Model.save`. Raises ArtifactError where `folder` holds something else, or cannot be written.
    """
    with replaced_folder(Path(folder)) as new:
        hashes: dict[str, str] = {}
        if weights:
            manifest, hashes[WEIGHTS] = _write_weights(new / WEIGHTS, manifest, weights)
        code = dict(zip(manifest.code().values(), libraries, strict=True))
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


def _write_weights(path: Path, manifest: Manifest, weights: Mapping[str, np.ndarray]) -> tuple[Manifest, str]:
    """Writes weights.bin; the manifest with their places and sample, and the digest of the file."""
    specs, hasher = [], hashlib.sha256()
    with path.open("w+b", buffering=0) as file:  # a buffer makes writes of this size five times slower

        def put(data: bytes | memoryview) -> None:
            hasher.update(data)
            while data:
                data = data[file.write(data) :]

        for name, array in weights.items():
            specs.append(WeightSpec(name, array.dtype.name, array.shape, file.tell(), array.nbytes))
            for part in _parts(array):
                put(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            # At least one byte: a file of empty weights could not be read into memory of its own.
            put(bytes(ALIGNMENT - file.tell() % ALIGNMENT))
        size = file.tell()

        def read(position: int, count: int) -> bytes:
            file.seek(position)
            return file.read(count)

        sample = weights_sample(size, read)
    return dataclasses.replace(manifest, weights=tuple(specs), weights_sample=sample), hasher.hexdigest()


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in parts of some rows: the whole of a mapped one need not fit into memory."""
    if array.ndim < 2 or array.size == 0:
        yield array
        return
    rows = max(1, _PART * len(array) // array.nbytes)
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
