"""The sizes at which the page shows everything that depends on sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arithmetic import LARGEST_SIZE
from ..errors import InputError
from ..manifest import Manifest
from ..runtime.artifact.checks import check_dimensions, check_fixed_dimensions
from .script import MainFunction

_DEFAULT_SIZE = 256


@dataclass(frozen=True)
class ChosenSizes:
    """A size for each symbolic dimension of the inputs; `picked` are the dimensions with default sizes."""

    values: dict[str, int]
    picked: frozenset[str]

    def __str__(self) -> str:
        return ", ".join(f"{name} = {size}" for name, size in self.values.items())

    def map_names(self, manifest: Manifest, main: MainFunction) -> dict[str, int]:
        """Return the sizes by their names in a script, whose inputs have the manifest's order."""
        sizes_by_name = {}
        for spec, parameter in zip(manifest.inputs, main.parameters):
            for dim, expr in zip(spec.dims, main.read_shape(parameter) or ()):
                name = getattr(expr, "id", None)
                if isinstance(dim, str) and name is not None:
                    sizes_by_name[name] = self.values[dim]
        return sizes_by_name


def choose_sizes(manifest: Manifest, user_sizes: Mapping[str, int], measured: Mapping[str, int]) -> ChosenSizes:
    """Return the user's sizes, else measured ones, else defaults: 1 for batches, 256 otherwise, within the legal sizes.

    Raises:
        InputError: No input has a name, or a size is illegal.
    """
    axes_by_name = {dim: axis for spec in manifest.inputs for axis, dim in enumerate(spec.dims) if isinstance(dim, str)}
    check_dimensions(user_sizes, axes_by_name.keys() | manifest.ranges.keys())
    check_fixed_dimensions(user_sizes, manifest.ranges)
    values, picked = {}, set()
    for name, axis in axes_by_name.items():
        low, high = manifest.ranges.get(name, (0, LARGEST_SIZE))
        if name in user_sizes and not low <= user_sizes[name] <= high:
            raise InputError(
                "dims.size_out_of_range",
                f"--dim {name}={user_sizes[name]}: the artifact was compiled for {low} to {high}.",
            )
        value = user_sizes.get(name, measured.get(name))
        if value is None:
            value = min(max(1 if axis == 0 else _DEFAULT_SIZE, low), high)
            picked.add(name)
        values[name] = value
    return ChosenSizes(values, frozenset(picked))
