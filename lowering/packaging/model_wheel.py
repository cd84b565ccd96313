"""The command `package --wheel`: an artifact as a Python package that needs onnx-lowering-runtime."""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from pathlib import Path

from ..errors import ArtifactError, InputError
from ..manifest import Manifest, arguments
from ..runtime.artifact.checks import read_manifest
from ..runtime.artifact.copies import copy_artifact
from ..runtime.artifact.files import ArtifactFiles
from ..version import VERSION
from .libraries import read_machine
from .module import ARTIFACT, generate_module
from .wheel import Wheel

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")
_RESERVED = ("lowering", "schedules", "numpy", "ml_dtypes", "tvm", "tvm_ffi")

_DESCRIPTION = """\
A compiled ONNX model, for {target}:

    import {package}
    outputs = {package}.run(...)

{tensors}
"""


def write_model_wheel(artifact: str | Path, to: str | Path, name: str | None = None, version: str = "0.1.0") -> Path:
    """Write the wheel into the folder `to` and return its path; the artifact need not run here.

    Args:
        artifact: The artifact folder.
        to: The folder of the wheel.
        name: The name of the distribution and, with _ for - and dots, of the package; by default the artifact folder's.
        version: The version of the package.

    Raises:
        InputError: A name or version is illegal.
        ArtifactError: The artifact is damaged, or the wheel cannot be written.
    """
    name = Path(artifact).resolve().name if name is None else name
    package = _name_package(name)
    if not _VERSION.fullmatch(version):
        raise InputError(
            "package.version_invalid",
            f"{version!r} is not a version. Write numbers with dots between, such as 1.2.0 or 1.2.0rc1.",
        )
    files = ArtifactFiles(Path(artifact))
    manifest = read_manifest(files)
    machine = read_machine(files.read(next(iter(manifest.code().values())), 0, 20))
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as temporary:
        try:
            copy_artifact(files, manifest, Path(temporary))
        except OSError as error:
            raise ArtifactError(
                "package.temporary_unwritable",
                f"'{temporary}' cannot be written: {error.strerror or error}. Set TMPDIR to another folder.",
            ) from error
        contents: dict[str, bytes | Path] = {
            f"{package}/{ARTIFACT}/{p.name}": p for p in sorted(Path(temporary).iterdir())
        }
        contents |= {f"{package}/__init__.py": generate_module(manifest).encode("ascii"), f"{package}/py.typed": b""}
        wheel = Wheel(
            name, version, [f"py3-none-linux_{machine}"], _list_metadata(manifest), _describe(manifest, package)
        )
        return wheel.write(Path(to), contents)


def _name_package(name: str) -> str:
    """Return the name of the imported package.

    Raises:
        InputError: The name is illegal or hides another module.
    """
    package = re.sub("[-_.]+", "_", name).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]|[a-z]", package):
        raise InputError(
            "package.name_invalid",
            f"{name!r} is not the name of a package, which has letters, digits and - between. Give another name: "
            "--name.",
        )
    if keyword.iskeyword(package) or package in (*sys.stdlib_module_names, *_RESERVED):
        raise InputError("package.name_reserved", f"{name!r} would hide another module. Give another name: --name.")
    return package


def _list_metadata(manifest: Manifest) -> list[str]:
    """Return metadata that requires the runtime of the compiler's series, which reads the same format."""
    runtime = "onnx-lowering-runtime" + ("[cuda]" if manifest.architectures else "")
    series = ".".join(VERSION.split(".")[:2])
    summary = f"Summary: A model compiled by onnx-lowering for {manifest.target}"
    return [summary, "Requires-Python: >=3.10", f"Requires-Dist: {runtime}=={series}.*"]


def _describe(manifest: Manifest, package: str) -> str:
    listed = [("input", a) for a in arguments(manifest.inputs, manifest.input_lists)]
    listed += [("output", a) for a in arguments(manifest.outputs, manifest.output_lists)]
    lines = "\n".join(f"* {role} `{ascii(str(argument))[1:-1]}`" for role, argument in listed)
    return _DESCRIPTION.format(target=manifest.target, package=package, tensors=lines)
