"""Continuous batching: requests come and go at any time, and each call of the model works on all that are there."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, STATE_SLOTS
from .arguments import integer, unhashable
from .blocks import PoolFullError
from .paged_cache import Usage
from .pools import Runs, fixed_of, pools_of
from .request_error import RequestError
from .request_tokens import RequestTokens
from .scheduler import Request, Scheduler


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
    Nobody gives up anything in vain, and nobody is answered twice. Wrong arguments raise InputError and change nothing.
    One thread at a time.
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
        budget = integer(tokens_per_step, "tokens_per_step", 1)
        specs = {spec.name: spec for spec in model.manifest.inputs}
        tokens = tuple(specs[name] for name in (served.ids, *served.per_token))
        self._tokens = RequestTokens(tokens, served.vocabularies)
        self._pools = pools = pools_of(model, budget, blocks, state_slots, source_blocks)
        self.cache = pools.cache
        # Whether tokens tell all of what the cache holds.
        self._can_share = self._tokens.are_ids and not served.states and pools.sources is None
        self._scheduler = Scheduler(served, pools, budget, model.gpu, self._can_share)
        self._fixed = fixed_of(model.manifest, served, fixed)
        self._output = model.manifest.outputs[0].name

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
        if self._pools.sources is None and given:
            raise InputError(f"request {request!r} has '{next(iter(given))}', and the model takes tokens alone.")
        source = None if self._pools.sources is None else self._pools.sources.read(request, given)
        self._scheduler.requests[request] = Request(request, tokens, source)

    def fork(self, request: Hashable, new: Hashable) -> None:
        """A second request, `new`, that goes on from where `request` is, as beams do. Both share blocks and source.

        States cannot be shared: a decoder that has some reads all tokens of `new` again.
        """
        ours = self._request(request)
        self._check_unused(new)
        theirs = Request(new, list(ours.tokens), ours.source, answered=ours.answered)
        if ours.admitted and self.cache is not None and not self._served.states:
            self.cache.truncate(request, ours.read)  # gives up what a call that failed had reserved
            self.cache.fork(request, new)
            theirs.read, theirs.admitted = ours.read, True
        if theirs.source is not None:
            theirs.source.holders += 1
        self._scheduler.requests[new] = theirs

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
        self._scheduler.free(self._request(request))

    def tokens(self, request: Hashable) -> list[Any]:
        """All tokens of a request: ids, or embeddings, or mappings of both."""
        return list(self._request(request).tokens)

    @property
    def waiting(self) -> list[Hashable]:
        """The requests that the next steps have something to read of."""
        return [ours.name for ours in self._scheduler.requests.values() if ours.waits]

    def usage(self) -> Usage:
        """What the cache holds, and how many slots of states and blocks of sources are free."""
        held = Usage(0, 0, 0, 0, 0, 0, 1.0) if self.cache is None else self.cache.usage()
        held = replace(held, state_slots=self._pools.slots.total, free_state_slots=self._pools.slots.free)
        if self._pools.sources is None:
            return held
        sources = self._pools.sources.usage()
        return replace(held, source_blocks=sources.total, free_source_blocks=sources.free)

    def step(self) -> dict[Hashable, np.ndarray]:
        """One call of the model; nothing where no request waits.

        Before it the setup runs for requests whose source the pools do not hold: at most for tokens_per_step rows of
        sources together, or for one request. Where the call fails, each of its requests is read alone, to the end.

        Raises PoolFullError where no request can go on: the pool is too small for the oldest one beside those before
        it, which nobody extends or frees. Raises RequestError where the setup or the call has failed on some requests:
        those are freed, and the error has what has been answered to the others.
        """
        scheduler = self._scheduler
        counts = scheduler.plan()
        try:
            answers = self._run(counts) if counts else {}
        except InputError as error:
            answers = self._run_apart(counts, error)
        if scheduler.failed:
            failed, scheduler.failed = scheduler.failed, {}
            raise RequestError(failed, answers)
        return answers

    def _run_apart(self, requests: Collection[Request], error: InputError) -> dict[Hashable, np.ndarray]:
        """Call the model for each request alone, where a call for all has failed: who fails alone ends.

        What cuts this short takes the answers back.
        """
        if len(requests) == 1:
            self._scheduler.fail(next(iter(requests)), error)
            return {}
        before = {ours: ours.answered for ours in requests}
        answers: dict[Hashable, np.ndarray] = {}
        try:
            for ours in requests:
                try:
                    answers |= self._run_alone(ours)
                except InputError as own:
                    self._scheduler.fail(ours, own)
        except BaseException:
            for ours in requests:
                if ours.name in answers:
                    self._scheduler.drop(ours)
                    ours.answered = before[ours]
            raise
        return answers

    def _run_alone(self, ours: Request) -> dict[Hashable, np.ndarray]:
        """Read one request to its end, if there is room for it, and return its answer by its name."""
        answers: dict[Hashable, np.ndarray] = {}
        try:
            while ours.waits and (counts := self._scheduler.plan(ours)):
                answers |= self._run(counts)
        except PoolFullError:  # which others have filled: its turn comes
            pass
        return answers

    def _run(self, counts: Mapping[Request, int]) -> dict[Hashable, np.ndarray]:
        """Call the model, and return what it answers to requests of which all tokens are read then."""
        tokens = [ours.tokens[ours.read : ours.read + count] for ours, count in counts.items()]
        pools = self._pools
        inputs: dict[str, Any] = {
            **self._tokens.packed(tokens),
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: np.array([ours.read for ours in counts], np.int64),
            **pools.stores,
            **self._fixed,
        }
        if pools.cache is not None:
            inputs[BLOCK_TABLE] = pools.cache.block_table([ours.name for ours in counts])
        if self._served.states:
            inputs[STATE_SLOTS] = np.array([ours.slot for ours in counts], np.int64)
        if pools.sources is not None:
            inputs |= pools.sources.tables([ours.source for ours in counts if ours.source is not None])
        try:
            answers = self._model.to_numpy(self._output, self._model.run(inputs)[self._output])
        except BaseException:
            if self._served.states:  # a call that was cut short may have carried some of them on
                for ours in counts:
                    self._scheduler.drop(ours)
            raise
        found = {}
        for ours, read, answer in zip(counts, tokens, answers):
            if pools.cache is not None:  # which may share blocks of known ids
                pools.cache.advance(ours.name, read if self._can_share else len(read))
            ours.read += len(read)
            if not ours.left:
                ours.answered = ours.read
                found[ours.name] = answer
        return found

    def _check_unused(self, name: Hashable) -> None:
        if self._known(name) is not None:
            raise InputError(f"there is a request {name!r} already: free() it first, or choose another name.")

    def _request(self, name: Hashable) -> Request:
        ours = self._known(name)
        if ours is None:
            raise InputError(f"there is no request {name!r}: add() it first.")
        return ours

    def _known(self, name: Hashable) -> Request | None:
        try:
            return self._scheduler.requests.get(name)
        except TypeError:
            raise unhashable(name) from None
