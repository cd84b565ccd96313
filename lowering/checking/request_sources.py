"""Sources of the requests that `verify` sends to a served decoder, and what the model as it was takes instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, Manifest, TensorSpec
from ..runtime.elements import ElementType
from .synthetic_inputs import generate_inputs, specs_of

_ROWS = 11  # of a source, where no size says otherwise


@dataclass(frozen=True)
class RequestSources:
    """Arrays [requests, ...] by name, and how many rows of each request's source count: no others are to be seen.

    rows is the size of axes over rows, as text, and most what it is in all arrays; dtypes are the types that the
    batcher takes. `others` are inputs of the model that a served one does without, such as a mask of the source's
    padding.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: str = ""
    most: int = 0
    dtypes: dict[str, np.dtype] = field(default_factory=dict)
    specs: tuple[TensorSpec, ...] = ()
    others: tuple[TensorSpec, ...] = ()

    def fixed(self, request: int) -> dict[str, Any]:
        """Return what the batcher is given for a request."""
        if not self.arrays:
            return {}
        own = {name: array[request : request + 1].astype(self.dtypes[name]) for name, array in self.arrays.items()}
        return {**own, SOURCE_LENGTHS: self.lengths[request]}

    def feeds(self, request: int) -> dict[str, np.ndarray]:
        """Return what the model as it was is given: rows that count, and ones for what says which of them do."""
        length = int(self.lengths[request]) if len(self.lengths) else 0
        found = {}
        for spec in self.specs:
            index = tuple(slice(length) if dim == self.rows else slice(None) for dim in spec.dims)
            found[spec.name] = self.arrays[spec.name][request : request + 1][index]
        for spec in self.others:
            shape = [dim if isinstance(dim, int) else length if dim == self.rows else 1 for dim in spec.dims]
            found[spec.name] = np.ones(shape, ElementType(spec.dtype, spec.storage).numpy)
        return found


def request_sources(
    model: ir.Model,
    manifest: Manifest,
    known: Collection[str],
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    requests: int,
    rng: np.random.Generator,
) -> RequestSources:
    """Choose sources of random lengths for so many requests, or take those that are given, of which all rows count.

    known are the inputs of the model that are no sources. Raises InputError for an input that a served decoder takes
    and this does not know, and for arrays of other numbers of requests.
    """
    specs = {spec.name: spec for spec in specs_of(model) if spec.name not in known}
    if manifest.served is None or manifest.served.sources is None or manifest.setup is None:
        return RequestSources(others=tuple(specs.values()))
    names = [spec.name for spec in manifest.setup.inputs if spec.name in specs]
    name, axis = manifest.served.sources.rows
    size = specs[name].dims[axis]
    low, high = manifest.setup.ranges.get(str(size), (0, _ROWS))
    rows = sizes.get(str(size), max(low, min(_ROWS, high))) if isinstance(size, str) else size
    counts = {str(size): rows, str(specs[name].dims[0]): requests} | dict(sizes)
    wanted = [TensorSpec(s.name, s.dtype, s.storage, (requests, *s.dims[1:])) for s in map(specs.__getitem__, names)]
    arrays = generate_inputs(model.graph, wanted, counts, rng)
    arrays |= {name: np.asarray(given[name]) for name in names if name in given}
    rows = arrays[name].shape[axis]
    is_chosen = isinstance(size, str) and name not in given
    lengths = rng.integers(1, rows, requests, endpoint=True) if is_chosen else np.full(requests, rows)
    for key, array in arrays.items():
        if len(array) != requests:
            raise InputError(f"'{key}' has {len(array)} rows for {requests} requests: give one for each.")
    dtypes = {spec.name: ElementType(spec.dtype, spec.storage).numpy for spec in manifest.setup.inputs}
    others = tuple(spec for spec in specs.values() if spec.name not in names)
    return RequestSources(arrays, lengths, str(size), rows, dtypes, tuple(map(specs.__getitem__, names)), others)
