"""Load and run compiled models. Needs NumPy, tvm_ffi and the TVM runtime library, never the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import ArtifactError, InputError
from ..manifest import Manifest
from . import without_torch  # noqa: F401  (before any import of tvm_ffi)
from .artifact.checks import check_files, check_integer, check_machine, check_threads, check_versions, read_manifest
from .artifact.files import ArtifactFiles
from .artifact.foreign import ForeignModel
from .artifact.signature import VerifyingKey
from .artifact.weights import read_weights
from .gpu import choose_architecture, load_device_runtime, read_gpu_architecture
from .library import ModelLibrary, load_runtime
from .model import Model as Model

_RECOMPILE_REMEDY = "compile the model here, or for a smaller target such as cpu:x86-64-v3."


def load(
    folder: str | Path,
    threads: int | None = None,
    device: int = 0,
    verify_key: VerifyingKey | None = None,
    check: Literal["auto", "full"] = "auto",
) -> Model:
    """Load an artifact folder into memory.

    The model does not depend on the folder afterwards: its files may be changed or removed. Without `verify_key`,
    digests detect accidental damage only, and model.so is code that runs with all rights of the process: load only
    artifacts that you trust.

    Args:
        folder: The artifact folder.
        threads: Default number of threads of a call, at most 1024. None means the number in the artifact, or else the
            CPUs that the calling thread may use.
        device: Number of the GPU, for models that run on one.
        verify_key: Public half of an Ed25519 key: a PEM file, its 32 bytes, or a key of the package `cryptography`. The
            artifact must be signed with the private half.
        check: "full" checks all weights. "auto" checks a sample of weights larger than 1 GiB, unless there is a key,
            and the whole of every other file.

    Returns:
        The loaded model.

    Raises:
        ArtifactError: A file is missing or changed, or was written for another format, version or machine.
        InputError: An argument is invalid.
    """
    threads, device = check_threads(threads), check_integer(device, "device", 0, 2**31 - 1)
    if check not in ("auto", "full"):
        raise InputError("argument.value_unknown", f"check must be 'auto' or 'full', not {check!r}.")
    files = ArtifactFiles(Path(folder))
    manifest = read_manifest(files, verify_key)
    check_versions(manifest)
    is_full_check = verify_key is not None or check == "full"
    return _create_model(files, manifest, _load_libraries(files, manifest, device), threads, is_full_check)


def open_compiled(folder: Path, threads: int | None = None, device: int = 0) -> Model:
    """Open a fresh artifact, which this machine need not be able to run.

    If this machine cannot run the code, calls of the model raise ArtifactError with the reason.
    """
    files = ArtifactFiles(folder)
    manifest = read_manifest(files)
    try:
        libraries = _load_libraries(files, manifest, device)
    except ArtifactError as error:
        return ForeignModel(files, manifest, str(error))
    return _create_model(files, manifest, libraries, threads)


def _load_libraries(files: ArtifactFiles, manifest: Manifest, device: int) -> list[ModelLibrary]:
    """Load the code of the model, and of its setup if it has one, for this machine.

    Raises ArtifactError if the artifact lacks such code, or a file is missing or changed.
    """
    contents, names = check_files(files, manifest), [model.code() for model in manifest.parts()]
    code = contents[next(iter(names[0].values()))]
    check_machine(code, manifest.cpu_features, manifest.target, "the artifact", _RECOMPILE_REMEDY)
    load_runtime()
    if not manifest.architectures:
        return [
            ModelLibrary(contents[files_by_architecture[""]], files.folder / files_by_architecture[""])
            for files_by_architecture in names
        ]
    load_device_runtime()
    architecture = choose_architecture(manifest.architectures, read_gpu_architecture(device))
    return [
        ModelLibrary(
            contents[files_by_architecture[architecture]], files.folder / files_by_architecture[architecture], device
        )
        for files_by_architecture in names
    ]


def _create_model(
    files: ArtifactFiles,
    manifest: Manifest,
    libraries: list[ModelLibrary],
    threads: int | None = None,
    is_full_check: bool = False,
) -> Model:
    memory, setup = read_weights(files, manifest, is_full_check), None
    if manifest.setup is not None:
        setup = Model(files, manifest.setup, libraries[1], memory, threads)
    return Model(files, manifest, libraries[0], memory, threads, setup)
