"""A served decoder beside the model that it was made of: requests that come and go get what each gets alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..graph.joint_caches import joint_caches
from ..graph.roles import Roles, find_roles
from ..graph.served_states import carries_state, past_state
from ..manifest import Manifest, ServedCache
from ..runtime.model import Model
from ..serving.batcher import Batcher
from .chosen_tokens import Tokens, as_argument, given_tokens, part_of, random_tokens, shape_of
from .decoding import empty_past, of_rank, said
from .references import Evaluate
from .request_sources import RequestSources, request_sources
from .synthetic_inputs import specs_of, taken

_REQUESTS, _TOGETHER = 5, 3
_BEHIND = 8  # tokens behind the first block, where no size says otherwise


@dataclass(frozen=True)
class Requests:
    """Tokens of requests for a decoder, and how many of each request are its prompt; it reads on one by one.

    sources are what each request has beside them. One request comes before each call, until some are there together;
    each leaves when all of its tokens are read. The pools have room for all but one of those that are together, unless
    they share blocks.
    """

    model: ir.Model
    compiled: Model
    served: ServedCache
    tokens: Tokens
    prompts: np.ndarray
    sources: RequestSources

    @property
    def names(self) -> list[str]:
        """What each of the results is of."""
        output, (_, total) = self.compiled.outputs[0].name, shape_of(self.tokens)
        return [f"{output} of request {r}, {said(count, total)}" for r, count in enumerate(self.prompts)]

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays that were chosen, by the names of inputs."""
        return {**self.tokens, **self.sources.arrays}

    def ours(self) -> list[np.ndarray]:
        """What the compiled decoder answers to each request, [answers, ...]."""
        (requests, total), block = shape_of(self.tokens), self.served.tokens_per_block
        batcher = Batcher(
            self.compiled,
            blocks=-(-total // block) * (_TOGETHER - 1) if self.served.pools else None,
            tokens_per_step=max(block, total // 4),  # prompts are read in parts
            state_slots=_TOGETHER - 1 if self.served.states else None,
            source_blocks=None if self.served.sources is None else -(-self.sources.most // block) * (_TOGETHER - 1),
        )
        tokens: dict[Hashable, Tokens] = {request: part_of(self.tokens, request) for request in range(requests)}
        answers: dict[Hashable, list[np.ndarray]] = {request: [] for request in tokens}
        coming, there = list(enumerate(self.prompts)), 0
        while coming or there:
            if coming and there < _TOGETHER:
                request, count = coming.pop(0)
                prompt = as_argument(part_of(tokens[request], slice(count)))
                batcher.add(request, prompt, fixed=self.sources.fixed(request))
                there += 1
            for name, answer in batcher.step().items():
                answers[name].append(answer)
                read = len(batcher.tokens(name))
                if read < total:
                    batcher.extend(name, as_argument(part_of(tokens[name], read)))
                else:
                    batcher.free(name)
                    there -= 1
        return [np.stack(each) for each in answers.values()]

    def theirs(self, evaluate: Evaluate) -> list[np.ndarray]:
        """What the model as it was answers to each request alone, whose past begins empty."""
        requests, total = shape_of(self.tokens)
        roles = _roles(self.model, self.compiled.manifest)
        counts = {roles.mask: np.ones((1, total)), roles.positions: np.arange(total)[None]}
        tokens = dict(self.tokens)
        feeds: dict[str, np.ndarray] = {}
        of_sources = self.sources.feeds(0)
        for value in taken(self.model):
            name, dtype = value.name or "", value.dtype
            assert dtype is not None
            if name in of_sources:
                continue
            if name in tokens:
                tokens[name] = tokens[name].astype(dtype.numpy())
            elif name in counts:
                feeds[name] = of_rank(counts[name], value).astype(dtype.numpy())
            else:
                feeds[name] = empty_past(value, 1)
        whole = [
            evaluate({**feeds, **self.sources.feeds(r), **part_of(tokens, slice(r, r + 1))})[0][0]
            for r in range(requests)
        ]
        return [logits[prompt - 1 :] for logits, prompt in zip(whole, self.prompts)]


def _roles(model: ir.Model, manifest: Manifest) -> Roles:
    assert manifest.served is not None
    return find_roles(model, Roles(manifest.served.ids), _kept(model, manifest))


def _kept(model: ir.Model, manifest: Manifest) -> list[str]:
    """The inputs that are caches and states, but for those that hold sources."""
    states, joint = {past_state(node) for node in model.graph if carries_state(node)}, joint_caches(model)
    values = [v for v in taken(model) if v in states or v.name in joint or (v.shape is not None and len(v.shape) == 4)]
    sources = set() if manifest.setup is None else {spec.name for spec in manifest.setup.inputs}
    return [value.name or "" for value in values if value.name not in sources]


def requests(
    model: ir.Model,
    compiled: Model,
    served: ServedCache,
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> Requests:
    """5 requests of a block of tokens and 8 more, as far as the context allows, unless `sizes` or the ids say
    otherwise.

    `given` may hold the ids of all tokens [requests, tokens]; of those that are made up, the first two requests begin
    alike, and share a block where there are no sources. It may hold these too, [requests, ...]. Raises InputError for
    other inputs, for requests beyond the context, and for a model whose inputs have other names.
    """
    specs, setup = {spec.name: spec for spec in specs_of(model)}, compiled.manifest.setup
    per_token = [specs[name] for name in (served.ids, *served.per_token)]
    spec = per_token[0]
    for name in served.fixed:
        raise InputError(f"verify makes up tokens and sources, and requests have values of '{name}', too.")
    sources = [] if setup is None else [specs[each.name] for each in setup.inputs if each.name in specs]
    for name in given:
        if name not in {each.name for each in (*per_token, *sources)}:
            raise InputError(f"a served decoder is given tokens and sources, and knows '{name}' itself: leave it out.")
    for name in sizes:
        if name not in {spec.dims[1], *(dim for each in sources for dim in each.dims[1:])}:
            raise InputError(f"the calls of a decoder do not choose dimension '{name}': leave it out.")
    roles = _roles(model, compiled.manifest)
    names = (*(each.name for each in per_token), roles.mask, roles.positions, *_kept(model, compiled.manifest))
    _check_known(model, [*names, *(each.name for each in sources)], spec.dims[1] if sources else None)
    block = served.tokens_per_block
    read = given_tokens(per_token, given)
    total = sizes.get(str(spec.dims[1]), min(served.context, block + _BEHIND))
    count, total = shape_of(read) if read else (_REQUESTS, total)
    tokens = random_tokens(model.graph, per_token, (count, total), rng)
    if total > block and count > 1:
        for array in tokens.values():
            array[1, :block] = array[0, :block]
    tokens |= read
    if total > served.context:
        raise InputError(f"the requests have {total} tokens, and the model was compiled for at most {served.context}.")
    prompts = rng.integers(1, max(1, total - 1), count, endpoint=True)
    if total > block:
        prompts[:2] = block + 1  # so that the first one is still there, and has written a block, when the second comes
    chosen = request_sources(model, compiled.manifest, names, given, sizes, count, rng)
    return Requests(model, compiled, served, tokens, prompts, chosen)


def _check_known(model: ir.Model, names: Collection[str], tokens: int | str | None) -> None:
    """Raise InputError for an input that is none of these, but for one that nothing reads, or hides rows of sources.

    tokens is the size of the tokens of a decoder with sources, None for others. A mask of the padding of sources is
    [batch, rows] of another size.
    """
    sizes = {spec.name: spec.dims for spec in specs_of(model)}
    for value in taken(model):
        name = value.name or ""
        is_spare = not value.uses() or (tokens is not None and len(sizes[name]) == 2 and sizes[name][1] != tokens)
        if name not in names and not is_spare:
            raise InputError(
                f"verify does not know what '{value.name}' of this decoder is: it has no column for each key as a "
                "mask, nor the shape of the tokens as positions, nor the 4 dimensions of a past, nor is it a state."
            )
