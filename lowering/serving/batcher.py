"""Continuous batching: requests come and go at any time, and each call of the model works on all that are there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, Manifest
from .blocks import PoolFullError
from .paged_cache import PagedKVCache, Usage, integer, token_ids, unhashable


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
    """All tokens, of which the cache holds some. admitted: the cache knows it; started: it has had an answer."""

    name: Hashable
    tokens: list[int]
    admitted: bool = False
    started: bool = False


class Batcher:
    """Requests over one decoder that was compiled with `serve`, and one paged cache.

        batcher = lowering.Batcher(lowering.compile("decoder.onnx", serve=lowering.Serve(context=2048)), blocks=512)
        batcher.add("a", prompt)                        # at any time
        for name, logits in batcher.step().items():     # one call of the model
            batcher.extend(name, int(logits.argmax()))  # or batcher.free(name), or whatever a sampler says

    A step takes the next token of every request that was extended, and of prompts, oldest first, so many tokens that
    all are at most tokens_per_step. It answers with the model's output for the last token, [vocabulary], of each
    request whose tokens are all read. Equal beginnings of prompts share blocks. Where blocks run out, the youngest
    request gives its own up, and is read again later. Wrong arguments raise InputError and change nothing. One thread
    at a time.
    """

    def __init__(self, model: Runs, blocks: int, tokens_per_step: int = 256) -> None:
        """blocks is the size of the pool; with cache="int8" a block takes about a quarter of the memory."""
        served = model.manifest.served
        if served is None:
            raise InputError("the model serves no requests: compile it with serve=Serve(context=<number of tokens>).")
        self._model, self._served = model, served
        self._budget = integer(tokens_per_step, "tokens_per_step", 1)
        first = served.pools[0]
        self.cache = PagedKVCache(
            blocks, served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads, head_dim=first.head_dim,
            dtype=served.dtype,
        )  # fmt: skip
        # What the model writes, by input, where it runs: for one on a GPU the cache's own pool stays empty.
        self._stores: dict[str, Any] = {first.name: self.cache.pool}
        for pool in served.pools:
            front = (blocks, pool.layers, 2, pool.kv_heads, served.tokens_per_block)
            if pool is not first:
                self._stores[pool.name] = np.zeros((*front, pool.head_dim), self.cache.pool.dtype)
            if pool.scale:
                self._stores[pool.scale] = np.zeros((*front, served.scales), np.float32)
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
        return [ours.name for ours in self._requests.values() if self._left(ours)]

    def usage(self) -> Usage:
        """What the cache holds."""
        return self.cache.usage()

    def step(self) -> dict[Hashable, np.ndarray]:
        """One call of the model; nothing where no request waits.

        Raises PoolFullError where no request can go on: the pool is too small for the oldest one beside those before
        it, which nobody extends or frees.
        """
        counts = self._planned()
        if not counts:
            return {}
        names = [ours.name for ours in counts]
        past = self.cache.lengths(names).astype(np.int64)
        tokens = [ours.tokens[at : at + count] for (ours, count), at in zip(counts.items(), past.tolist())]
        inputs: dict[str, Any] = {
            self._served.ids: np.concatenate(tokens, dtype=np.dtype(self._ids), casting="unsafe")[None],
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: past,
            BLOCK_TABLE: self.cache.block_table(names),
            **self._stores,
        }
        answers = self._model.to_numpy(self._output, self._model.run(inputs)[self._output])
        for name, read in zip(names, tokens):
            self.cache.advance(name, read)
        found = {}
        for ours, answer in zip(counts, answers):
            if not self._left(ours):
                ours.started = True
                found[ours.name] = answer
        return found

    def _planned(self) -> dict[_Request, int]:
        """How many tokens of which requests the call reads, for which there is room now."""
        counts: dict[_Request, int] = {}
        full: PoolFullError | None = None
        room = self._budget
        ready = [ours for ours in self._requests.values() if self._left(ours)]
        for ours in sorted(ready, key=lambda ours: not ours.started):  # who has begun goes first
            if not room:
                break
            if not ours.admitted:  # not before its turn: until then others may write what it can share
                self.cache.add(ours.name, ours.tokens)
                ours.admitted = True
            count = min(self._left(ours), room)
            try:
                self._reserve(ours, count, counts)
            except PoolFullError as error:
                full = full or error
            else:
                counts[ours] = count
                room -= count
        if full is not None and not counts:
            raise full
        return counts

    def _reserve(self, ours: _Request, count: int, planned: dict[_Request, int]) -> None:
        """Room for so many tokens of a request, which younger ones give up if they are not of this call."""
        order = list(self._requests.values())
        while True:
            try:
                copies = self.cache.reserve(ours.name, count)
                break
            except PoolFullError:
                younger = [o for o in order[order.index(ours) + 1 :] if o.admitted and o not in planned]
                if not younger:
                    raise
                self._drop(younger[-1])
        for source, target in copies:
            for store in self._stores.values():
                if self._model.gpu is not None:
                    self._model.gpu.copy_row(store, source, target)
                elif store is not self.cache.pool:  # which the cache has copied
                    store[target] = store[source]

    def _left(self, ours: _Request) -> int:
        """Tokens that are not read yet."""
        return len(ours.tokens) - (self.cache.length(ours.name) if ours.admitted else 0)

    def _drop(self, ours: _Request) -> None:
        """Its blocks are free, and all of its tokens to be read again."""
        if ours.admitted:
            self.cache.free(ours.name)
            ours.admitted = False

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
