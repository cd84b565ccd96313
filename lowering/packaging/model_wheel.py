"""`package --wheel`: an artifact as a Python package that pip installs, and that needs onnx-lowering-runtime."""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from pathlib import Path

from ..errors import ArtifactError, InputError
from ..manifest import Manifest, arguments
from ..runtime.checks import read_manifest
from ..runtime.copies import copy_artifact
from ..runtime.files import ArtifactFiles
from ..version import VERSION
from .libraries import machine_of
from .module import ARTIFACT, source
from .wheel import Wheel

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")
_OURS = ("lowering", "schedules", "numpy", "ml_dtypes", "tvm", "tvm_ffi")

_DESCRIPTION = """\
A compiled ONNX model, for {target}:

    import {package}
    outputs = {package}.run(...)

{tensors}
"""


def write_model_wheel(artifact: str | Path, to: str | Path, name: str | None = None, version: str = "0.1.0") -> Path:
    """Writes the wheel into the folder `to`; the artifact need not run here. Returns its path.

    name is that of the distribution and, with _ for - and dots, of the package; the artifact folder's without one.
    Raises InputError for names and versions that cannot be, ArtifactError for an artifact that is damaged, and where
    the wheel cannot be written.
    """
    name = Path(artifact).resolve().name if name is None else name
    package = _package(name)
    if not _VERSION.fullmatch(version):
        raise InputError(f"{version!r} is no version: write numbers with dots between, such as 1.2.0 or 1.2.0rc1.")
    files = ArtifactFiles(Path(artifact))
    manifest = read_manifest(files)
    machine = machine_of(files.read(next(iter(manifest.code().values())), 0, 20))
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as work:
        try:
            copy_artifact(files, manifest, Path(work))
        except OSError as error:
            raise ArtifactError(f"'{work}' cannot be written: {error.strerror or error}. Set TMPDIR.") from error
        contents: dict[str, bytes | Path] = {f"{package}/{ARTIFACT}/{p.name}": p for p in sorted(Path(work).iterdir())}
        contents |= {f"{package}/__init__.py": source(manifest).encode("ascii"), f"{package}/py.typed": b""}
        wheel = Wheel(
            name, version, [f"py3-none-linux_{machine}"], _metadata(manifest), _description(manifest, package)
        )
        return wheel.write(Path(to), contents)


def _package(name: str) -> str:
    """What is imported. Raises InputError."""
    package = re.sub("[-_.]+", "_", name).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]|[a-z]", package):
        raise InputError(f"{name!r} is no name of a package: letters, digits and - between. Give one: --name.")
    if keyword.iskeyword(package) or package in (*sys.stdlib_module_names, *_OURS):
        raise InputError(f"{name!r} would hide another module: give another one, --name.")
    return package


def _metadata(manifest: Manifest) -> list[str]:
    """The runtime of the same series as the compiler, which reads the same format."""
    runtime = "onnx-lowering-runtime" + ("[cuda]" if manifest.architectures else "")
    series = ".".join(VERSION.split(".")[:2])
    summary = f"Summary: A model compiled by onnx-lowering for {manifest.target}"
    return [summary, "Requires-Python: >=3.10", f"Requires-Dist: {runtime}=={series}.*"]


def _description(manifest: Manifest, package: str) -> str:
    named = [("input", a) for a in arguments(manifest.inputs, manifest.input_lists)]
    named += [("output", a) for a in arguments(manifest.outputs, manifest.output_lists)]
    lines = "\n".join(f"* {role} `{ascii(str(argument))[1:-1]}`" for role, argument in named)
    return _DESCRIPTION.format(target=manifest.target, package=package, tensors=lines)
