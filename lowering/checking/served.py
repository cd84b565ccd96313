"""Verification of a served decoder: requests that come and go get the results that each gets alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..graph.caches.joint_kv_caches import find_joint_caches
from ..graph.caches.roles import InputRoles, find_roles
from ..graph.paged.served_states import is_state_operator, past_state
from ..manifest import Manifest, ServedCache, TensorSpec
from ..runtime.model import Model
from ..serving.batcher import Batcher
from .chosen_tokens import Tokens, generate_tokens, read_token_shape, select_tokens, slice_tokens, to_decoder_argument
from .decoding import broadcast_positions, create_empty_past, format_token_range
from .references import Evaluate
from .request_sources import RequestSources, generate_request_sources
from .synthetic_inputs import list_call_inputs, read_input_specs

_REQUESTS, _MAX_CONCURRENT = 5, 3
_EXTRA_TOKENS = 8  # tokens after the first block, unless a size says otherwise


@dataclass(frozen=True)
class ServedRequests:
    """Tokens of requests for a decoder, and the prompt length of each request.

    After the prompt a request reads its tokens one by one. `sources` are the source arrays of the requests. A request
    arrives before each call until _MAX_CONCURRENT are active, and leaves when all of its tokens are read. The pools
    have room for all but one of the active requests, unless they share blocks.
    """

    model: ir.Model
    compiled: Model
    served: ServedCache
    tokens: Tokens
    prompts: np.ndarray
    sources: RequestSources

    @property
    def names(self) -> list[str]:
        """Return a label for each of the results."""
        output, (_, total) = self.compiled.outputs[0].name, read_token_shape(self.tokens)
        return [f"{output} of request {r}, {format_token_range(count, total)}" for r, count in enumerate(self.prompts)]

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the arrays of the requests by input name."""
        return {**self.tokens, **self.sources.arrays}

    def run_compiled(self) -> list[np.ndarray]:
        """Return the results of the compiled decoder for each request, [answers, ...]."""
        (request_count, total), block = read_token_shape(self.tokens), self.served.tokens_per_block
        batcher = Batcher(
            self.compiled,
            blocks=-(-total // block) * (_MAX_CONCURRENT - 1) if self.served.pools else None,
            tokens_per_step=max(block, total // 4),  # prompts are read in chunks
            state_slots=_MAX_CONCURRENT - 1 if self.served.states else None,
            source_blocks=None
            if self.served.sources is None
            else -(-self.sources.max_rows // block) * (_MAX_CONCURRENT - 1),
        )
        tokens: dict[Hashable, Tokens] = {
            request: slice_tokens(self.tokens, request) for request in range(request_count)
        }
        answers: dict[Hashable, list[np.ndarray]] = {request: [] for request in tokens}
        pending, active = list(enumerate(self.prompts)), 0
        while pending or active:
            if pending and active < _MAX_CONCURRENT:
                request, count = pending.pop(0)
                prompt = to_decoder_argument(slice_tokens(tokens[request], slice(count)))
                batcher.add(request, prompt, fixed=self.sources.build_fixed(request))
                active += 1
            for name, answer in batcher.step().items():
                answers[name].append(answer)
                read_count = len(batcher.tokens(name))
                if read_count < total:
                    batcher.extend(name, to_decoder_argument(slice_tokens(tokens[name], read_count)))
                else:
                    batcher.free(name)
                    active -= 1
        return [np.stack(item) for item in answers.values()]

    def run_reference(self, evaluate: Evaluate) -> list[np.ndarray]:
        """Return the results of the original model for each request alone, with an empty past."""
        request_count, total = read_token_shape(self.tokens)
        roles = _find_roles(self.model, self.compiled.manifest)
        counts = {roles.mask: np.ones((1, total)), roles.positions: np.arange(total)[None]}
        tokens = dict(self.tokens)
        feeds: dict[str, np.ndarray] = {}
        source_feeds = self.sources.build_feeds(0)
        for value in list_call_inputs(self.model):
            name, dtype = value.name or "", value.dtype
            assert dtype is not None
            if name in source_feeds:
                continue
            if name in tokens:
                tokens[name] = tokens[name].astype(dtype.numpy())
            elif name in counts:
                feeds[name] = broadcast_positions(counts[name], value).astype(dtype.numpy())
            else:
                feeds[name] = create_empty_past(value, 1)
        logits_per_request = [
            evaluate({**feeds, **self.sources.build_feeds(r), **slice_tokens(tokens, slice(r, r + 1))})[0][0]
            for r in range(request_count)
        ]
        return [logits[prompt - 1 :] for logits, prompt in zip(logits_per_request, self.prompts)]


def _find_roles(model: ir.Model, manifest: Manifest) -> InputRoles:
    assert manifest.served is not None
    return find_roles(model, InputRoles(manifest.served.ids), _list_cache_inputs(model, manifest))


def _list_cache_inputs(model: ir.Model, manifest: Manifest) -> list[str]:
    """Return the inputs that are caches and states, except those of sources."""
    states, joint = {past_state(node) for node in model.graph if is_state_operator(node)}, find_joint_caches(model)
    values = [
        v
        for v in list_call_inputs(model)
        if v in states or v.name in joint or (v.shape is not None and len(v.shape) == 4)
    ]
    sources = set() if manifest.setup is None else {spec.name for spec in manifest.setup.inputs}
    return [value.name or "" for value in values if value.name not in sources]


def build_served_requests(
    model: ir.Model,
    compiled: Model,
    served: ServedCache,
    user_arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> ServedRequests:
    """Return requests for a served decoder, with synthetic tokens where the user gives none.

    There are 5 requests of one block of tokens and 8 more, as far as the context allows, unless `sizes` or the ids say
    otherwise. The user's arrays may hold the ids of all tokens [requests, tokens] and the sources [requests, ...]. Of
    synthetic tokens the first two requests have the same first block, and share it in the cache if there are no
    sources.

    Raises:
        InputError: There are other inputs, a request is longer than the context, or the model's inputs have other
            names.
    """
    specs, setup = {spec.name: spec for spec in read_input_specs(model)}, compiled.manifest.setup
    per_token = [specs[name] for name in (served.ids, *served.per_token)]
    spec = per_token[0]
    sources = [] if setup is None else [specs[item.name] for item in setup.inputs if item.name in specs]
    _check_choices(served, [*per_token, *sources], sources, user_arrays, sizes)
    roles = _find_roles(model, compiled.manifest)
    names = (
        *(item.name for item in per_token),
        roles.mask,
        roles.positions,
        *_list_cache_inputs(model, compiled.manifest),
    )
    _check_all_inputs_covered(model, [*names, *(item.name for item in sources)], spec.dims[1] if sources else None)
    block = served.tokens_per_block
    user_tokens = select_tokens(per_token, user_arrays)
    total = sizes.get(str(spec.dims[1]), min(served.context, block + _EXTRA_TOKENS))
    count, total = read_token_shape(user_tokens) if user_tokens else (_REQUESTS, total)
    tokens = generate_tokens(model.graph, per_token, (count, total), rng)
    if total > block and count > 1:
        for array in tokens.values():
            array[1, :block] = array[0, :block]
    tokens |= user_tokens
    if total > served.context:
        raise InputError(
            "verify.context_exceeded",
            f"the requests have {total} tokens, and the model was compiled for at most {served.context}.",
        )
    prompts = rng.integers(1, max(1, total - 1), count, endpoint=True)
    if total > block:
        prompts[:2] = block + 1  # the first is still active, and has written a block, when the second arrives
    sources_of_requests = generate_request_sources(model, compiled.manifest, names, user_arrays, sizes, count, rng)
    return ServedRequests(model, compiled, served, tokens, prompts, sources_of_requests)


def _check_choices(
    served: ServedCache,
    inputs: Sequence[TensorSpec],
    sources: Sequence[TensorSpec],
    user_arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> None:
    """Raise InputError for arrays and sizes that are not those of requests. The first of the inputs are the ids."""
    for name in served.fixed:
        raise InputError(
            "verify.input_unsupported",
            f"verify generates only tokens and sources, but requests also have values of '{name}'.",
        )
    for name in user_arrays:
        if name not in {item.name for item in inputs}:
            raise InputError(
                "verify.state_given",
                f"'{name}' is managed by the served decoder itself, which is given only tokens and sources. Leave it "
                "out.",
            )
    for name in sizes:
        if name not in {inputs[0].dims[1], *(dim for item in sources for dim in item.dims[1:])}:
            raise InputError(
                "verify.dim_not_free", f"the calls of a decoder do not choose dimension '{name}'. Leave it out."
            )


def _check_all_inputs_covered(model: ir.Model, names: Collection[str], tokens: int | str | None) -> None:
    """Raise InputError for an input that is not one of these.

    Inputs that nothing reads, and padding masks of sources, are allowed. `tokens` is the size of the token axis of a
    decoder with sources, None for others. A padding mask of sources is [batch, rows] of another size.
    """
    sizes = {spec.name: spec.dims for spec in read_input_specs(model)}
    for value in list_call_inputs(model):
        name = value.name or ""
        is_spare = not value.uses() or (tokens is not None and len(sizes[name]) == 2 and sizes[name][1] != tokens)
        if name not in names and not is_spare:
            raise InputError(
                "verify.input_unrecognized",
                f"verify does not recognize the input '{value.name}' of this decoder: it has neither a column for "
                "each key (as a mask), nor the shape of the tokens (as positions), nor the 4 dimensions of a past, "
                "and is not a state.",
            )
