"""Continuous batching: requests come and go at any time, and each call of the model works on all that are there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, STATE_SLOTS, CachePool, Manifest, ServedCache
from .blocks import Blocks, PoolFullError
from .paged_cache import PagedKVCache, Usage, integer, unhashable
from .request_tokens import RequestTokens
from .sources import RunsSetup, Source, Sources

_T = TypeVar("_T")


class Runs(Protocol):
    """What is asked of a compiled model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def gpu(self) -> Any: ...

    @property
    def setup(self) -> RunsSetup | None: ...

    def run(self, inputs: Any) -> Any: ...

    def to_numpy(self, name: str, array: Any) -> np.ndarray: ...


@dataclass(eq=False)
class _Request:
    """All tokens, of which `read` are in cache and states, and what it has a source of. admitted: the cache knows it;
    started: it has had an answer; slot is that of its states, while it is admitted."""

    name: Hashable
    tokens: list[Any]
    source: Source | None = None
    read: int = 0
    admitted: bool = False
    started: bool = False
    slot: int | None = None

    @property
    def left(self) -> int:
        """Tokens that are not read yet."""
        return len(self.tokens) - self.read


class Batcher:
    """Requests over one decoder that was compiled with `serve`, and one paged cache, states, or both.

        batcher = lowering.Batcher(lowering.compile("decoder.onnx", serve=lowering.Serve(context=2048)), blocks=512)
        batcher.add("a", prompt)                        # at any time
        for name, logits in batcher.step().items():     # one call of the model
            batcher.extend(name, int(logits.argmax()))  # or batcher.free(name), or whatever a sampler says

    A step takes the next token of every request that was extended, and of prompts, oldest first, so many tokens that
    all are at most tokens_per_step. It answers with the model's output for the last token, [vocabulary], of each
    request whose tokens are all read. Equal beginnings of prompts share blocks, unless the decoder has states or
    sources. Where blocks or slots of states run out, the youngest request gives its own up, and is read again later. It
    gives up its source, which is computed again later, where blocks for sources run out. Wrong arguments raise
    InputError and change nothing. One thread at a time.
    """

    def __init__(
        self,
        model: Runs,
        blocks: int | None = None,
        tokens_per_step: int = 256,
        state_slots: int | None = None,
        source_blocks: int | None = None,
    ) -> None:
        """blocks is the size of the pool, None for a decoder without a cache; with cache="int8" a block takes about a
        quarter of the memory. state_slots is how many requests can have states, for a decoder that keeps some; by
        default as many as a step, or the blocks, can be of. source_blocks is the size of the pool of sources, for a
        decoder that reads an encoder's output; by default that of the other pool."""
        served = model.manifest.served
        if served is None:
            raise InputError("the model serves no requests: compile it with serve=Serve(context=<number of tokens>).")
        self._model, self._served = model, served
        self._budget = integer(tokens_per_step, "tokens_per_step", 1)
        self.cache = _cache_of(served, blocks)
        self._slots = _slots_of(served, state_slots, self._budget if blocks is None else min(self._budget, blocks))
        self._sources = _sources_of(model, source_blocks, blocks)
        self._stores = _stores_of(served, self.cache, self._slots.total, self._sources)
        self._paged = _names_of(served.pools)
        self._source_arrays = [] if served.sources is None else _names_of(served.sources.pools)
        if model.gpu is not None:
            specs = {spec.name: spec for spec in model.manifest.inputs}
            self._stores = {name: model.gpu.zeros(specs[name], a.shape) for name, a in self._stores.items()}
        self._tokens = RequestTokens(next(t for t in model.manifest.inputs if t.name == served.ids))
        # Whether tokens tell all of what the cache holds.
        self._can_share = self._tokens.are_ids and not served.states and self._sources is None
        self._output = model.manifest.outputs[0].name
        self._requests: dict[Hashable, _Request] = {}  # in the order in which they came

    def add(self, request: Hashable, prompt: Any, fixed: Mapping[str, Any] | None = None) -> None:
        """A new request, whose tokens the next steps read.

        prompt is a sequence of at least one id, or float [n, width] for a decoder that takes embeddings. fixed has, for
        a decoder that reads an encoder's output, an array for each input of its setup, by name, and source_lengths, how
        many of the rows count, if these are not all. NumPy's arrays are copied; others must stay as they are until the
        request is freed.
        """
        tokens = self._tokens.of_prompt(prompt, request)
        self._check_unused(request)
        if not 1 <= len(tokens) <= self._served.context:
            raise InputError(
                f"the prompt of request {request!r} has {len(tokens)} tokens, and the model was compiled for 1 to "
                f"{self._served.context}."
            )
        if self._sources is None and fixed:
            raise InputError(f"request {request!r} has '{next(iter(fixed))}', and the model takes tokens alone.")
        source = None if self._sources is None else self._sources.read(request, fixed or {})
        self._requests[request] = _Request(request, tokens, source)

    def fork(self, request: Hashable, new: Hashable) -> None:
        """A second request, `new`, that goes on from where `request` is, as beams do. Both share blocks and source.

        States cannot be shared: a decoder that has some reads all tokens of `new` again.
        """
        ours = self._request(request)
        self._check_unused(new)
        theirs = _Request(new, list(ours.tokens), ours.source)
        if ours.admitted and self.cache is not None and not self._served.states:
            self.cache.truncate(request, ours.read)  # gives up what a call that failed had reserved
            self.cache.fork(request, new)
            theirs.read, theirs.admitted, theirs.started = ours.read, True, ours.started
        if self._sources is not None:
            self._sources.fork(request, new)
        self._requests[new] = theirs

    def extend(self, request: Hashable, token: Any) -> None:
        """The next token of a request, one more than a step has read: an id, or float [width]."""
        ours = self._request(request)
        following = self._tokens.of_one(token, request)
        if len(ours.tokens) >= self._served.context:
            raise InputError(
                f"request {request!r} has {len(ours.tokens)} tokens, as many as the model was compiled for: free() it, "
                "or compile with a larger context."
            )
        ours.tokens.append(following)

    def free(self, request: Hashable) -> None:
        """Forgets a request."""
        self._drop(self._request(request))
        if self._sources is not None:
            self._sources.free(request)
        del self._requests[request]

    def tokens(self, request: Hashable) -> list[Any]:
        """All tokens of a request: ids, or embeddings."""
        return list(self._request(request).tokens)

    @property
    def waiting(self) -> list[Hashable]:
        """The requests that the next steps have something to read of."""
        return [ours.name for ours in self._requests.values() if ours.left]

    def usage(self) -> Usage:
        """What the cache holds, and how many slots of states and blocks of sources are free."""
        held = Usage(0, 0, 0, 0, 0, 0, 1.0) if self.cache is None else self.cache.usage()
        held = replace(held, state_slots=self._slots.total, free_state_slots=self._slots.free)
        if self._sources is None:
            return held
        sources = self._sources.usage()
        return replace(held, source_blocks=sources.total, free_source_blocks=sources.free)

    def step(self) -> dict[Hashable, np.ndarray]:
        """One call of the model; nothing where no request waits.

        Raises PoolFullError where no request can go on: the pool is too small for the oldest one beside those before
        it, which nobody extends or frees.
        """
        counts = self._planned()
        if not counts:
            return {}
        tokens = [ours.tokens[ours.read : ours.read + count] for ours, count in counts.items()]
        inputs: dict[str, Any] = {
            self._served.ids: self._tokens.packed(tokens),
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: np.array([ours.read for ours in counts], np.int64),
            **self._stores,
        }
        if self.cache is not None:
            inputs[BLOCK_TABLE] = self.cache.block_table([ours.name for ours in counts])
        if self._served.states:
            inputs[STATE_SLOTS] = np.array([ours.slot for ours in counts], np.int64)
        if self._sources is not None:
            inputs |= self._sources.tables([ours.name for ours in counts])
        try:
            answers = self._model.to_numpy(self._output, self._model.run(inputs)[self._output])
        except BaseException:
            if self._served.states:  # a call that was cut short may have carried some of them on
                for ours in counts:
                    self._drop(ours)
            raise
        found = {}
        for ours, read, answer in zip(counts, tokens, answers):
            if self.cache is not None:  # which may share blocks of known ids
                self.cache.advance(ours.name, read if self._can_share else len(read))
            ours.read += len(read)
            if not ours.left:
                ours.started = True
                found[ours.name] = answer
        return found

    def _planned(self) -> dict[_Request, int]:
        """How many tokens of which requests the call reads, for which there is room now."""
        counts: dict[_Request, int] = {}
        full: PoolFullError | None = None
        room = self._budget
        ready = [ours for ours in self._requests.values() if ours.left]
        for ours in sorted(ready, key=lambda ours: not ours.started):  # who has begun goes first
            if not room:
                break
            try:
                if not ours.admitted:  # not before its turn: until then others may write what it can share
                    self._admit(ours, counts)
                count = min(ours.left, room)
                self._reserve(ours, count, counts)
            except PoolFullError as error:
                full = full or error
            else:
                counts[ours] = count
                room -= count
        if full is not None and not counts:
            raise full
        return counts

    def _admit(self, ours: _Request, planned: dict[_Request, int]) -> None:
        """A request gets its source, a slot of states, and the blocks that it shares."""
        sources, source = self._sources, ours.source
        if sources is not None and source is not None and ours.name not in sources:
            stores = {name: self._stores[name] for name in self._source_arrays}
            self._with_room(ours, planned, lambda: sources.put(ours.name, source, stores), of_sources=True)
        if self._served.states:
            self._with_room(ours, planned, lambda: self._take_slot(ours))
        if self.cache is not None:
            ours.read = self.cache.add(ours.name, ours.tokens if self._can_share else None)
        ours.admitted = True

    def _take_slot(self, ours: _Request) -> None:
        if not self._slots.free:
            raise PoolFullError(f"request {ours.name!r}", 1, 0, self._slots.total, "state slot")
        ours.slot = self._slots.take()

    def _reserve(self, ours: _Request, count: int, planned: dict[_Request, int]) -> None:
        """Room for so many tokens of a request."""
        cache = self.cache
        if cache is None:
            return
        for source, target in self._with_room(ours, planned, lambda: cache.reserve(ours.name, count)):
            for store in [self._stores[name] for name in self._paged]:
                if self._model.gpu is not None:
                    self._model.gpu.copy_row(store, source, target)
                elif store is not cache.pool:  # which the cache has copied
                    store[target] = store[source]

    def _with_room(
        self, ours: _Request, planned: dict[_Request, int], take: Callable[[], _T], of_sources: bool = False
    ) -> _T:
        """What `take` gives a request, for which younger ones give up their own if they are not of this call."""
        order = list(self._requests.values())
        while True:
            try:
                return take()
            except PoolFullError:
                younger = [o for o in order[order.index(ours) + 1 :] if o not in planned]
                holding = [o for o in younger if (self._has_source(o) if of_sources else o.admitted)]
                if not holding:
                    raise
                self._drop(holding[-1])
                if of_sources and self._sources is not None:
                    self._sources.free(holding[-1].name)

    def _has_source(self, ours: _Request) -> bool:
        return self._sources is not None and ours.name in self._sources

    def _drop(self, ours: _Request) -> None:
        """Its blocks and its slot are free, and all of its tokens to be read again."""
        if ours.admitted and self.cache is not None:
            self.cache.free(ours.name)
        if ours.slot is not None:
            self._slots.release([ours.slot])
        ours.admitted, ours.read, ours.slot = False, 0, None

    def _check_unused(self, name: Hashable) -> None:
        if self._known(name) is not None:
            raise InputError(f"there is a request {name!r} already: free() it first, or choose another name.")

    def _request(self, name: Hashable) -> _Request:
        ours = self._known(name)
        if ours is None:
            raise InputError(f"there is no request {name!r}: add() it first.")
        return ours

    def _known(self, name: Hashable) -> _Request | None:
        try:
            return self._requests.get(name)
        except TypeError:
            raise unhashable(name) from None


