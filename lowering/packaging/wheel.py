"""Writer of wheels: the files, METADATA, WHEEL and RECORD, in the layout of Python's packaging specifications."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArtifactError
from ..version import VERSION

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the time of every file: the same files give the same wheel
_CHUNK_BYTES = 2**24  # bytes of a read


@dataclass(frozen=True)
class Wheel:
    """The metadata of a wheel.

    `name` and `version` are as users write them; `tags` are such as `py3-none-any`; `metadata` has further lines
    `Key: value`.
    """

    name: str
    version: str
    tags: Sequence[str]
    metadata: Sequence[str]
    description: str  # Markdown

    @property
    def _stem(self) -> str:
        return f"{re.sub('[-_.]+', '_', self.name).lower()}-{self.version}"

    @property
    def file_name(self) -> str:
        components = zip(*(tag.split("-") for tag in self.tags))
        return f"{self._stem}-{'-'.join('.'.join(dict.fromkeys(component)) for component in components)}.whl"

    def write(self, folder: Path, files: Mapping[str, bytes | Path]) -> Path:
        """Write a wheel of `files`, contents or files by their path in it, into the folder; all of it or nothing.

        Raises:
            ArtifactError: The wheel cannot be written.
        """
        info = f"{self._stem}.dist-info"
        head = ["Metadata-Version: 2.4", f"Name: {self.name}", f"Version: {self.version}", *self.metadata]
        head += ["Description-Content-Type: text/markdown", "", self.description]
        pure = all(tag.endswith("-any") for tag in self.tags)
        wheel = ["Wheel-Version: 1.0", f"Generator: onnx-lowering {VERSION}", f"Root-Is-Purelib: {str(pure).lower()}"]
        wheel += [*(f"Tag: {tag}" for tag in self.tags), ""]
        texts = {f"{info}/METADATA": "\n".join(head).encode(), f"{info}/WHEEL": "\n".join(wheel).encode()}
        output_path = folder / self.file_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".onnx-lowering-", dir=folder) as temporary:
                staging = Path(temporary) / output_path.name
                with zipfile.ZipFile(staging, "w", zipfile.ZIP_DEFLATED) as archive:
                    record = [_add_file(archive, name, content) for name, content in {**files, **texts}.items()]
                    lines = "".join(f"{line}\n" for line in [*record, f"{info}/RECORD,,"])
                    _add_file(archive, f"{info}/RECORD", lines.encode())
                os.replace(staging, output_path)
        except OSError as error:
            raise ArtifactError(
                "argument.path_unwritable", f"'{output_path}' cannot be written: {error.strerror or error}."
            ) from error
        return output_path


def _add_file(archive: zipfile.ZipFile, name: str, content: bytes | Path) -> str:
    """Add a file to the archive and return its line of RECORD."""
    entry = zipfile.ZipInfo(name, _FIXED_TIME)
    entry.external_attr = 0o100644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    if isinstance(content, Path) and content.suffix == ".bin":  # weights are not compressible
        entry.compress_type = zipfile.ZIP_STORED
    entry.file_size = content.stat().st_size if isinstance(content, Path) else len(content)
    hasher = hashlib.sha256()
    source = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
    with source, archive.open(entry, "w") as output:
        while chunk := source.read(_CHUNK_BYTES):
            hasher.update(chunk)
            output.write(chunk)
    digest = base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{entry.file_size}"
