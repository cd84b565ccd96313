"""The sizes at which the page shows what depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arithmetic import LARGEST_SIZE
from ..errors import InputError
from ..manifest import Manifest
from ..runtime.checks import check_dimensions, check_fixed_dimensions
from .script import Main

_TYPICAL = 256


@dataclass(frozen=True)
class ChosenSizes:
    """A size for each symbolic dimension of the inputs; `picked` are those that nobody gave."""

    values: dict[str, int]
    picked: frozenset[str]

    def __str__(self) -> str:
        return ", ".join(f"{name} = {size}" for name, size in self.values.items())

    def of(self, manifest: Manifest, main: Main) -> dict[str, int]:
        """By the names that the dimensions have in a script, whose inputs stand in the manifest's order."""
        found = {}
        for spec, parameter in zip(manifest.inputs, main.parameters):
            for dim, expr in zip(spec.dims, main.shape(parameter) or ()):
                name = getattr(expr, "id", None)
                if isinstance(dim, str) and name is not None:
                    found[name] = self.values[dim]
        return found


def chosen(manifest: Manifest, said: Mapping[str, int], measured: Mapping[str, int]) -> ChosenSizes:
    """What is said, else what was measured, else what is usual: 1 for batches, 256 for everything else, within the
    legal sizes. Raises InputError for a name that no input has, and for an illegal size."""
    known = {dim: axis for spec in manifest.inputs for axis, dim in enumerate(spec.dims) if isinstance(dim, str)}
    check_dimensions(said, known.keys() | manifest.ranges.keys())
    check_fixed_dimensions(said, manifest.ranges)
    values, picked = {}, set()
    for name, axis in known.items():
        low, high = manifest.ranges.get(name, (0, LARGEST_SIZE))
        if name in said and not low <= said[name] <= high:
            raise InputError(f"--dim {name}={said[name]}: the artifact was compiled for {low} to {high}.")
        value = said.get(name, measured.get(name))
        if value is None:
            value = min(max(1 if axis == 0 else _TYPICAL, low), high)
            picked.add(name)
        values[name] = value
    return ChosenSizes(values, frozenset(picked))
