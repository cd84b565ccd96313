"""The runtime libraries of TVM's wheels, with headers and licenses; nothing is imported."""

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
    """Files to ship.

    `versions` are those of their packages by name, `tags` those of apache-tvm's wheel, and `licenses` texts by file
    name.
    """

    ffi: Path
    runtime: Path
    cuda: Path
    headers: Path
    versions: dict[str, str]
    tags: list[str]
    licenses: dict[str, bytes]

    @property
    def machine(self) -> str:
        return read_machine(self.runtime.read_bytes()[:20])


def read_machine(code: bytes) -> str:
    """Return the machine that the code of an ELF file is for, by its first 20 bytes."""
    number = int.from_bytes(code[18:20], "little")
    return _ELF_MACHINES.get(number, f"machine {number}")


def find_libraries(folder: Path | None = None, machine: str | None = None) -> Libraries:
    """Return the libraries of this environment, or of wheels that were installed into `folder` (pip install --target).

    Raises:
        ArtifactError: A file is missing, or the libraries are not for the machine, such as `x86_64`; the text says how
            to get them.
    """
    distributions = {name: _find_distribution(name, folder, machine) for name in (_TVM, _FFI)}

    def file(package: str, path: str) -> Path:
        file_path = Path(str(distributions[package].locate_file(path)))
        if not file_path.exists():
            raise ArtifactError(
                "package.file_missing",
                f"'{file_path}' is missing. Install {package}=={distributions[package].version} again.",
            )
        return file_path

    licenses = {
        f"{name}-{path}": text
        for name, distribution in distributions.items()
        for path, text in _list_licenses(distribution)
    }
    libraries = Libraries(
        ffi=file(_FFI, "tvm_ffi/lib/libtvm_ffi.so"),
        runtime=file(_TVM, "tvm/lib/libtvm_runtime.so"),
        cuda=file(_TVM, "tvm/lib/libtvm_runtime_cuda.so"),
        headers=file(_FFI, "tvm_ffi/include"),
        tags=[
            line.split()[1]
            for line in (distributions[_TVM].read_text("WHEEL") or "").splitlines()
            if line[:4] == "Tag:"
        ],
        versions={name: distribution.version for name, distribution in distributions.items()},
        licenses=licenses,
    )
    if machine not in (None, libraries.machine):
        where = "installed here" if folder is None else f"in '{folder}'"
        raise ArtifactError(
            "package.machine_mismatch",
            f"the artifact is for {machine}, but the runtime libraries {where} are for {libraries.machine} (this "
            f"machine is {platform.machine()}). {_explain_how_to_get(machine)}",
        )
    return libraries


def read_own_license() -> bytes:
    return next(text for name, text in _list_licenses(_find_distribution("onnx-lowering", None)) if name == "LICENSE")


def _list_licenses(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the license texts of a distribution, with names for them."""
    for path in distribution.files or []:
        if path.name.startswith(("LICENSE", "NOTICE")) and path.suffix in ("", ".txt"):
            file_path = Path(str(path.locate()))
            is_third_party = "3rdparty" in path.parts
            yield "-".join(path.parts[-2:]) if is_third_party else path.name, file_path.read_bytes()


def _find_distribution(name: str, folder: Path | None, machine: str | None = None) -> metadata.Distribution:
    search_path = sys.path if folder is None else [str(folder)]
    distribution = next(iter(metadata.distributions(name=name, path=search_path)), None)
    if distribution is None and folder is None:
        raise ArtifactError(
            "package.distribution_missing",
            f"{name}, which contains files to be shipped, is not installed. Install it with pip.",
        )
    if distribution is None:
        raise ArtifactError(
            "package.distribution_not_in_folder",
            f"{name}, which contains files to be shipped, is not in '{folder}'. {_explain_how_to_get(machine)}",
        )
    return distribution


def _explain_how_to_get(machine: str | None) -> str:
    """Return how to get the libraries of a machine, in the installed versions."""
    requirements = " ".join(f"{name}=={_find_distribution(name, None).version}" for name in (_TVM, _FFI))
    return (
        "Install its libraries: pip install --target FOLDER --no-deps --only-binary=:all: "
        f"--platform manylinux_2_28_{machine or 'MACHINE'} {requirements}; then pass --runtime FOLDER."
    )
