"""The runtime libraries that wheels of TVM brought, with their headers and licenses; nothing is imported."""

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
    of apache-tvm's wheel; licenses are texts by file name."""

    ffi: Path
    runtime: Path
    cuda: Path
    headers: Path
    versions: dict[str, str]
    tags: list[str]
    licenses: dict[str, bytes]

    @property
    def machine(self) -> str:
        return machine_of(self.runtime.read_bytes()[:20])


def machine_of(code: bytes) -> str:
    """What machine the code of an ELF file is for, by its first 20 bytes."""
    number = int.from_bytes(code[18:20], "little")
    return _ELF_MACHINES.get(number, f"machine {number}")


def find_libraries(folder: Path | None = None, machine: str | None = None) -> Libraries:
    """Those of this environment, or of wheels that were installed into `folder` (pip install --target).

    Raises ArtifactError, which says how to get them, where something is missing, and where a machine is named, as
    `x86_64`, and they are for another one.
    """
    found = {name: _distribution(name, folder, machine) for name in (_TVM, _FFI)}

    def file(package: str, path: str) -> Path:
        place = Path(str(found[package].locate_file(path)))
        if not place.exists():
            raise ArtifactError(f"'{place}' is missing: install {package}=={found[package].version} again.")
        return place

    licenses = {f"{name}-{path}": text for name, each in found.items() for path, text in _licenses(each)}
    libraries = Libraries(
        ffi=file(_FFI, "tvm_ffi/lib/libtvm_ffi.so"),
        runtime=file(_TVM, "tvm/lib/libtvm_runtime.so"),
        cuda=file(_TVM, "tvm/lib/libtvm_runtime_cuda.so"),
        headers=file(_FFI, "tvm_ffi/include"),
        tags=[line.split()[1] for line in (found[_TVM].read_text("WHEEL") or "").splitlines() if line[:4] == "Tag:"],
        versions={name: distribution.version for name, distribution in found.items()},
        licenses=licenses,
    )
    if machine not in (None, libraries.machine):
        where = "installed here" if folder is None else f"in '{folder}'"
        raise ArtifactError(
            f"the artifact is for {machine} and the runtime libraries {where} are for {libraries.machine} "
            f"(this machine is {platform.machine()}). {_how_to_get(machine)}"
        )
    return libraries


def our_license() -> bytes:
    return next(text for name, text in _licenses(_distribution("onnx-lowering", None)) if name == "LICENSE")


def _licenses(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Texts that the distribution was installed with, and names for them."""
    for path in distribution.files or []:
        if path.name.startswith(("LICENSE", "NOTICE")) and path.suffix in ("", ".txt"):
            place = Path(str(path.locate()))
            of_part = "3rdparty" in path.parts
            yield "-".join(path.parts[-2:]) if of_part else path.name, place.read_bytes()


def _distribution(name: str, folder: Path | None, machine: str | None = None) -> metadata.Distribution:
    places = sys.path if folder is None else [str(folder)]
    found = next(iter(metadata.distributions(name=name, path=places)), None)
    if found is None and folder is None:
        raise ArtifactError(f"{name}, which has what is to be shipped, is not installed: install it with pip.")
    if found is None:
        raise ArtifactError(f"{name}, which has what is to be shipped, is not in '{folder}'. {_how_to_get(machine)}")
    return found


def _how_to_get(machine: str | None) -> str:
    """The libraries of a machine, of the versions that are installed here."""
    wanted = " ".join(f"{name}=={_distribution(name, None).version}" for name in (_TVM, _FFI))
    return (
        "Get its libraries: pip install --target FOLDER --no-deps --only-binary=:all: "
        f"--platform manylinux_2_28_{machine or 'MACHINE'} {wanted}; then name them: --runtime FOLDER."
    )
