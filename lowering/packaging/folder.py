"""The command `package`: an artifact with runtime, headers, an application and licenses, as a folder or a tarball."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from ..errors import ArtifactError
from ..manifest import Manifest
from ..runtime.artifact.checks import check_version, read_manifest
from ..runtime.artifact.copies import copy_artifact
from ..runtime.artifact.files import ArtifactFiles
from ..runtime.artifact.folders import replace_folder
from .libraries import Libraries, find_libraries, read_machine, read_own_license
from .texts import format_cmake, format_notice, format_readme, list_library_names

_HERE = Path(__file__).parent
_TARBALL = ".tar.gz"


def package_artifact(artifact: str | Path, to: str | Path, runtime: str | Path | None = None) -> Manifest:
    """Write all that a C++ application needs of an artifact to a new or empty folder, or a file X.tar.gz.

    All is written or nothing. The artifact need not run here.

    Args:
        artifact: The artifact folder.
        to: The folder or file to write.
        runtime: A folder of wheels (pip install --target) whose libraries replace the installed ones.

    Raises:
        ArtifactError: The artifact is damaged or for another version, the libraries are for another machine, or `to`
            cannot be written.
    """
    files, to = ArtifactFiles(Path(artifact)), Path(to)
    manifest = read_manifest(files)
    machine = read_machine(files.read(next(iter(manifest.code().values())), 0, 20))
    libraries = find_libraries(None if runtime is None else Path(runtime), machine)
    for name, version in libraries.versions.items():
        check_version(manifest, name, version)
    if to.name.endswith(_TARBALL):
        _write_tarball(files, manifest, libraries, to)
        return manifest
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ArtifactError(
            "argument.folder_not_empty", f"'{to}' exists and is not an empty folder. Name a new folder, or remove it."
        )
    with replace_folder(to) as staging:
        _fill_folder(staging, files, manifest, libraries)
    return manifest


def _write_tarball(files: ArtifactFiles, manifest: Manifest, libraries: Libraries, to: Path) -> None:
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as temporary:
            folder = Path(temporary) / to.name.removesuffix(_TARBALL)
            folder.mkdir()
            _fill_folder(folder, files, manifest, libraries)
            with tarfile.open(Path(temporary) / to.name, "w:gz") as tar:
                tar.add(folder, folder.name, filter=_remove_metadata)
            os.replace(Path(temporary) / to.name, to)
    except OSError as error:
        raise ArtifactError(
            "argument.path_unwritable", f"'{to}' cannot be written: {error.strerror or error}."
        ) from error


def _remove_metadata(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without owner and time: the same artifact gives the same tarball."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _fill_folder(folder: Path, files: ArtifactFiles, manifest: Manifest, libraries: Libraries) -> None:
    (folder / "model").mkdir()
    copy_artifact(files, manifest, folder / "model")
    (folder / "lib").mkdir()
    for name, path in zip(list_library_names(manifest), (libraries.ffi, libraries.runtime, libraries.cuda)):
        shutil.copy(path, folder / "lib" / f"lib{name}.so")
    for name in ("tvm", "dlpack"):
        shutil.copytree(libraries.headers / name, folder / "include" / name)
    (folder / "licenses").mkdir()
    for name, text in libraries.licenses.items():
        (folder / "licenses" / name).write_bytes(text)
    shutil.copy(_HERE / "main.cc", folder / "main.cc")
    (folder / "LICENSE").write_bytes(read_own_license())
    (folder / "NOTICE").write_text(format_notice(libraries), "utf-8")
    (folder / "CMakeLists.txt").write_text(format_cmake(manifest), "utf-8")
    (folder / "README.md").write_text(format_readme(manifest, libraries.machine), "utf-8")
