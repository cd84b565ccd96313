"""Writing a wheel: the files, METADATA, WHEEL and RECORD, as the packaging specifications of Python lay them out."""

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

_BEGIN = (1980, 1, 1, 0, 0, 0)  # of every file: the same files make the same wheel
_PART = 2**24  # bytes


@dataclass(frozen=True)
class Wheel:
    """name and version as users write them; tags such as `py3-none-any`; metadata are further lines `Key: value`."""

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
        parts = zip(*(tag.split("-") for tag in self.tags))
        return f"{self._stem}-{'-'.join('.'.join(dict.fromkeys(part)) for part in parts)}.whl"

    def write(self, folder: Path, files: Mapping[str, bytes | Path]) -> Path:
        """Writes the wheel of `files`, contents or files by their place, into the folder; all of it or nothing.

        Raises ArtifactError where it cannot be written.
        """
        info = f"{self._stem}.dist-info"
        head = ["Metadata-Version: 2.4", f"Name: {self.name}", f"Version: {self.version}", *self.metadata]
        head += ["Description-Content-Type: text/markdown", "", self.description]
        pure = all(tag.endswith("-any") for tag in self.tags)
        wheel = ["Wheel-Version: 1.0", f"Generator: onnx-lowering {VERSION}", f"Root-Is-Purelib: {str(pure).lower()}"]
        wheel += [*(f"Tag: {tag}" for tag in self.tags), ""]
        texts = {f"{info}/METADATA": "\n".join(head).encode(), f"{info}/WHEEL": "\n".join(wheel).encode()}
        place = folder / self.file_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".onnx-lowering-", dir=folder) as work:
                part = Path(work) / place.name
                with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
                    record = [_add(archive, name, content) for name, content in {**files, **texts}.items()]
                    lines = "".join(f"{line}\n" for line in [*record, f"{info}/RECORD,,"])
                    _add(archive, f"{info}/RECORD", lines.encode())
                os.replace(part, place)
        except OSError as error:
            raise ArtifactError(f"'{place}' cannot be written: {error.strerror or error}.") from error
        return place


def _add(archive: zipfile.ZipFile, name: str, content: bytes | Path) -> str:
    """Adds a file; its line of RECORD."""
    entry = zipfile.ZipInfo(name, _BEGIN)
    entry.external_attr = 0o100644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    if isinstance(content, Path) and content.suffix == ".bin":  # weights, which do not become smaller
        entry.compress_type = zipfile.ZIP_STORED
    entry.file_size = content.stat().st_size if isinstance(content, Path) else len(content)
    hasher = hashlib.sha256()
    source = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
    with source, archive.open(entry, "w") as written:
        while part := source.read(_PART):
            hasher.update(part)
            written.write(part)
    digest = base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{entry.file_size}"
