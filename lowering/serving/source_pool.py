"""Sources of requests, such as an encoder's output: keys and values of each lie in blocks of pools of their own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, SOURCE_TABLE, Manifest, ServedCache, SourceCache
from .arguments import numbers
from .blocks import PoolFullError
from .paged_cache import PagedKVCache, Usage


class RunsSetup(Protocol):
    """What is asked of a setup."""

    @property
    def manifest(self) -> Manifest: ...

    def accept(self, inputs: Any) -> dict[str, Any]: ...

    def run(self, inputs: Any) -> Any: ...


@dataclass(eq=False)
class Source:
    """Arrays for the inputs of the setup, which has that many rows, and how many of the rows count.

    holders are how many requests read it: one, and its forks.
    """

    arrays: dict[str, Any]
    rows: int
    length: int
    holders: int = 1


class SourcePool:
    """Which sources have their keys and values in the pools.

    `put` runs the setup, which writes them. They stay until the last holder has released the source, or `evict`.
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
        self._held: dict[Source, None] = {}

    def read(self, request: Hashable, given: Mapping[str, Any]) -> Source:
        """Return the source of a request, of copies of the arrays.

        Raises InputError, which names the input and the request, for arrays that the setup does not take.
        """
        names = [spec.name for spec in self._specs]
        unknown = [name for name in given if name not in (SOURCE_LENGTHS, *names)]
        if unknown:
            takes = ", ".join([*map(str, self._specs), SOURCE_LENGTHS])
            raise InputError(f"'{unknown[0]}' of request {request!r} is not of its source: `fixed` takes {takes}.")
        for spec in self._specs:
            if spec.name not in given:
                raise InputError(f"request {request!r} has no source: pass '{spec.name}' in `fixed`, {spec}.")
        try:
            arrays = self._setup.accept({name: given[name] for name in names})
        except InputError as error:
            raise InputError(f"the source of request {request!r}: {error}") from error
        name, axis = self._rows
        rows = arrays[name].shape[axis]
        if self._columns(rows) > self._blocks:
            raise InputError(
                f"'{name}' of request {request!r} has {rows} rows, which take {self._columns(rows)} blocks, and there "
                f"are {self._blocks} for sources. Give it fewer rows, or the batcher more source_blocks."
            )
        return Source(arrays, rows, _length(given.get(SOURCE_LENGTHS, rows), request, rows))

    def __contains__(self, source: Source) -> bool:
        """Whether the pools hold the keys and values of a source."""
        return source in self._held

    def put(self, source: Source, request: Hashable, stores: Mapping[str, Any]) -> None:
        """Compute a source's keys and values and write them into the pools, of which `stores` are the arrays.

        request is who needs it. Raises PoolFullError, and what the setup raises, with nothing changed.
        """
        self.cache.add(source)
        try:
            self.cache.reserve(source, source.rows)
            if source.length:
                self._setup.run({**source.arrays, SOURCE_TABLE: self.cache.block_table([source]), **stores})
        except PoolFullError as full:
            self.cache.free(source)
            raise PoolFullError(f"request {request!r}", full.needed, full.free, full.total, "source block") from None
        except BaseException:
            self.cache.free(source)
            raise
        self.cache.advance(source, source.rows)
        self.cache.truncate(source, source.length)
        self._held[source] = None

    def release(self, source: Source) -> None:
        """One holder less; the last one gives up what the pools hold."""
        source.holders -= 1
        if not source.holders:
            self.evict(source)

    def evict(self, source: Source) -> None:
        """Give up the keys and values of a source, if the pools hold them: `put` computes them again."""
        if source in self._held:
            self.cache.free(source)
            del self._held[source]

    def fewest(self, source: Source, candidates: Sequence[Source]) -> list[Any] | None:
        """Return which of these the pools must give up for another source to fit; the first ones are spared.

        None where it does not fit even without all of them.
        """
        self.cache.add(source)
        chosen = self.cache.fewest(source, source.rows, candidates)
        self.cache.free(source)
        return chosen

    def tables(self, sources: Sequence[Source]) -> dict[str, np.ndarray]:
        """Return what a call of the model is told of the sources of its requests, which the pools hold."""
        numbers_of = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        unique, rows = list(numbers_of), [numbers_of[source] for source in sources]
        lengths = self.cache.lengths(unique).astype(np.int64)
        return {SOURCE_LENGTHS: lengths[rows], SOURCE_TABLE: self.cache.block_table(unique)[rows]}

    def usage(self) -> Usage:
        return self.cache.usage()

    def _columns(self, rows: int) -> int:
        return -(-rows // self.cache.tokens_per_block)


def _length(given: Any, request: Hashable, rows: int) -> int:
    """Return how many rows of a source count, as `source_lengths` says it: an integer, or an array of one."""
    lengths = numbers(given)
    is_one = lengths is not None and lengths.dtype.kind in "iu" and lengths.size == 1
    if lengths is None or not is_one or not 0 <= int(lengths.reshape(())) <= rows:
        raise InputError(
            f"'{SOURCE_LENGTHS}' of request {request!r} must be one integer from 0 to {rows}, as many rows as its "
            f"source has, not {given!r}."
        )
    return int(lengths.reshape(()))
