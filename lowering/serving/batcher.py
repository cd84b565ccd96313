"""Continuous batching: requests come and go at any time, and each call of the model works on all that are there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, STATE_SLOTS, Manifest, ServedCache
from .blocks import Blocks, PoolFullError
from .paged_cache import PagedKVCache, Usage, integer, token_ids, unhashable

_T = TypeVar("_T")


class Runs(Protocol):
    """What is asked of a compiled model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def gpu(self) -> Any: ...

    def run(self, inputs: Any) -> Any: ...

    def to_numpy(self, name: str, array: Any) -> np.ndarray: ...


@dataclass(eq=False)
class _Request:
    """All tokens, of which `read` are in cache and states. admitted: the cache knows it; started: it has had an answer;
    slot is that of its states, while it is admitted."""

    name: Hashable
    tokens: list[int]
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
    request whose tokens are all read. Equal beginnings of prompts share blocks, unless the decoder has states. Where
    blocks or slots of states run out, the youngest request gives its own up, and is read again later. Wrong arguments
    raise InputError and change nothing. One thread at a time.
    """

    def __init__(
        self, model: Runs, blocks: int | None = None, tokens_per_step: int = 256, state_slots: int | None = None
    ) -> None:
        """blocks is the size of the pool, None for a decoder without a cache; with cache="int8" a block takes about a
        quarter of the memory. state_slots is how many requests can have states, for a decoder that keeps some; by
        default as many as a step, or the blocks, can be of."""
        served = model.manifest.served
        if served is None:
            raise InputError("the model serves no requests: compile it with serve=Serve(context=<number of tokens>).")
        self._model, self._served = model, served
        self._budget = integer(tokens_per_step, "tokens_per_step", 1)
        self.cache = _cache_of(served, blocks)
        self._slots = _slots_of(served, state_slots, self._budget if blocks is None else min(self._budget, blocks))
        self._stores = _stores_of(served, self.cache, self._slots.total)
        self._paged = [name for pool in served.pools for name in (pool.name, pool.scale) if name]
        if model.gpu is not None:
            specs = {spec.name: spec for spec in model.manifest.inputs}
            self._stores = {name: model.gpu.zeros(specs[name], a.shape) for name, a in self._stores.items()}
        self._ids = next(t for t in model.manifest.inputs if t.name == served.ids).dtype
        self._output = model.manifest.outputs[0].name
        self._requests: dict[Hashable, _Request] = {}  # in the order in which they came

    def add(self, request: Hashable, prompt: Any) -> None:
        """A new request, whose tokens the next steps read; prompt is a sequence of at least one id."""
        tokens = token_ids(prompt, request)
        if self._known(request) is not None:
            raise InputError(f"there is a request {request!r} already: free() it first, or choose another name.")
        if not 1 <= len(tokens) <= self._served.context:
            raise InputError(
                f"the prompt of request {request!r} has {len(tokens)} tokens, and the model was compiled for 1 to "
                f"{self._served.context}."
            )
        self._requests[request] = _Request(request, tokens)

    def extend(self, request: Hashable, token: int) -> None:
        """The next token of a request, one more than a step has read."""
        ours, number = self._request(request), integer(token, "token", 0)
        if len(ours.tokens) >= self._served.context:
            raise InputError(
                f"request {request!r} has {len(ours.tokens)} tokens, as many as the model was compiled for: free() it, "
                "or compile with a larger context."
            )
        ours.tokens.append(number)

    def free(self, request: Hashable) -> None:
        """Forgets a request."""
        self._drop(self._request(request))
        del self._requests[request]

    def tokens(self, request: Hashable) -> list[int]:
        """All ids of a request."""
        return list(self._request(request).tokens)

    @property
    def waiting(self) -> list[Hashable]:
        """The requests that the next steps have something to read of."""
        return [ours.name for ours in self._requests.values() if ours.left]

    def usage(self) -> Usage:
        """What the cache holds, and how many slots of states are free."""
        held = Usage(0, 0, 0, 0, 0, 0, 1.0) if self.cache is None else self.cache.usage()
        return replace(held, state_slots=self._slots.total, free_state_slots=self._slots.free)

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
            self._served.ids: np.concatenate(tokens, dtype=np.dtype(self._ids), casting="unsafe")[None],
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: np.array([ours.read for ours in counts], np.int64),
            **self._stores,
        }
        if self.cache is not None:
            inputs[BLOCK_TABLE] = self.cache.block_table([ours.name for ours in counts])
        if self._served.states:
            inputs[STATE_SLOTS] = np.array([ours.slot for ours in counts], np.int64)
        try:
            answers = self._model.to_numpy(self._output, self._model.run(inputs)[self._output])
        except BaseException:
            if self._served.states:  # a call that was cut short may have carried some of them on
                for ours in counts:
                    self._drop(ours)
            raise
        found = {}
        for ours, read, answer in zip(counts, tokens, answers):
            if self.cache is not None:  # which may share blocks of known ids, and states cannot go on behind them
                self.cache.advance(ours.name, len(read) if self._served.states else read)
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
        """A request gets a slot of states, and the blocks that it shares."""
        if self._served.states:
            self._with_room(ours, planned, lambda: self._take_slot(ours))
        if self.cache is not None:
            ours.read = self.cache.add(ours.name, None if self._served.states else ours.tokens)
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

    def _with_room(self, ours: _Request, planned: dict[_Request, int], take: Callable[[], _T]) -> _T:
        """What `take` gives a request, for which younger ones give up their own if they are not of this call."""
        order = list(self._requests.values())
        while True:
            try:
                return take()
            except PoolFullError:
                younger = [o for o in order[order.index(ours) + 1 :] if o.admitted and o not in planned]
                if not younger:
                    raise
                self._drop(younger[-1])

    def _drop(self, ours: _Request) -> None:
        """Its blocks and its slot are free, and all of its tokens to be read again."""
        if ours.admitted and self.cache is not None:
            self.cache.free(ours.name)
        if ours.slot is not None:
            self._slots.release([ours.slot])
        ours.admitted, ours.read, ours.slot = False, 0, None

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


def _stores_of(served: ServedCache, cache: PagedKVCache | None, slots: int) -> dict[str, np.ndarray]:
    """What the model writes, by input: for one on a GPU the shapes of it, as the cache's own pool stays empty."""
    stores = {}
    for pool in served.pools:
        assert cache is not None
        front = (cache.pool.shape[0], pool.layers, 2, pool.kv_heads, served.tokens_per_block)
        first = pool is served.pools[0]
        stores[pool.name] = cache.pool if first else np.zeros((*front, pool.head_dim), cache.pool.dtype)
        if pool.scale:
            stores[pool.scale] = np.zeros((*front, served.scales), np.float32)
    for states in served.states:
        dtype = np.dtype(getattr(ml_dtypes, states.dtype, states.dtype))
        stores[states.name] = np.zeros((slots, states.layers, *states.shape), dtype)
    return stores
