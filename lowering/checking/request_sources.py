"""Sources of the requests that `verify` sends to a served decoder, and the matching inputs of the original model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, Manifest, TensorSpec
from ..runtime.arrays.elements import ElementType
from .synthetic_inputs import generate_inputs, read_input_specs

_DEFAULT_ROWS = 11  # rows of a source, unless a size says otherwise


@dataclass(frozen=True)
class RequestSources:
    """Arrays [requests, ...] by name, and the number of valid rows of each request's source.

    `rows` is the size of the row axes, as text, and `max_rows` their size in all arrays. `dtypes` are the types that
    the batcher takes. `extra_specs` are inputs of the model that a served decoder does not have, such as a padding mask
    of the source.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: str = ""
    max_rows: int = 0
    dtypes: dict[str, np.dtype] = field(default_factory=dict)
    specs: tuple[TensorSpec, ...] = ()
    extra_specs: tuple[TensorSpec, ...] = ()

    def build_fixed(self, request: int) -> dict[str, Any]:
        """Return the source arguments of the batcher for a request."""
        if not self.arrays:
            return {}
        sliced = {name: array[request : request + 1].astype(self.dtypes[name]) for name, array in self.arrays.items()}
        return {**sliced, SOURCE_LENGTHS: self.lengths[request]}

    def build_feeds(self, request: int) -> dict[str, np.ndarray]:
        """Return the inputs of the original model for a request: valid rows, and ones for padding masks."""
        length = int(self.lengths[request]) if len(self.lengths) else 0
        feeds = {}
        for spec in self.specs:
            index = tuple(slice(length) if dim == self.rows else slice(None) for dim in spec.dims)
            feeds[spec.name] = self.arrays[spec.name][request : request + 1][index]
        for spec in self.extra_specs:
            shape = [dim if isinstance(dim, int) else length if dim == self.rows else 1 for dim in spec.dims]
            feeds[spec.name] = np.ones(shape, ElementType(spec.dtype, spec.storage).numpy)
        return feeds


def generate_request_sources(
    model: ir.Model,
    manifest: Manifest,
    excluded_names: Collection[str],
    user_arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    requests: int,
    rng: np.random.Generator,
) -> RequestSources:
    """Return sources of random lengths for the requests, or the user's arrays, all of whose rows are valid.

    `excluded_names` are the inputs of the model that are not sources.

    Raises:
        InputError: The number of requests of an array is another one.
    """
    specs = {spec.name: spec for spec in read_input_specs(model) if spec.name not in excluded_names}
    if manifest.served is None or manifest.served.sources is None or manifest.setup is None:
        return RequestSources(extra_specs=tuple(specs.values()))
    names = [spec.name for spec in manifest.setup.inputs if spec.name in specs]
    name, axis = manifest.served.sources.rows
    size = specs[name].dims[axis]
    low, high = manifest.setup.ranges.get(str(size), (0, _DEFAULT_ROWS))
    rows = sizes.get(str(size), max(low, min(_DEFAULT_ROWS, high))) if isinstance(size, str) else size
    counts = {str(size): rows, str(specs[name].dims[0]): requests} | dict(sizes)
    sized_specs = [
        TensorSpec(s.name, s.dtype, s.storage, (requests, *s.dims[1:])) for s in map(specs.__getitem__, names)
    ]
    arrays = generate_inputs(model.graph, sized_specs, counts, rng)
    arrays |= {name: np.asarray(user_arrays[name]) for name in names if name in user_arrays}
    rows = arrays[name].shape[axis]
    is_chosen = isinstance(size, str) and name not in user_arrays
    lengths = rng.integers(1, rows, requests, endpoint=True) if is_chosen else np.full(requests, rows)
    for key, array in arrays.items():
        if len(array) != requests:
            raise InputError(
                "verify.row_count_mismatch",
                f"'{key}' has {len(array)} rows for {requests} requests. Give one row for each request.",
            )
    dtypes = {spec.name: ElementType(spec.dtype, spec.storage).numpy for spec in manifest.setup.inputs}
    extra_specs = tuple(spec for spec in specs.values() if spec.name not in names)
    return RequestSources(arrays, lengths, str(size), rows, dtypes, tuple(map(specs.__getitem__, names)), extra_specs)