def _cache_of(served: ServedCache, blocks: int | None) -> PagedKVCache | None:
    """The cache, with the first pool; None for a decoder that has states alone."""
    if not served.pools:
        if blocks is not None:
            raise InputError(f"blocks is {blocks}, and the model keeps states and no cache: leave it out.")
        return None
    first = served.pools[0]
    return PagedKVCache(
        integer(blocks, "blocks", 1), served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads,
        head_dim=first.head_dim, dtype=served.dtype,
    )  # fmt: skip


def _slots_of(served: ServedCache, given: int | None, default: int) -> Blocks:
    """The slots of states, of which there are none where the decoder has no states."""
    if not served.states:
        if given is not None:
            raise InputError(f"state_slots is {given}, and the model keeps no states: leave it out.")
        return Blocks(0)
    return Blocks(default if given is None else integer(given, "state_slots", 1))


def _sources_of(model: Runs, given: int | None, default: int | None) -> Sources | None:
    """The pools of sources, of which there are none where the decoder reads no encoder's output."""
    served = model.manifest.served
    if served is None or served.sources is None:
        if given is not None:
            raise InputError(f"source_blocks is {given}, and the model reads no sources: leave it out.")
        return None
    setup = model.setup
    assert setup is not None
    return Sources(setup, served, served.sources, integer(default if given is None else given, "source_blocks", 1))


