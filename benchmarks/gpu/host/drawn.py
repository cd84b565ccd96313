"""Weights that need not travel: drawn from their names, the same on every host."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowering.manifest import WEIGHTS

RECIPE, OTHERS = "weights.json", "others.bin"

_TILE = 1_000_003  # numbers; prime, so that rows of a matrix are not each other's


@functools.cache
def _tile() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_TILE, np.float32)


@dataclass(frozen=True)
class Part:
    """A matrix of normal numbers times `scale`, float16."""

    name: str
    shape: tuple[int, ...]
    scale: float

    def draw(self) -> np.ndarray:
        tile = np.roll(_tile() * np.float32(self.scale), zlib.crc32(self.name.encode())).astype(np.float16)
        return np.resize(tile, self.shape)


@dataclass(frozen=True)
class Recipe:
    """What a file of weights is made of: drawn parts, each at an offset and as it is or transposed; bytes of others."""

    size: int
    drawn: tuple[tuple[int, bool, Part], ...]
    others: tuple[tuple[int, bytes], ...]

    def write(self, folder: Path, parts: Sequence[Part], about: dict[str, Any]) -> None:
        """parts are all that the model has, also those that weights.bin has in another form."""
        places = [[offset, transposed, dataclasses.asdict(part)] for offset, transposed, part in self.drawn]
        rest = [[offset, len(data)] for offset, data in self.others]
        known = [dataclasses.asdict(part) for part in parts]
        text = json.dumps({"config": about, "parts": known, "size": self.size, "drawn": places, "others": rest})
        (folder / RECIPE).write_text(text)
        (folder / OTHERS).write_bytes(b"".join(data for _, data in self.others))


def recipe(data: np.ndarray, places: Sequence[tuple[int, int]], parts: Sequence[Part]) -> Recipe:
    """Of a file of weights, by offset and size of each: which of the parts they are."""
    known = {}
    for part in parts:
        array = part.draw()
        known[bytes(array.data.cast("B")[:4096]), array.nbytes] = (False, part)
        known[array.T[:64].tobytes()[:4096], array.nbytes] = (True, part)
    drawn, others = [], []
    for offset, size in places:
        found = known.get((data[offset : offset + 4096].tobytes(), size))
        if found is None:
            others.append((offset, data[offset : offset + size].tobytes()))
        else:
            drawn.append((offset, *found))
    return Recipe(data.size, tuple(drawn), tuple(others))


def fill(folder: Path) -> dict[str, Any]:
    """Writes the weights of the artifact in `folder`, unless they are there, and gives what was written about it."""
    made = json.loads((folder / RECIPE).read_text())
    if (folder / WEIGHTS).exists() and (folder / WEIGHTS).stat().st_size == made["size"]:
        return made
    rest = (folder / OTHERS).read_bytes()
    partial = folder / f"{WEIGHTS}.partial"
    with partial.open("wb") as file:
        file.truncate(made["size"])
        for offset, size in made["others"]:
            file.seek(offset)
            file.write(rest[:size])
            rest = rest[size:]
        for offset, transposed, fields in made["drawn"]:
            part = _part(fields)
            array = part.draw()
            file.seek(offset)
            file.write(np.ascontiguousarray(array.T if transposed else array).data)
    partial.rename(folder / WEIGHTS)
    return made


def _part(fields: dict[str, Any]) -> Part:
    return Part(fields["name"], tuple(fields["shape"]), fields["scale"])


def parts(made: dict[str, Any]) -> dict[str, Part]:
    """The parts of the model by name."""
    return {fields["name"]: _part(fields) for fields in made["parts"]}
