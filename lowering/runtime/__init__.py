"""Loading and running compiled models: needs NumPy, tvm_ffi and the TVM runtime library, never the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import ArtifactError, InputError
from ..manifest import Manifest
from . import without_torch  # noqa: F401  (before whatever imports tvm_ffi)
from .checks import check_files, check_machine, check_versions, checked_threads, read_manifest, whole_number
from .files import Files
from .foreign import ForeignModel
from .gpu import architecture_here, best_for, load_device_runtime
from .library import Library, load_runtime
from .model import Model as Model
from .signature import VerifyingKey
from .weights import read_weights

_ELSEWHERE = "compile the model here, or for a smaller target such as cpu:x86-64-v3."


def load(
    folder: str | Path,
    threads: int | None = None,
    device: int = 0,
    verify_key: VerifyingKey | None = None,
    check: Literal["auto", "full"] = "auto",
) -> Model:
    """Loads an artifact folder. What becomes of its files afterwards does not matter to the model.

    threads is the default number of threads of a call, at most 1024; None means what the artifact says, else the CPUs
    that the calling thread may use. device is the number of the GPU, for models that run on one. verify_key, the public
    half of an Ed25519 key (a PEM file, its 32 bytes, or a key of the package `cryptography`), demands that the artifact
    was signed with the other half; without it, digests find accidents and nothing else, and model.so is code that runs
    with all your rights: load what you trust. All of an artifact is looked at, but of more than 1 GiB of weights a
    sample, unless check is "full" or there is a key. Raises ArtifactError when a file is missing or
    changed, or was made for another format, version or machine, and InputError for wrong arguments.
    """
    threads, device = checked_threads(threads), whole_number(device, "device", 0, 2**31 - 1)
    if check not in ("auto", "full"):
        raise InputError(f"check must be 'auto' or 'full', not {check!r}.")
    files = Files(Path(folder))
    manifest = read_manifest(files, verify_key)
    check_versions(manifest)
    whole = verify_key is not None or check == "full"
    return _model(files, manifest, _libraries(files, manifest, device), threads, whole)


def open_compiled(folder: Path, threads: int | None = None, device: int = 0) -> Model:
    """A fresh artifact, which this machine need not be able to run: what would run it then says why it cannot."""
    files = Files(folder)
    manifest = read_manifest(files)
    try:
        libraries = _libraries(files, manifest, device)
    except ArtifactError as error:
        return ForeignModel(files, manifest, str(error))
    return _model(files, manifest, libraries, threads)


def _libraries(files: Files, manifest: Manifest, device: int) -> list[Library]:
    """Return the code of each part for this machine.

    Raises ArtifactError if there is none, or a file is missing or changed.
    """
    contents, names = check_files(files, manifest), [part.code() for part in manifest.parts()]
    code = contents[next(iter(names[0].values()))]
    check_machine(code, manifest.cpu_features, manifest.target, "the artifact", _ELSEWHERE)
    load_runtime()
    if not manifest.architectures:
        return [Library(contents[of[""]], files.folder / of[""]) for of in names]
    load_device_runtime()
    best = best_for(manifest.architectures, architecture_here(device))
    return [Library(contents[of[best]], files.folder / of[best], device) for of in names]


def _model(
    files: Files, manifest: Manifest, libraries: list[Library], threads: int | None = None, whole: bool = False
) -> Model:
    memory, setup = read_weights(files, manifest, whole), None
    if manifest.setup is not None:
        setup = Model(files, manifest.setup, libraries[1], memory, threads)
    return Model(files, manifest, libraries[0], memory, threads, setup)