def _stores_of(
    served: ServedCache, cache: PagedKVCache | None, slots: int, sources: Sources | None
) -> dict[str, np.ndarray]:
    """What the model writes, and its setup, by input: for one on a GPU the shapes of it, as the caches' own pools stay
    empty."""
    stores: dict[str, np.ndarray] = {}
    if cache is not None:
        stores |= _arrays_of(served, served.pools, cache)
    if sources is not None and served.sources is not None:
        stores |= _arrays_of(served, served.sources.pools, sources.cache)
    for states in served.states:
        dtype = np.dtype(getattr(ml_dtypes, states.dtype, states.dtype))
        stores[states.name] = np.zeros((slots, states.layers, *states.shape), dtype)
    return stores


def _names_of(pools: tuple[CachePool, ...]) -> list[str]:
    """The inputs that hold the arrays of pools."""
    return [name for pool in pools for name in (pool.name, pool.scale) if name]


def _arrays_of(served: ServedCache, pools: tuple[CachePool, ...], cache: PagedKVCache) -> dict[str, np.ndarray]:
    """The arrays of pools with the blocks of a cache, of which the first is the cache's own."""
    arrays = {}
    for pool in pools:
        front = (len(cache.pool), pool.layers, 2, pool.kv_heads, served.tokens_per_block)
        arrays[pool.name] = cache.pool if pool is pools[0] else np.zeros((*front, pool.head_dim), cache.pool.dtype)
        if pool.scale:
            arrays[pool.scale] = np.zeros((*front, served.scales), np.float32)
    return arrays
