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
class DrawnTensor:
    """A matrix of normal numbers times `scale`, float16."""

    name: str
    shape: tuple[int, ...]
    scale: float

    def draw(self) -> np.ndarray:
        tile = np.roll(_tile() * np.float32(self.scale), zlib.crc32(self.name.encode())).astype(np.float16)
        return np.resize(tile, self.shape)


@dataclass(frozen=True)
class Recipe:
    """The contents of a file of weights: drawn tensors, each at an offset, possibly transposed; bytes of the others."""

    size: int
    drawn: tuple[tuple[int, bool, DrawnTensor], ...]
    rest: tuple[tuple[int, bytes], ...]

    def write(self, folder: Path, tensors: Sequence[DrawnTensor], about: dict[str, Any]) -> None:
        """Write the recipe. tensors are all of the model, also those that weights.bin has in another form."""
        drawn = [[offset, transposed, dataclasses.asdict(tensor)] for offset, transposed, tensor in self.drawn]
        sizes = [[offset, len(data)] for offset, data in self.rest]
        fields = [dataclasses.asdict(tensor) for tensor in tensors]
        text = json.dumps({"config": about, "parts": fields, "size": self.size, "drawn": drawn, "others": sizes})
        (folder / RECIPE).write_text(text)
        (folder / OTHERS).write_bytes(b"".join(data for _, data in self.rest))


def recipe(data: np.ndarray, extents: Sequence[tuple[int, int]], tensors: Sequence[DrawnTensor]) -> Recipe:
    """Return which of the tensors a file of weights consists of, by offset and size of each."""
    candidates = {}
    for tensor in tensors:
        array = tensor.draw()
        candidates[bytes(array.data.cast("B")[:4096]), array.nbytes] = (False, tensor)
        candidates[array.T[:64].tobytes()[:4096], array.nbytes] = (True, tensor)
    drawn, rest = [], []
    for offset, size in extents:
        match = candidates.get((data[offset : offset + 4096].tobytes(), size))
        if match is None:
            rest.append((offset, data[offset : offset + size].tobytes()))
        else:
            drawn.append((offset, *match))
    return Recipe(data.size, tuple(drawn), tuple(rest))


def fill(folder: Path) -> dict[str, Any]:
    """Write the weights of the artifact in `folder`, unless they are there, and return their recipe."""
    recipe_data = json.loads((folder / RECIPE).read_text())
    if (folder / WEIGHTS).exists() and (folder / WEIGHTS).stat().st_size == recipe_data["size"]:
        return recipe_data
    rest = (folder / OTHERS).read_bytes()
    partial = folder / f"{WEIGHTS}.partial"
    with partial.open("wb") as file:
        file.truncate(recipe_data["size"])
        for offset, size in recipe_data["others"]:
            file.seek(offset)
            file.write(rest[:size])
            rest = rest[size:]
        for offset, transposed, fields in recipe_data["drawn"]:
            tensor = _read_tensor(fields)
            array = tensor.draw()
            file.seek(offset)
            file.write(np.ascontiguousarray(array.T if transposed else array).data)
    partial.rename(folder / WEIGHTS)
    return recipe_data


def _read_tensor(fields: dict[str, Any]) -> DrawnTensor:
    return DrawnTensor(fields["name"], tuple(fields["shape"]), fields["scale"])


def read_tensors(recipe_data: dict[str, Any]) -> dict[str, DrawnTensor]:
    """Return the tensors of the model by name."""
    return {fields["name"]: _read_tensor(fields) for fields in recipe_data["parts"]}
