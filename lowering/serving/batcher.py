"""Continuous batching: requests come and go at any time, and each call of the model works on all that are there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, STATE_SLOTS, Manifest
from .arguments import integer, unhashable
from .blocks import PoolFullError
from .paged_cache import Usage
from .pools import cache_of, fixed_of, names_of, slots_of, sources_of, stores_of
from .request_error import RequestError
from .request_tokens import RequestTokens
from .source_pool import RunsSetup, Source

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


@dataclass
class _Plan:
    """How many tokens of which requests a call reads, and how many rows the sources have whose setup has run for it."""

    counts: dict[_Request, int] = field(default_factory=dict)
    rows: int = 0


class Batcher:
    """Requests over one decoder that was compiled with `serve`, and one paged cache, states, or both.

        batcher = lowering.Batcher(lowering.compile("decoder.onnx", serve=lowering.Serve(context=2048)), blocks=512)
        batcher.add("a", prompt)                        # at any time
        for name, logits in batcher.step().items():     # one call of the model
            batcher.extend(name, int(logits.argmax()))  # or batcher.free(name), or whatever a sampler says

    A step takes the next token of every request that was extended, and of prompts, oldest first, so many tokens that
    all are at most tokens_per_step. It answers with the model's output for the last token, [vocabulary], of each
    request whose tokens are all read. Equal beginnings of prompts share blocks, unless the decoder has states or
    sources. Where blocks or slots of states run out, the youngest requests give up theirs, and are read again later.
    Where blocks for sources run out, they give up sources that no older request shares, and the setup runs again later.
    Nobody gives up anything in vain. Wrong arguments raise InputError and change nothing. One thread at a time.
    """

    def __init__(
        self,
        model: Runs,
        blocks: int | None = None,
        tokens_per_step: int = 256,
        state_slots: int | None = None,
        source_blocks: int | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """blocks is the size of the pool, None for a decoder without a cache; with cache="int8" a block takes about a
        quarter of the memory. state_slots is how many requests can have states, for a decoder that keeps some; by
        default as many as a step, or the blocks, can be of. source_blocks is the size of the pool of sources, for a
        decoder that reads an encoder's output; by default that of the other pool. fixed has an array for each input
        that is the same for all requests, by name."""
        served = model.manifest.served
        if served is None:
            raise InputError("the model serves no requests: compile it with serve=Serve(context=<number of tokens>).")
        self._model, self._served = model, served
        self._budget = integer(tokens_per_step, "tokens_per_step", 1)
        self.cache = cache_of(served, blocks)
        self._slots = slots_of(served, state_slots, self._budget if blocks is None else min(self._budget, blocks))
        setup = None if served.sources is None else model.setup
        self._sources = sources_of(setup, served, source_blocks, blocks)
        self._stores = stores_of(served, self.cache, self._slots.total, self._sources)
        self._paged = names_of(served.pools)
        self._source_arrays = [] if served.sources is None else names_of(served.sources.pools)
        specs = {spec.name: spec for spec in model.manifest.inputs}
        if model.gpu is not None:
            self._stores = {name: model.gpu.zeros(specs[name], a.shape) for name, a in self._stores.items()}
        self._tokens = RequestTokens(tuple(specs[name] for name in (served.ids, *served.per_token)))
        # Whether tokens tell all of what the cache holds.
        self._can_share = self._tokens.are_ids and not served.states and self._sources is None
        self._fixed = fixed_of(model.manifest, served, fixed)
        self._output = model.manifest.outputs[0].name
        self._failed: dict[Hashable, Exception] = {}  # what no step has raised yet
        self._requests: dict[Hashable, _Request] = {}  # in the order in which they came

    def add(self, request: Hashable, prompt: Any, fixed: Mapping[str, Any] | None = None) -> None:
        """A new request, whose tokens the next steps read.

        prompt is a sequence of at least one id, or float [n, width] for a decoder that takes embeddings, or a mapping
        of these by input for one that takes several values of each token. fixed has, for
        a decoder that reads an encoder's output, an array for each input of its setup, by name, and source_lengths, how
        many of the rows count, if these are not all. They are checked now and copied; arrays in a GPU's memory are not,
        and must stay as they are until the request is freed.
        """
        tokens = self._tokens.of_prompt(prompt, request)
        self._check_unused(request)
        if not 1 <= len(tokens) <= self._served.context:
            raise InputError(
                f"the prompt of request {request!r} has {len(tokens)} tokens, and the model was compiled for 1 to "
                f"{self._served.context}."
            )
        given = {} if fixed is None else fixed
        if not isinstance(given, Mapping):
            raise InputError(f"`fixed` of request {request!r} must map names to arrays, not {type(given).__name__}.")
        if self._sources is None and given:
            raise InputError(f"request {request!r} has '{next(iter(given))}', and the model takes tokens alone.")
        source = None if self._sources is None else self._sources.read(request, given)
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
        if theirs.source is not None:
            theirs.source.holders += 1
        self._requests[new] = theirs

    def extend(self, request: Hashable, token: Any) -> None:
        """The next token of a request, one more than a step has read: an id, or float [width], or both by input."""
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
        ours = self._request(request)
        self._drop(ours)
        if self._sources is not None and ours.source is not None:
            self._sources.release(ours.source)
        del self._requests[request]

    def tokens(self, request: Hashable) -> list[Any]:
        """All tokens of a request: ids, or embeddings, or mappings of both."""
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

        Before it the setup runs for requests whose source the pools do not hold: at most for tokens_per_step rows of
        sources together, or for one request.

        Raises PoolFullError where no request can go on: the pool is too small for the oldest one beside those before
        it, which nobody extends or frees. Raises RequestError where the setup has failed: those requests are freed, and
        the error has what the call has answered to the others.
        """
        counts = self._planned()
        answers = self._run(counts) if counts else {}
        if self._failed:
            failed, self._failed = self._failed, {}
            raise RequestError(failed, answers)
        return answers

    def _run(self, counts: dict[_Request, int]) -> dict[Hashable, np.ndarray]:
        """Call the model, and return what it answers to requests of which all tokens are read then."""
        tokens = [ours.tokens[ours.read : ours.read + count] for ours, count in counts.items()]
        inputs: dict[str, Any] = {
            **self._tokens.packed(tokens),
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: np.array([ours.read for ours in counts], np.int64),
            **self._stores,
            **self._fixed,
        }
        if self.cache is not None:
            inputs[BLOCK_TABLE] = self.cache.block_table([ours.name for ours in counts])
        if self._served.states:
            inputs[STATE_SLOTS] = np.array([ours.slot for ours in counts], np.int64)
        if self._sources is not None:
            inputs |= self._sources.tables([ours.source for ours in counts if ours.source is not None])
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
        """Return how many tokens of which requests the call reads, for which there is room now."""
        plan = _Plan()
        full: PoolFullError | None = None
        room = self._budget
        ready = [ours for ours in self._requests.values() if ours.left]
        for ours in sorted(ready, key=lambda ours: not ours.started):  # who has begun goes first
            if not room:
                break
            try:
                # not before its turn: until then others may write what it can share
                if not (ours.admitted or self._admit(ours, plan)):
                    continue
                count = min(ours.left, room)
                self._reserve(ours, count, plan)
            except PoolFullError as error:
                full = full or error
            else:
                plan.counts[ours] = count
                room -= count
        if full is not None and not plan.counts and not self._failed:
            raise full
        return plan.counts

    def _admit(self, ours: _Request, plan: _Plan) -> bool:
        """Give a request its source, a slot of states, and the blocks that it shares, unless it cannot begin now."""
        if not self._has_source(ours, plan):
            return False
        if self._served.states:
            holders = [o for o in self._younger(ours, plan) if o.slot is not None]
            self._with_room(lambda: self._take_slot(ours), lambda: holders[-1:], self._drop)
        if self.cache is not None:
            ours.read = self.cache.add(ours.name, ours.tokens if self._can_share else None)
        ours.admitted = True
        return True

    def _has_source(self, ours: _Request, plan: _Plan) -> bool:
        """Whether the pools hold a request's source, for which the setup runs if its turn has come.

        A request on whose source the setup fails is freed.
        """
        pool, source = self._sources, ours.source
        if pool is None or source is None or source in pool:
            return True
        if plan.counts and plan.rows and plan.rows + source.rows > self._budget:
            return False
        stores = {name: self._stores[name] for name in self._source_arrays}
        try:
            self._with_room(
                lambda: pool.put(source, ours.name, stores),
                lambda: pool.fewest(source, self._sources_of_younger(ours, plan)),
                self._evict,
            )
        except PoolFullError:
            raise
        except Exception as error:
            self._failed[ours.name] = error
            self.free(ours.name)
        plan.rows += source.rows
        return ours.name in self._requests

    def _take_slot(self, ours: _Request) -> None:
        if not self._slots.free:
            raise PoolFullError(f"request {ours.name!r}", 1, 0, self._slots.total, "state slot")
        ours.slot = self._slots.take()

    def _reserve(self, ours: _Request, count: int, plan: _Plan) -> None:
        """Room for so many tokens of a request."""
        cache = self.cache
        if cache is None:
            return
        copies = self._with_room(
            lambda: cache.reserve(ours.name, count),
            lambda: cache.fewest(ours.name, count, [o.name for o in self._younger(ours, plan) if o.admitted]),
            lambda name: self._drop(self._requests[name]),
        )
        for source, target in copies:
            for store in [self._stores[name] for name in self._paged]:
                if self._model.gpu is not None:
                    self._model.gpu.copy_row(store, source, target)
                elif store is not cache.pool:  # which the cache has copied
                    store[target] = store[source]

    def _with_room(
        self, take: Callable[[], _T], fewest: Callable[[], list[Any] | None], give_up: Callable[[Any], None]
    ) -> _T:
        """Return what `take` gives where a pool has room, for which those that `fewest` says give up their own."""
        try:
            return take()
        except PoolFullError:
            chosen = fewest()
            if not chosen:
                raise
        for each in chosen:
            give_up(each)
        return take()

    def _younger(self, ours: _Request, plan: _Plan) -> list[_Request]:
        """The requests that may give something up for this one, the oldest first."""
        order = list(self._requests.values())
        return [other for other in order[order.index(ours) + 1 :] if other not in plan.counts]

    def _sources_of_younger(self, ours: _Request, plan: _Plan) -> list[Source]:
        """The sources in the pools that nobody else reads, those of the oldest ones first."""
        younger = dict.fromkeys(self._younger(ours, plan))
        kept = {other.source for other in self._requests.values() if other not in younger}
        sources = dict.fromkeys(other.source for other in younger if other.source not in kept)
        return [source for source in sources if source is not None and self._sources and source in self._sources]

    def _evict(self, source: Source) -> None:
        """Its blocks are free, and all who read it are put back."""
        for ours in self._requests.values():
            if ours.source is source:
                self._drop(ours)
        if self._sources is not None:
            self._sources.evict(source)

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
