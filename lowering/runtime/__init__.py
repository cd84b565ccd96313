"""Loading and running compiled models: needs NumPy, tvm_ffi and the TVM runtime library, never the compiler."""

from __future__ import annotations

from pathlib import Path

from .checks import check_files, check_machine, check_versions, read_manifest
from .library import Library, load_runtime
from .model import Model as Model


def load(folder: str | Path, threads: int | None = None, temporary: Path | None = None) -> Model:
    """Loads an artifact folder.

    threads is the default number of threads of a call; None means what the artifact says, else the CPUs that the
    calling thread may use. temporary is a folder to remove when the model is gone. Raises ArtifactError when a file
    is missing or changed, or was made for another format, version or machine.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_versions(manifest)
    check_files(folder, manifest)
    check_machine(folder, manifest)
    load_runtime(folder)
    return Model(folder, manifest, Library(folder / "model.so"), threads, temporary)
