"""What must hold before an artifact is loaded; each refusal is one plain sentence."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

from ..errors import ArtifactError
from ..manifest import FILE, FORMAT, WEIGHTS, Manifest, file_digest, weights_digest

# e_machine of the ELF header, by platform.machine().
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact of this format, unchanged since it was written."""
    path = folder / FILE
    if not path.is_file():
        raise ArtifactError(f"'{folder}' is no artifact: it has no {FILE}.")
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ArtifactError(f"'{path}' cannot be read: {error}.") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ArtifactError(
            f"'{folder}' has artifact format {found}, and this version of onnx-lowering reads format {FORMAT}: "
            "compile the model again."
        )
    try:
        manifest = Manifest.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"'{path}' is damaged: {error}. Compile the model again.") from error
    if manifest.hashes.get(FILE) != manifest.digest():
        raise ArtifactError(f"'{path}' has been changed since it was written: compile the model again.")
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ArtifactError if a file is missing or not the one that the manifest was written with."""
    for name in (*manifest.code().values(), WEIGHTS):
        digest = weights_digest if name == WEIGHTS else file_digest
        path = folder / name
        if name not in manifest.hashes:
            continue
        if not path.is_file():
            raise ArtifactError(f"'{path}' is missing: copy the whole folder, or compile the model again.")
        if digest(path) != manifest.hashes[name]:
            raise ArtifactError(
                f"'{path}' is not the file that {FILE} was written with: "
                "copy the whole folder, or compile the model again."
            )


def check_versions(manifest: Manifest) -> None:
    """Raises ArtifactError if the installed runtime speaks another binary interface than the artifact was built for.

    Both packages change it with the minor version (tvm-ffi: "0.X.Y where X breaks the C ABI").
    """
    for package in ("apache-tvm", "apache-tvm-ffi"):
        wanted = manifest.versions.get(package)
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # a runtime without a wheel, beside the artifact
        if wanted is not None and wanted.split(".")[:2] != installed.split(".")[:2]:
            raise ArtifactError(
                f"the artifact was built with {package} {wanted} and {installed} is installed: "
                f"install {package}=={wanted}, or compile the model again."
            )


def check_machine(folder: Path, manifest: Manifest) -> None:
    """Raises ArtifactError if this machine cannot run the code: another architecture, or missing CPU features."""
    with (folder / next(iter(manifest.code().values()))).open("rb") as file:
        machine = int.from_bytes(file.read(20)[18:], "little")
    here = platform.machine()
    if machine != _ELF_MACHINES.get(here):
        built = next((name for name, number in _ELF_MACHINES.items() if number == machine), f"machine {machine}")
        raise ArtifactError(f"the artifact was built for {built} ({manifest.target}) and this machine is {here}.")
    missing = [f for f in manifest.cpu_features if f not in cpu_flags()]
    if missing:
        raise ArtifactError(
            f"the artifact was built for a CPU with {', '.join(missing)}, which this one lacks: "
            "compile the model here, or for a smaller target such as cpu:x86-64-v3."
        )


def cpu_flags() -> frozenset[str]:
    """The features of this machine's CPUs, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
