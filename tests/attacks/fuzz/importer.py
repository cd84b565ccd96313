"""The importer's target: models, from bytes to `check`, and some of them through all passes but code generation."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path
from unittest import mock

import lowering
from lowering.compiling import compilation, compiler

from ..attack import make_case
from ..draw import Draw
from ..generators import GENERATORS
from ..oracle import find_foreign_terms
from .mutate_model import mutated as mutated

# One model of so many goes on to the passes, which take ten times as long.
_LOWERED = 8


class UnclearError(Exception):
    """An error that no user understands."""


def attempt(data: bytes) -> None:
    """Check bytes; raise what no bytes may cause."""
    try:
        lowering.check(data)
        if zlib.crc32(data) % _LOWERED == 0:
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(compilation, "build", lambda *_: b""):
                compiler.compile_to(Path(folder) / "module", data)
    except lowering.LoweringError as error:
        terms = find_foreign_terms(str(error))
        if terms:
            raise UnclearError(f"says '{terms}': {error}") from error


def corpus() -> list[bytes]:
    """Return a model of each operator."""
    models = []
    for domain, op in sorted(GENERATORS):
        draw = Draw(f"{domain}.{op}", 0)
        model = make_case(draw, GENERATORS[domain, op](draw, op), 1).model
        if model.ByteSize() < 2000:
            models.append(model.SerializeToString())
    return models
