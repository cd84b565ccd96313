"""Verification of a decoder with static caches: it and the original model read the same tokens, call by call."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..graph.caches.joint_kv_caches import find_joint_caches
from ..graph.rewriting.matching import read_static_sizes
from ..manifest import DecoderSpec, Manifest, SlotCaches, TensorSpec
from ..runtime.artifact.checks import check_fixed_dimensions
from ..runtime.decoding.decoder_sources import list_fixed_inputs
from ..runtime.model import Model
from .chosen_tokens import Tokens, generate_tokens, read_token_shape, select_tokens, slice_tokens, to_decoder_argument
from .references import Evaluate
from .synthetic_inputs import build_feeds, list_call_inputs

_PROMPT_TOKENS, _MAX_CALLS = 6, 4  # defaults: tokens of the first call, and calls after it


class _Reader(Protocol):
    def prefill(self, ids: Any, mask: Any, /) -> np.ndarray: ...

    def fork(self) -> _Reader: ...


@dataclass(frozen=True)
class DecodingSession:
    """The calls of a decoder: its tokens, and the arrays that are the same in every call.

    `token_mask` [batch, tokens] is 0 for padding. Call k reads `call_lengths[k]` tokens. A fork of the decoder reads
    `fork_tokens` in place of the second call's tokens.
    """

    model: ir.Model
    compiled: Model
    output: str
    mask: str  # "" without an input for the token mask
    positions: str  # "" without an input for the positions
    tokens: Tokens
    token_mask: np.ndarray
    call_lengths: tuple[int, ...]
    fork_tokens: Tokens
    fixed: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Return a label for each of the results."""
        labels, end = [], 0
        for number, size in enumerate(self.call_lengths):
            token_range = format_token_range(end + 1, end + size)
            labels.append(f"{self.output} of {token_range}")
            if number == 1:
                labels.append(f"{self.output} of {token_range} of a fork")
            end += size
        return labels

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the arrays of the session by input name."""
        masks = {self.mask: self.token_mask} if self.mask else {}
        return {**self.tokens, **masks, **self.fixed}

    def run_compiled(self) -> list[np.ndarray]:
        """Return the logits of the compiled decoder, one array a call."""
        return self._read(self.compiled.decoder(fixed=self.fixed))

    def run_reference(self, evaluate: Evaluate) -> list[np.ndarray]:
        """Return the logits of the original model, whose caches grow."""
        return self._read(_ReferenceDecoder(self, evaluate))

    def _read(self, decoder: _Reader) -> list[np.ndarray]:
        logits_per_call, end = [], 0
        for number, size in enumerate(self.call_lengths):
            span = slice(end, end + size)
            fork = decoder.fork() if number == 1 else None
            counts = self.token_mask[:, span]
            logits = decoder.prefill(to_decoder_argument(slice_tokens(self.tokens, (slice(None), span))), counts)
            # Logits at padding are meaningless.
            logits_per_call.append(logits[counts.astype(bool)] if logits.shape[:2] == counts.shape else logits)
            if fork is not None:  # its tokens must not reach the caches of the decoder
                logits_per_call.append(
                    fork.prefill(
                        to_decoder_argument(self.fork_tokens), np.ones(read_token_shape(self.fork_tokens), np.int64)
                    )
                )
            end += size
        return logits_per_call


class _ReferenceDecoder:
    """The original model as a decoder: its present keys and values are the past ones of the next call."""

    def __init__(self, session: DecodingSession, evaluate: Evaluate) -> None:
        self._session, self._evaluate = session, evaluate
        self._types = {value.name or "": value for value in session.model.graph.inputs}
        self._outputs = [value.name for value in session.model.graph.outputs]
        self._seen = session.token_mask[:, :0]
        state_outputs = {**_read_states(session.compiled), **session.compiled.manifest.donated}
        joint = find_joint_caches(session.model)  # the compiled decoder has two halves of these
        self._next = {name: present for name, present in state_outputs.items() if name in self._types} | joint
        self._past = {name: create_empty_past(self._types[name], len(self._seen)) for name in self._next}
        unread = [
            value for value in list_call_inputs(session.model) if not value.uses() and value.name not in session.inputs
        ]
        self._unread = {value.name or "": create_empty_past(value, len(self._seen)) for value in unread}

    def fork(self) -> _ReferenceDecoder:
        return copy.copy(self)  # arrays are never written in place

    def prefill(self, tokens: np.ndarray | Tokens, mask: np.ndarray, /) -> np.ndarray:
        session, before = self._session, self._seen.shape[1]
        self._seen = np.concatenate([self._seen, mask], axis=1)
        by_name: Tokens = tokens if isinstance(tokens, dict) else {next(iter(session.tokens)): tokens}
        feeds: dict[str, np.ndarray] = {**self._unread, **by_name, **self._past}
        if session.mask:
            feeds[session.mask] = self._seen
        if session.positions:
            positions = np.maximum(self._seen.cumsum(axis=1) - 1, 0)[:, before:]
            feeds[session.positions] = broadcast_positions(positions, self._types[session.positions])
        typed = {name: feeds[name].astype(self._get_numpy_type(name)) for name in feeds.keys() - self._past.keys()}
        results = dict(zip(self._outputs, self._evaluate({**feeds, **typed, **session.fixed})))
        self._past = {name: results[present] for name, present in self._next.items()}
        return results[session.output]

    def _get_numpy_type(self, name: str) -> np.dtype:
        dtype = self._types[name].dtype
        assert dtype is not None
        return dtype.numpy()


def build_decoding_session(
    model: ir.Model,
    compiled: Model,
    slots: SlotCaches,
    user_arrays: Mapping[str, Any],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> DecodingSession:
    """Return the calls of a decoder, with synthetic tokens where the user gives none.

    The batch is 2 and the first call reads 6 tokens unless `sizes` or the model say otherwise. The batch is padded on
    the left where the model takes a mask. The user's arrays may hold all tokens, by input, the token mask, and inputs
    that are the same in every call; the others are synthetic.

    Raises:
        InputError: The model has no tokens, or the user gives caches.
    """
    manifest, specs = compiled.manifest, {spec.name: spec for spec in compiled.inputs}
    decoder = manifest.decoder
    assert decoder is not None  # every model with slots has one
    _check_user_names(user_arrays, decoder, {*manifest.donated, *decoder.states, slots.length})
    ids, mask = decoder.ids, decoder.mask
    per_token = [specs[name] for name in (ids, *decoder.per_token)]
    constant_specs = list_fixed_inputs(manifest, (ids, mask, decoder.positions, *decoder.per_token))
    check_fixed_dimensions(sizes, manifest.ranges)
    _check_free_sizes(sizes, (specs[ids], *constant_specs), manifest)
    user_tokens = select_tokens(per_token, user_arrays)
    batch, calls = _plan_calls(specs[ids], user_tokens, sizes, slots.capacity)
    sizes = {**sizes, **{name: batch for name in specs[ids].dims[:1] if isinstance(name, str)}}
    synthetic_tokens = generate_tokens(model.graph, per_token, (batch, sum(calls)), rng)
    fork_tokens = generate_tokens(model.graph, per_token, (batch, calls[-1]), rng)
    counts = np.ones((batch, sum(calls)), np.int64)
    if mask and not any(
        node.op_type == "GroupQueryAttention" for node in model.graph
    ):  # it does not support left padding
        padding = rng.integers(0, calls[0] // 2 + 1, batch)
        counts[:, : calls[0]] = np.arange(calls[0]) >= padding[:, None]
    fixed = build_feeds(model, constant_specs, manifest.ranges, user_arrays, sizes, rng, manifest.derived)
    state_outputs = {*manifest.donated.values(), *decoder.states.values()}
    output = next(spec.name for spec in compiled.outputs if spec.name not in state_outputs)
    return DecodingSession(
        model, compiled, output, mask, decoder.positions, tokens={**synthetic_tokens, **user_tokens},
        token_mask=_check_mask(user_arrays.get(mask, counts), counts.shape),
        call_lengths=calls, fork_tokens=fork_tokens, fixed=fixed,
    )  # fmt: skip


def _check_user_names(names: Iterable[str], decoder: DecoderSpec, caches: set[str]) -> None:
    """Raise InputError for a decoder without tokens, and for arrays that it manages itself."""
    if not decoder.ids:
        raise InputError(
            "verify.ids_missing",
            "verify cannot find the tokens of this decoder: no input [batch, tokens] selects rows of a table, and "
            "no input is a float array [batch, tokens, width].",
        )
    for name in names:
        if name in caches or name == decoder.positions:
            raise InputError(
                "verify.state_given", f"'{name}' is managed by the decoder itself, and begins empty. Leave it out."
            )


def _check_free_sizes(sizes: Mapping[str, int], specs: Iterable[TensorSpec], manifest: Manifest) -> None:
    """Raise InputError for a dimension that is not one of these inputs, and is not fixed by the model either."""
    free_dims = {dim for spec in specs for dim in spec.dims}
    free_dims |= {name for name, (low, high) in manifest.ranges.items() if low == high}
    for name in sizes:
        if name not in free_dims:
            raise InputError(
                "verify.dim_not_free", f"the calls of a decoder do not choose dimension '{name}'. Leave it out."
            )


def _plan_calls(
    ids: TensorSpec, user_tokens: Tokens, sizes: Mapping[str, int], capacity: int
) -> tuple[int, tuple[int, ...]]:
    """Return the batch, and the number of tokens of each call."""
    batch, tokens = (_read_size(ids, axis, sizes, default) for axis, default in ((0, 2), (1, _PROMPT_TOKENS)))
    if user_tokens:
        batch, total = read_token_shape(user_tokens)
        first = max(1, total - _MAX_CALLS)
        return batch, (first,) + (1,) * (total - first)
    if isinstance(ids.dims[1], int):
        return batch, (tokens,) * max(1, min(_MAX_CALLS, capacity // max(1, tokens)))
    first = max(1, min(tokens, capacity))
    return batch, (first,) + (1,) * min(_MAX_CALLS, capacity - first)


def _read_states(compiled: Model) -> dict[str, str]:
    return {} if compiled.manifest.decoder is None else compiled.manifest.decoder.states


def _read_size(spec: TensorSpec, axis: int, sizes: Mapping[str, int], default: int) -> int:
    dim = spec.dims[axis]
    return dim if isinstance(dim, int) else sizes.get(dim, default)


def format_token_range(first: int, last: int) -> str:
    """Return a description of a token range, counted from 1."""
    return f"token {last}" if first == last else f"tokens {first} to {last}"


def create_empty_past(past: ir.Value, batch: int) -> np.ndarray:
    """Return an empty past for one input of the model.

    An input [batch, heads, length, size], or [2, batch, heads, length, size], has length 0. A state [batch, sizes] is
    zero.

    Raises:
        InputError: The input has another form.
    """
    assert past.shape is not None and past.dtype is not None
    if (fixed := read_static_sizes(past.shape[1:])) is not None:
        return np.zeros((batch, *fixed), past.dtype.numpy())
    leading_dims = (2,) if len(past.shape) == 5 and past.shape[0] == 2 else ()
    sizes = past.shape[len(leading_dims) :]
    heads, length, size = (sizes[axis] for axis in (1, 2, 3)) if len(sizes) == 4 else (None, None, None)
    if not (isinstance(heads, int) and isinstance(size, int)) or isinstance(length, int):
        raise InputError(
            "verify.past_unsupported",
            f"the past '{past.name}' is {past.shape}, and cannot begin empty: verify supports decoders whose past "
            "has a symbolic length, and no other symbolic size but its batch.",
        )
    return np.zeros((*leading_dims, batch, heads, 0, size), past.dtype.numpy())


def broadcast_positions(positions: np.ndarray, value: ir.Value) -> np.ndarray:
    """Return positions [B, S] as an input takes them: [n, B, S] where a token has several."""
    assert value.shape is not None
    leading_dims = value.shape[0] if len(value.shape) == 3 else None
    return np.broadcast_to(positions, (leading_dims, *positions.shape)) if isinstance(leading_dims, int) else positions


def _check_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(mask)
    if array.shape != shape:
        raise InputError(
            "verify.mask_shape_mismatch",
            f"the mask must have the shape of the tokens, {list(shape)}, not {list(array.shape)}.",
        )
    return array.astype(np.int64)
