"""Copy an open artifact."""

from __future__ import annotations

from pathlib import Path

from ...errors import ArtifactError
from ...manifest import FILE, SIGNATURE, WEIGHTS, Manifest
from .checks import check_files, check_weights, read_manifest
from .files import ArtifactFiles


def copy_artifact(files: ArtifactFiles, manifest: Manifest, target: Path, signature: bytes | None = None) -> None:
    """Write the artifact of that manifest to the empty folder `target`.

    An existing signature is copied, unless another one is given. Raises ArtifactError if the files were written to
    since the artifact was opened, and OSError.
    """
    text = files.read(FILE)
    if signature is None:
        signature = files.read(SIGNATURE) if SIGNATURE in files else b""
    if read_manifest(files) != manifest:
        raise ArtifactError(
            "artifact.changed_since_load", f"'{files.folder}' has been written to since it was loaded: load it again."
        )
    contents = check_files(files, manifest) | {FILE: text, **({SIGNATURE: signature} if signature else {})}
    if WEIGHTS in manifest.hashes:
        check_weights(files, manifest, files.size(WEIGHTS), lambda at, count: files.read(WEIGHTS, at, count), True)
    for name, content in contents.items():
        (target / name).write_bytes(content)
    if WEIGHTS in manifest.hashes:
        files.copy(WEIGHTS, target / WEIGHTS)
