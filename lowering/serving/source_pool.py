"""Sources of requests, such as an encoder's output: their keys and values are in blocks of separate pools."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, SOURCE_TABLE, Manifest, ServedCache, SourceCache
from .arguments import read_numbers
from .blocks import PoolFullError
from .paged_cache import PagedKVCache, Usage


class SetupModel(Protocol):
    """The interface of a setup."""

    @property
    def manifest(self) -> Manifest: ...

    def accept(self, inputs: Any) -> dict[str, Any]: ...

    def run(self, inputs: Any) -> Any: ...


@dataclass(eq=False)
class RequestSource:
    """Arrays for the inputs of the setup, with that many rows, and the number of valid rows.

    holder_count is the number of requests that read it: one, and its forks.
    """

    arrays: dict[str, Any]
    rows: int
    length: int
    holder_count: int = 1


class SourcePool:
    """The sources whose keys and values are in the pools.

    `compute` runs the setup, which writes them. They stay until the last holder has released the source, or until
    `evict`.
    """

    def __init__(self, setup: SetupModel, served: ServedCache, sources: SourceCache, blocks: int) -> None:
        first = sources.pools[0]
        self.cache = PagedKVCache(
            blocks, served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads, head_dim=first.head_dim,
            dtype=served.dtype,
        )  # fmt: skip
        self._setup, self._rows, self._blocks = setup, sources.rows, blocks
        pools = {name for pool in sources.pools for name in (pool.name, pool.scale)}
        self._specs = [spec for spec in setup.manifest.inputs if spec.name not in {SOURCE_TABLE, *pools}]
        self._resident: dict[RequestSource, None] = {}

    def read(self, request: Hashable, fixed: Mapping[str, Any]) -> RequestSource:
        """Return the source of a request, with copies of the arrays.

        Raises InputError, which names the input and the request, for arrays that the setup does not take.
        """
        names = [spec.name for spec in self._specs]
        unknown = [name for name in fixed if name not in (SOURCE_LENGTHS, *names)]
        if unknown:
            accepted = ", ".join([*map(str, self._specs), SOURCE_LENGTHS])
            raise InputError(
                "batcher.source_name_unknown",
                f"'{unknown[0]}' of request {request!r} is not an input of its source: `fixed` takes {accepted}.",
            )
        for spec in self._specs:
            if spec.name not in fixed:
                raise InputError(
                    "batcher.source_missing",
                    f"request {request!r} has no source: pass '{spec.name}' in `fixed`, {spec}.",
                )
        try:
            arrays = self._setup.accept({name: fixed[name] for name in names})
        except InputError as error:
            raise InputError(error.code, f"the source of request {request!r}: {error}") from error
        name, axis = self._rows
        rows = arrays[name].shape[axis]
        if self._columns(rows) > self._blocks:
            raise InputError(
                "batcher.source_too_large",
                f"'{name}' of request {request!r} has {rows} rows, which take {self._columns(rows)} blocks, and "
                f"source_blocks is {self._blocks}. Give it fewer rows, or increase source_blocks of the batcher.",
            )
        return RequestSource(arrays, rows, _read_length(fixed.get(SOURCE_LENGTHS, rows), request, rows))

    def __contains__(self, source: RequestSource) -> bool:
        """Return whether the pools have the keys and values of a source."""
        return source in self._resident

    def compute(self, source: RequestSource, request: Hashable, arrays: Mapping[str, Any]) -> None:
        """Compute a source's keys and values into the pools, whose arrays are `arrays`.

        request is the name for errors. Raises PoolFullError, and any error of the setup, with nothing changed.
        """
        self.cache.add(source)
        try:
            self.cache.reserve(source, source.rows)
            if source.length:
                self._setup.run({**source.arrays, SOURCE_TABLE: self.cache.block_table([source]), **arrays})
        except PoolFullError as error:
            self.cache.free(source)
            raise PoolFullError(
                "batcher.source_blocks_exhausted",
                f"request {request!r}",
                error.needed,
                error.free,
                error.total,
                "source block",
            ) from None
        except BaseException:
            self.cache.free(source)
            raise
        self.cache.advance(source, source.rows)
        self.cache.truncate(source, source.length)
        self._resident[source] = None

    def release(self, source: RequestSource) -> None:
        """Remove a holder. The last one evicts the source."""
        source.holder_count -= 1
        if not source.holder_count:
            self.evict(source)

    def evict(self, source: RequestSource) -> None:
        """Free the blocks of a source, if it is in the pools: `compute` computes it again."""
        if source in self._resident:
            self.cache.free(source)
            del self._resident[source]

    def choose_evictions(self, source: RequestSource, candidates: Sequence[RequestSource]) -> list[Any] | None:
        """Return the candidates that must be evicted to fit another source. The first ones are spared if possible.

        Returns None if evicting all of them is not enough.
        """
        self.cache.add(source)
        chosen = self.cache.fewest(source, source.rows, candidates)
        self.cache.free(source)
        return chosen

    def build_tables(self, sources: Sequence[RequestSource]) -> dict[str, np.ndarray]:
        """Return the inputs for the sources of a call's requests, which must be in the pools."""
        index_of = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        unique, rows = list(index_of), [index_of[source] for source in sources]
        lengths = self.cache.lengths(unique).astype(np.int64)
        return {SOURCE_LENGTHS: lengths[rows], SOURCE_TABLE: self.cache.block_table(unique)[rows]}

    def usage(self) -> Usage:
        return self.cache.usage()

    def _columns(self, rows: int) -> int:
        return -(-rows // self.cache.tokens_per_block)


def _read_length(value: Any, request: Hashable, rows: int) -> int:
    """Return the number of valid rows from `source_lengths`, an integer or an array of one."""
    lengths = read_numbers(value)
    is_integer = lengths is not None and lengths.dtype.kind in "iu" and lengths.size == 1
    if lengths is None or not is_integer or not 0 <= int(lengths.reshape(())) <= rows:
        raise InputError(
            "batcher.source_length_invalid",
            f"'{SOURCE_LENGTHS}' of request {request!r} must be one integer from 0 to {rows}, the number of rows of "
            f"its source, not {value!r}.",
        )
    return int(lengths.reshape(()))
