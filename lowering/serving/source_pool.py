"""Sources of requests, such as an encoder's output: keys and values of each lie in blocks of pools of their own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, SOURCE_TABLE, Manifest, ServedCache, SourceCache, TensorSpec
from .blocks import PoolFullError
from .paged_cache import PagedKVCache, Usage


class RunsSetup(Protocol):
    """What is asked of a setup."""

    @property
    def manifest(self) -> Manifest: ...

    def run(self, inputs: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Source:
    """Arrays for the inputs of the setup, which has that many rows, and how many of the rows count."""

    arrays: dict[str, Any]
    rows: int
    length: int


class Sources:
    """The sources whose keys and values are in the pools.

    `put` runs the setup, which writes them. A request keeps its blocks until `free`; a fork shares them.
    """

    def __init__(self, setup: RunsSetup, served: ServedCache, sources: SourceCache, blocks: int) -> None:
        first = sources.pools[0]
        self.cache = PagedKVCache(
            blocks, served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads, head_dim=first.head_dim,
            dtype=served.dtype,
        )  # fmt: skip
        self._setup, self._rows, self._blocks = setup, sources.rows, blocks
        pools = {name for pool in sources.pools for name in (pool.name, pool.scale)}
        self._specs = [spec for spec in setup.manifest.inputs if spec.name not in {SOURCE_TABLE, *pools}]
        self._held: set[Hashable] = set()

    def read(self, request: Hashable, given: Mapping[str, Any]) -> Source:
        """Return the source of a request, of copies of NumPy's arrays.

        Raises InputError, which names the input and the request, for arrays that the setup does not take.
        """
        unknown = [name for name in given if name not in {SOURCE_LENGTHS, *(spec.name for spec in self._specs)}]
        if unknown:
            takes = ", ".join([*map(str, self._specs), SOURCE_LENGTHS])
            raise InputError(f"'{unknown[0]}' of request {request!r} is not of its source: `fixed` takes {takes}.")
        arrays: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        rows = 0
        for spec in self._specs:
            if spec.name not in given:
                raise InputError(f"request {request!r} has no source: pass '{spec.name}' in `fixed`, {spec}.")
            arrays[spec.name] = array = _taken(given[spec.name])
            shape = tuple(array.shape)
            _check(spec, request, shape, str(array.dtype).rpartition(".")[2], sizes)
            if spec.name == self._rows[0]:
                rows = shape[self._rows[1]]
        if self._columns(rows) > self._blocks:
            raise InputError(
                f"'{self._rows[0]}' of request {request!r} has {rows} rows, which take {self._columns(rows)} blocks, "
                f"and there are {self._blocks} for sources. Give it fewer rows, or the batcher more source_blocks."
            )
        return Source(arrays, rows, _length(given.get(SOURCE_LENGTHS, rows), request, rows))

    def __contains__(self, request: Hashable) -> bool:
        """Whether the pools hold the source of a request."""
        return request in self._held

    def put(self, request: Hashable, source: Source, stores: Mapping[str, Any]) -> None:
        """Compute a source's keys and values and write them into the pools, of which `stores` are the arrays.

        Raises PoolFullError, with nothing changed.
        """
        self.cache.add(request)
        try:
            self.cache.reserve(request, source.rows)
            if source.length:
                self._setup.run({**source.arrays, SOURCE_TABLE: self.cache.block_table([request]), **stores})
        except PoolFullError as full:
            self.cache.free(request)
            raise PoolFullError(f"request {request!r}", full.needed, full.free, full.total, "source block") from None
        except BaseException:
            self.cache.free(request)
            raise
        self.cache.advance(request, source.rows)
        self.cache.truncate(request, source.length)
        self._held.add(request)

    def free(self, request: Hashable) -> None:
        """Forget the source of a request, if the pools hold it."""
        if request in self._held:
            self.cache.free(request)
            self._held.remove(request)

    def fork(self, request: Hashable, new: Hashable) -> None:
        """Let a second request share the source of another one, if the pools hold it."""
        if request in self._held:
            self.cache.fork(request, new)
            self._held.add(new)

    def tables(self, requests: Sequence[Hashable]) -> dict[str, np.ndarray]:
        """Return what a call of the model is told of sources that the pools hold."""
        lengths = self.cache.lengths(requests).astype(np.int64)
        return {SOURCE_LENGTHS: lengths, SOURCE_TABLE: self.cache.block_table(requests)}

    def usage(self) -> Usage:
        return self.cache.usage()

    def _columns(self, rows: int) -> int:
        return -(-rows // self.cache.tokens_per_block)


def _taken(array: Any) -> Any:
    """Return a copy, but arrays of other libraries as they are: they may be in a GPU's memory."""
    return array if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray) else np.array(array)


def _check(spec: TensorSpec, request: Hashable, shape: tuple[int, ...], dtype: str, sizes: dict[str, int]) -> None:
    """Raise InputError for an array of another shape or type. sizes are those of the dimensions with names so far."""
    fits = len(shape) == len(spec.dims) and dtype == spec.dtype
    for size, wanted in zip(shape, spec.dims):
        fits = fits and size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
    if not fits:
        known = "".join(f", {name} = {size}" for name, size in sizes.items() if name in spec.dims)
        raise InputError(
            f"'{spec.name}' of request {request!r} is {dtype}{list(shape)}, and the model takes {spec}{known}."
        )


def _length(given: Any, request: Hashable, rows: int) -> int:
    """Return how many rows of a source count, as `source_lengths` says it: an integer, or an array of one."""
    lengths = np.asarray(given)
    if lengths.dtype.kind not in "iu" or lengths.size != 1 or not 0 <= int(lengths.reshape(())) <= rows:
        raise InputError(
            f"'{SOURCE_LENGTHS}' of request {request!r} must be one integer from 0 to {rows}, as many rows as its "
            f"source has, not {given!r}."
        )
    return int(lengths.reshape(()))
