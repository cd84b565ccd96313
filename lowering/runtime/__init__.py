"""Loading and running compiled models: needs NumPy, tvm_ffi and the TVM runtime library, never the compiler."""

from __future__ import annotations

from pathlib import Path

from .checks import check_files, check_machine, check_versions, read_manifest
from .gpu import architecture_here, best_for, load_device_runtime
from .library import Library, load_runtime
from .model import Model as Model


def load(folder: str | Path, threads: int | None = None, device: int = 0, temporary: Path | None = None) -> Model:
    """Loads an artifact folder.

    threads is the default number of threads of a call; None means what the artifact says, else the CPUs that the
    calling thread may use. device is the number of the GPU, for models that run on one. temporary is a folder to remove
    when the model is gone. Raises ArtifactError when a file is missing or changed, or was made for another format,
    version or machine.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_versions(manifest)
    check_files(folder, manifest)
    check_machine(folder, manifest)
    load_runtime(folder)
    if not manifest.architectures:
        return Model(folder, manifest, Library(folder / manifest.code()[""]), threads, temporary, None)
    load_device_runtime(folder)
    code = folder / manifest.code()[best_for(manifest.architectures, architecture_here(device))]
    return Model(folder, manifest, Library(code, device), threads, temporary, device)
