"""Writing an artifact: code, weights, manifest, and what a C++ host needs; all of it or nothing."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .cpp_header import model_header
from .manifest import FILE, WEIGHTS, Manifest, WeightSpec, file_digest, weights_digest
from .runtime.folders import LARGE_WRITE, replaced_folder

# Cache lines, and the widest vectors.
ALIGNMENT = 64


def write(
    folder: Path, libraries: Sequence[bytes | Path], manifest: Manifest, weights: Mapping[str, np.ndarray]
) -> Manifest:
    """Writes the folder and returns the manifest in it, completed with the places of the weights and the hashes.

    libraries are the files of `manifest.code()`, or their bytes. weights are in the order of the compiled main's tuple;
    arrays mapped from files are copied piece by piece. An artifact that is there is replaced in one step. Raises
    ArtifactError where `folder` holds something else.
    """
    with replaced_folder(Path(folder)) as new:
        names = list(manifest.code().values())
        for name, library in zip(names, libraries, strict=True):
            if isinstance(library, bytes):
                (new / name).write_bytes(library)
            else:
                shutil.copyfile(library, new / name)
        hashes = {name: file_digest(new / name) for name in names}
        specs: tuple[WeightSpec, ...] = ()
        if weights:
            specs = _write_weights(new / WEIGHTS, weights)
            hashes[WEIGHTS] = weights_digest(new / WEIGHTS)
        manifest = dataclasses.replace(manifest, weights=specs, hashes=hashes)
        manifest = dataclasses.replace(manifest, hashes={**hashes, FILE: manifest.digest()})
        (new / FILE).write_text(manifest.to_json())
        (new / "model.h").write_text(model_header(manifest, new))
        shutil.copyfile(Path(__file__).parent / "runtime" / "host.hpp", new / "host.hpp")
    return manifest


def _write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> tuple[WeightSpec, ...]:
    specs = []
    with path.open("wb", buffering=LARGE_WRITE) as file:
        for name, array in weights.items():
            specs.append(WeightSpec(name, array.dtype.name, array.shape, file.tell(), array.nbytes))
            # Row by row: the whole of a mapped array need not fit into memory.
            for row in array if array.ndim > 1 else [array]:
                file.write(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data)
            # At least one byte: a file of empty weights could not be mapped.
            file.write(bytes(ALIGNMENT - file.tell() % ALIGNMENT))
    return tuple(specs)
