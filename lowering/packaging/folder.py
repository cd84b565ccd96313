"""`package`: an artifact with its runtime, headers, an application and licenses, as a folder or a tarball."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from ..errors import ArtifactError
from ..manifest import Manifest
from ..runtime.checks import check_version, read_manifest
from ..runtime.copies import copy_artifact
from ..runtime.files import ArtifactFiles
from ..runtime.folders import replace_folder
from .libraries import Libraries, find_libraries, machine_of, our_license
from .texts import cmake, library_names, notice, readme

_HERE = Path(__file__).parent
_TARBALL = ".tar.gz"


def package(artifact: str | Path, to: str | Path, runtime: str | Path | None = None) -> Manifest:
    """Writes all that a C++ application needs of an artifact to the new or empty folder `to`, or the file X.tar.gz.

    The artifact need not run here. runtime is a folder of wheels (pip install --target) whose libraries are shipped, in
    place of those that are installed. All is written or nothing. Raises ArtifactError for an artifact that is damaged
    or for another version, for libraries of another machine, and for places that cannot be written.
    """
    files, to = ArtifactFiles(Path(artifact)), Path(to)
    manifest = read_manifest(files)
    machine = machine_of(files.read(next(iter(manifest.code().values())), 0, 20))
    libraries = find_libraries(None if runtime is None else Path(runtime), machine)
    for name, version in libraries.versions.items():
        check_version(manifest, name, version)
    if to.name.endswith(_TARBALL):
        _write_tarball(files, manifest, libraries, to)
        return manifest
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ArtifactError(f"'{to}' is there and not empty: name a new folder, or remove it.")
    with replace_folder(to) as new:
        _fill(new, files, manifest, libraries)
    return manifest


def _write_tarball(files: ArtifactFiles, manifest: Manifest, libraries: Libraries, to: Path) -> None:
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as work:
            folder = Path(work) / to.name.removesuffix(_TARBALL)
            folder.mkdir()
            _fill(folder, files, manifest, libraries)
            with tarfile.open(Path(work) / to.name, "w:gz") as tar:
                tar.add(folder, folder.name, filter=_plain)
            os.replace(Path(work) / to.name, to)
    except OSError as error:
        raise ArtifactError(f"'{to}' cannot be written: {error.strerror or error}.") from error


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time: the same artifact makes the same tarball."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _fill(folder: Path, files: ArtifactFiles, manifest: Manifest, libraries: Libraries) -> None:
    (folder / "model").mkdir()
    copy_artifact(files, manifest, folder / "model")
    (folder / "lib").mkdir()
    for name, path in zip(library_names(manifest), (libraries.ffi, libraries.runtime, libraries.cuda)):
        shutil.copy(path, folder / "lib" / f"lib{name}.so")
    for name in ("tvm", "dlpack"):
        shutil.copytree(libraries.headers / name, folder / "include" / name)
    (folder / "licenses").mkdir()
    for name, text in libraries.licenses.items():
        (folder / "licenses" / name).write_bytes(text)
    shutil.copy(_HERE / "main.cc", folder / "main.cc")
    (folder / "LICENSE").write_bytes(our_license())
    (folder / "NOTICE").write_text(notice(libraries), "utf-8")
    (folder / "CMakeLists.txt").write_text(cmake(manifest), "utf-8")
    (folder / "README.md").write_text(readme(manifest, libraries.machine), "utf-8")
