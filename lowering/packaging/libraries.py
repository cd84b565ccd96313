"""The runtime libraries that wheels of TVM brought, with their headers and licences; nothing is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import ArtifactError

_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
_TVM, _FFI = "apache-tvm", "apache-tvm-ffi"


@dataclass(frozen=True)
class Libraries:
    """Files to ship. versions are those of the packages that they are of, by name, tags those
    of apache-tvm's wheel; licences are texts by file name."""

    ffi: Path
    runtime: Path
    cuda: Path
    headers: Path
    versions: dict[str, str]
    tags: list[str]
    licences: dict[str, bytes]

    @property
    def machine(self) -> str:
        return machine_of(self.runtime.read_bytes()[:20])


def machine_of(code: bytes) -> str:
    """What machine the code of an ELF file is for, by its first 20 bytes."""
    number = int.from_bytes(code[18:20], "little")
    return _ELF_MACHINES.get(number, f"machine {number}")


def find_libraries(folder: Path | None = None) -> Libraries:
    """Those of this environment, or of wheels that were installed into `folder` (pip install --target).

    Raises ArtifactError where something is missing.
    """
    found = {name: _distribution(name, folder) for name in (_TVM, _FFI)}

    def file(package: str, path: str) -> Path:
        place = Path(str(found[package].locate_file(path)))
        if not place.exists():
            raise ArtifactError(f"'{place}' is missing: install {package}=={found[package].version} again.")
        return place

    licences = {f"{name}-{path}": text for name, each in found.items() for path, text in _licences(each)}
    return Libraries(
        ffi=file(_FFI, "tvm_ffi/lib/libtvm_ffi.so"),
        runtime=file(_TVM, "tvm/lib/libtvm_runtime.so"),
        cuda=file(_TVM, "tvm/lib/libtvm_runtime_cuda.so"),
        headers=file(_FFI, "tvm_ffi/include"),
        tags=[line.split()[1] for line in (found[_TVM].read_text("WHEEL") or "").splitlines() if line[:4] == "Tag:"],
        versions={name: distribution.version for name, distribution in found.items()},
        licences=licences,
    )


def libraries_for(machine: str, folder: Path | None) -> Libraries:
    """Those for a machine, as `x86_64`. Raises ArtifactError, which says how to get them, for any other's."""
    libraries = find_libraries(folder)
    if libraries.machine != machine:
        where = "installed here are" if folder is None else f"in '{folder}' are"
        wanted = " ".join(f"{name}=={version}" for name, version in libraries.versions.items())
        raise ArtifactError(
            f"the artifact is for {machine} and the runtime libraries {where} for {libraries.machine} (this machine is "
            f"{platform.machine()}). Get the others: pip install --target FOLDER --no-deps --only-binary=:all: "
            f"--platform manylinux_2_28_{machine} {wanted}; then name them: --runtime FOLDER."
        )
    return libraries


def our_licence() -> bytes:
    return next(text for name, text in _licences(_distribution("onnx-lowering", None)) if name == "LICENSE")


def _licences(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Texts that the distribution was installed with, and names for them."""
    for path in distribution.files or []:
        if path.name.startswith(("LICENSE", "NOTICE")) and path.suffix in ("", ".txt"):
            place = Path(str(path.locate()))
            of_part = "3rdparty" in path.parts
            yield "-".join(path.parts[-2:]) if of_part else path.name, place.read_bytes()


def _distribution(name: str, folder: Path | None) -> metadata.Distribution:
    places = sys.path if folder is None else [str(folder)]
    found = next(iter(metadata.distributions(name=name, path=places)), None)
    if found is None:
        where = "is not installed" if folder is None else f"is not in '{folder}'"
        raise ArtifactError(f"{name}, which has what is to be shipped, {where}: install it with pip.")
    return found
