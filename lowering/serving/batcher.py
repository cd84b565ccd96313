"""Continuous batching: requests may join and leave at any time, and each model call serves all of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import BLOCK_TABLE, PAST_LENGTHS, ROW_STARTS, STATE_SLOTS
from .arguments import check_integer, make_unhashable_error
from .blocks import PoolFullError
from .paged_cache import Usage
from .pools import ServedModel, create_pools, read_fixed_inputs
from .request_error import RequestError
from .request_tokens import RequestTokens
from .scheduler import RequestScheduler, ScheduledRequest


class Batcher:
    """Requests of one decoder compiled with `serve`, on a paged cache, states, or both.

        batcher = lowering.Batcher(lowering.compile("decoder.onnx", serve=lowering.Serve(context=2048)), blocks=512)
        batcher.add("a", prompt)                        # at any time
        for name, logits in batcher.step().items():     # one call of the model
            batcher.extend(name, int(logits.argmax()))  # or batcher.free(name), or any sampler

    A step reads the next token of every extended request, and prompt tokens of waiting requests, oldest first, up to
    tokens_per_step tokens in total. It returns the model's output for the last token, [vocabulary], of each request
    whose tokens are all read. Equal prefixes of prompts share blocks, unless the decoder has states or sources.

    If blocks or slots of states run out, the youngest requests are preempted and read again later. If blocks for
    sources run out, sources that no older request shares are evicted, and the setup runs again later. Requests are
    preempted only if that makes enough room, and no request is answered twice. Invalid arguments raise InputError and
    change nothing. Only one thread at a time may use a batcher.
    """

    def __init__(
        self,
        model: ServedModel,
        blocks: int | None = None,
        tokens_per_step: int = 256,
        state_slots: int | None = None,
        source_blocks: int | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the pools for a decoder.

        Args:
            model: A model compiled with `serve`.
            blocks: Size of the block pool; None for a decoder without a cache. With cache="int8" a block takes about a
                quarter of the memory.
            tokens_per_step: Largest number of tokens in a call.
            state_slots: Largest number of requests that have states, for a decoder with states. By default it is the
                largest number of requests in a step, or that the blocks allow.
            source_blocks: Size of the pool of sources, for a decoder that reads an encoder's output. By default it is
                `blocks`.
            fixed: An array for each input that is equal for all requests, by name.

        Raises:
            InputError: The model was compiled without `serve`, or an argument is invalid.
        """
        served = model.manifest.served
        if served is None:
            raise InputError(
                "batcher.serve_required",
                "the model was compiled without serve: compile it with serve=Serve(context=<number of tokens>).",
            )
        self._model, self._served = model, served
        token_budget = check_integer(tokens_per_step, "tokens_per_step", 1)
        specs = {spec.name: spec for spec in model.manifest.inputs}
        tokens = tuple(specs[name] for name in (served.ids, *served.per_token))
        self._tokens = RequestTokens(tokens, served.vocabularies)
        self._pools = pools = create_pools(model, token_budget, blocks, state_slots, source_blocks)
        self.cache = pools.cache
        # Whether tokens determine the contents of the cache.
        self._can_share = self._tokens.are_ids and not served.states and pools.sources is None
        self._scheduler = RequestScheduler(served, pools, token_budget, model.gpu, self._can_share)
        self._fixed = read_fixed_inputs(model.manifest, served, fixed)
        self._output = model.manifest.outputs[0].name

    def add(self, request: Hashable, prompt: Any, fixed: Mapping[str, Any] | None = None) -> None:
        """Add a request, whose tokens the next steps read.

        Args:
            request: Name of the request, any hashable value.
            prompt: A sequence of at least one id; float [n, width] for a decoder that takes embeddings; or a mapping of
                these by input for a decoder that takes several values of each token.
            fixed: For a decoder that reads an encoder's output: an array for each input of its setup, by name, and
                optionally source_lengths, the number of valid rows. Arrays are checked now and copied, except arrays in
                a GPU's memory, which must not change until the request is freed.

        Raises:
            InputError: The name is in use, or an argument is invalid.
        """
        tokens = self._tokens.read_prompt(prompt, request)
        self._check_unused(request)
        if not 1 <= len(tokens) <= self._served.context:
            raise InputError(
                "batcher.prompt_length_out_of_range",
                f"the prompt of request {request!r} has {len(tokens)} tokens, and the model was compiled for 1 to "
                f"{self._served.context}.",
            )
        sources = {} if fixed is None else fixed
        if not isinstance(sources, Mapping):
            raise InputError(
                "batcher.fixed_not_a_mapping",
                f"`fixed` of request {request!r} must map names to arrays, not {type(sources).__name__}.",
            )
        if self._pools.sources is None and sources:
            raise InputError(
                "batcher.sources_unsupported",
                f"request {request!r} has '{next(iter(sources))}' in `fixed`, and the model reads no sources: "
                "leave it out.",
            )
        source = None if self._pools.sources is None else self._pools.sources.read(request, sources)
        self._scheduler.requests[request] = ScheduledRequest(request, tokens, source)

    def fork(self, request: Hashable, new: Hashable) -> None:
        """Add a second request, `new`, that continues from the current state of `request`, as beams do.

        Both share blocks and source. States cannot be shared: a decoder with states reads all tokens of `new` again.

        Args:
            request: Name of an existing request.
            new: Name of the new request.

        Raises:
            InputError: `request` does not exist, or `new` is in use.
        """
        entry = self._get_request(request)
        self._check_unused(new)
        forked = ScheduledRequest(new, list(entry.tokens), entry.source, answered=entry.answered)
        if entry.is_admitted and self.cache is not None and not self._served.states:
            self.cache.truncate(request, entry.read)  # frees the reservation of a failed call
            self.cache.fork(request, new)
            forked.read, forked.is_admitted = entry.read, True
        if forked.source is not None:
            forked.source.holder_count += 1
        self._scheduler.requests[new] = forked

    def extend(self, request: Hashable, token: Any) -> None:
        """Append the next token of a request, after all of its tokens were read.

        Args:
            request: Name of an existing request.
            token: An id, float [width], or a mapping of both by input.

        Raises:
            InputError: The request does not exist or has reached the compiled context, or the token is invalid.
        """
        entry = self._get_request(request)
        next_token = self._tokens.read_token(token, request)
        if len(entry.tokens) >= self._served.context:
            raise InputError(
                "batcher.context_exceeded",
                f"request {request!r} has {len(entry.tokens)} tokens, as many as the model was compiled for: free() "
                "it, or compile with a larger context.",
            )
        entry.tokens.append(next_token)

    def free(self, request: Hashable) -> None:
        """Remove a request."""
        self._scheduler.free(self._get_request(request))

    def tokens(self, request: Hashable) -> list[Any]:
        """Return all tokens of a request: ids, embeddings, or mappings of both."""
        return list(self._get_request(request).tokens)

    @property
    def waiting(self) -> list[Hashable]:
        """The requests with tokens that the next steps will read."""
        return [entry.name for entry in self._scheduler.requests.values() if entry.is_waiting]

    def usage(self) -> Usage:
        """Return the usage of the cache, and the free slots of states and blocks of sources."""
        usage = Usage(0, 0, 0, 0, 0, 0, 1.0) if self.cache is None else self.cache.usage()
        usage = replace(usage, state_slots=self._pools.slots.total, free_state_slots=self._pools.slots.free)
        if self._pools.sources is None:
            return usage
        sources = self._pools.sources.usage()
        return replace(usage, source_blocks=sources.total, free_source_blocks=sources.free)

    def step(self) -> dict[Hashable, np.ndarray]:
        """Run one call of the model, if any request waits.

        Before it, the setup runs for requests whose source is not in the pools: for at most tokens_per_step rows of
        sources in total, or for one request. If the call fails, each of its requests is read alone, to the end.

        Returns:
            The output for the last token, [vocabulary], of each request whose tokens are all read, by name.

        Raises:
            PoolFullError: No request can continue: the pool is too small for the oldest one together with earlier
                requests that are neither extended nor freed.
            RequestError: The setup or the call failed on some requests. Those are freed, and the error has the outputs
                of the others.
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

    def _run_apart(self, requests: Collection[ScheduledRequest], error: InputError) -> dict[Hashable, np.ndarray]:
        """Call the model for each request alone after a joint call failed. Requests that fail alone end.

        If this is interrupted, the collected outputs are discarded and computed again later.
        """
        if len(requests) == 1:
            self._scheduler.fail(next(iter(requests)), error)
            return {}
        answered_before = {entry: entry.answered for entry in requests}
        answers: dict[Hashable, np.ndarray] = {}
        try:
            for entry in requests:
                try:
                    answers |= self._run_alone(entry)
                except InputError as own_error:
                    self._scheduler.fail(entry, own_error)
        except BaseException:
            for entry in requests:
                if entry.name in answers:
                    self._scheduler.drop(entry)
                    entry.answered = answered_before[entry]
            raise
        return answers

    def _run_alone(self, entry: ScheduledRequest) -> dict[Hashable, np.ndarray]:
        """Read one request to its end, if there is room for it, and return its output by its name."""
        answers: dict[Hashable, np.ndarray] = {}
        try:
            while entry.is_waiting and (counts := self._scheduler.plan(entry)):
                answers |= self._run(counts)
        except PoolFullError:  # the pool is full; the request is read later
            pass
        return answers

    def _run(self, counts: Mapping[ScheduledRequest, int]) -> dict[Hashable, np.ndarray]:
        """Call the model, and return the outputs of requests whose tokens are then all read."""
        tokens = [entry.tokens[entry.read : entry.read + count] for entry, count in counts.items()]
        pools = self._pools
        inputs: dict[str, Any] = {
            **self._tokens.pack(tokens),
            ROW_STARTS: np.cumsum([0, *counts.values()], dtype=np.int64),
            PAST_LENGTHS: np.array([entry.read for entry in counts], np.int64),
            **pools.arrays,
            **self._fixed,
        }
        if pools.cache is not None:
            inputs[BLOCK_TABLE] = pools.cache.block_table([entry.name for entry in counts])
        if self._served.states:
            inputs[STATE_SLOTS] = np.array([entry.slot for entry in counts], np.int64)
        if pools.sources is not None:
            inputs |= pools.sources.build_tables([entry.source for entry in counts if entry.source is not None])
        try:
            answers = self._model.to_numpy(self._output, self._model.run(inputs)[self._output])
        except BaseException:
            if self._served.states:  # an interrupted call may have advanced some of them
                for entry in counts:
                    self._scheduler.drop(entry)
            raise
        answers_by_name = {}
        for entry, read, answer in zip(counts, tokens, answers):
            if pools.cache is not None:  # blocks with ids may be shared later
                pools.cache.advance(entry.name, read if self._can_share else len(read))
            entry.read += len(read)
            if not entry.remaining:
                entry.answered = entry.read
                answers_by_name[entry.name] = answer
        return answers_by_name

    def _check_unused(self, name: Hashable) -> None:
        if self._find_request(name) is not None:
            raise InputError(
                "batcher.name_in_use", f"there is a request {name!r} already: free() it first, or choose another name."
            )

    def _get_request(self, name: Hashable) -> ScheduledRequest:
        entry = self._find_request(name)
        if entry is None:
            raise InputError("batcher.name_unknown", f"there is no request {name!r}: add() it first.")
        return entry

    def _find_request(self, name: Hashable) -> ScheduledRequest | None:
        try:
            return self._scheduler.requests.get(name)
        except TypeError:
            raise make_unhashable_error(name) from None
