"""A decoder with static caches beside the model that it was made of: both read the same tokens, call by call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..fusion.matching import numbers
from ..graph.joint_caches import joint_caches
from ..manifest import SlotCaches, TensorSpec
from ..runtime.checks import check_fixed_dimensions
from ..runtime.decoder_sources import list_fixed_inputs
from ..runtime.model import Model
from .chosen_tokens import Tokens, as_argument, given_tokens, part_of, random_tokens, shape_of
from .references import Evaluate
from .synthetic_inputs import feeds_of, taken

_PROMPT, _CALLS = 6, 4  # tokens where no size says otherwise, and calls behind the first


class _Reader(Protocol):
    def prefill(self, ids: Any, mask: Any, /) -> np.ndarray: ...

    def fork(self) -> _Reader: ...


@dataclass(frozen=True)
class Session:
    """Tokens of the batch, which of them count [batch, tokens] (as padding does not), how many each call reads, those
    that a fork reads in place of the second call's, and arrays for what is the same in every call."""

    model: ir.Model
    compiled: Model
    output: str
    mask: str  # "" where no input says which tokens count
    positions: str  # "" where no input says where they are
    tokens: Tokens
    counts: np.ndarray
    calls: tuple[int, ...]
    forked: Tokens
    fixed: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """What each of the results is of."""
        found, end = [], 0
        for number, size in enumerate(self.calls):
            which = said(end + 1, end + size)
            found.append(f"{self.output} of {which}")
            if number == 1:
                found.append(f"{self.output} of {which} of a fork")
            end += size
        return found

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays that were chosen, by the names of inputs."""
        masks = {self.mask: self.counts} if self.mask else {}
        return {**self.tokens, **masks, **self.fixed}

    def ours(self) -> list[np.ndarray]:
        """What the compiled decoder answers."""
        return self._read(self.compiled.decoder(fixed=self.fixed))

    def theirs(self, evaluate: Evaluate) -> list[np.ndarray]:
        """What the model as it was answers, whose caches grow."""
        return self._read(_Growing(self, evaluate))

    def _read(self, decoder: _Reader) -> list[np.ndarray]:
        found, end = [], 0
        for number, size in enumerate(self.calls):
            here = slice(end, end + size)
            fork = decoder.fork() if number == 1 else None
            counts = self.counts[:, here]
            logits = decoder.prefill(as_argument(part_of(self.tokens, (slice(None), here))), counts)
            # What a model says behind padding means nothing.
            found.append(logits[counts.astype(bool)] if logits.shape[:2] == counts.shape else logits)
            if fork is not None:  # what it reads must not become the decoder's
                found.append(fork.prefill(as_argument(self.forked), np.ones(shape_of(self.forked), np.int64)))
            end += size
        return found


class _Growing:
    """The model as it was, whose present keys and values are the past ones of the next call."""

    def __init__(self, session: Session, evaluate: Evaluate) -> None:
        self._session, self._evaluate = session, evaluate
        self._types = {value.name or "": value for value in session.model.graph.inputs}
        self._outputs = [value.name for value in session.model.graph.outputs]
        self._seen = session.counts[:, :0]
        kept = {**_states(session.compiled), **session.compiled.manifest.donated}
        joint = joint_caches(session.model)  # which the compiled decoder keeps in two halves
        self._next = {name: present for name, present in kept.items() if name in self._types} | joint
        self._past = {name: empty_past(self._types[name], len(self._seen)) for name in self._next}
        unread = [value for value in taken(session.model) if not value.uses() and value.name not in session.inputs]
        self._unread = {value.name or "": empty_past(value, len(self._seen)) for value in unread}

    def fork(self) -> _Growing:
        return copy.copy(self)  # nothing is written in place

    def prefill(self, tokens: np.ndarray | Tokens, mask: np.ndarray, /) -> np.ndarray:
        session, before = self._session, self._seen.shape[1]
        self._seen = np.concatenate([self._seen, mask], axis=1)
        by_name: Tokens = tokens if isinstance(tokens, dict) else {next(iter(session.tokens)): tokens}
        feeds: dict[str, np.ndarray] = {**self._unread, **by_name, **self._past}
        if session.mask:
            feeds[session.mask] = self._seen
        if session.positions:
            positions = np.maximum(self._seen.cumsum(axis=1) - 1, 0)[:, before:]
            feeds[session.positions] = of_rank(positions, self._types[session.positions])
        typed = {name: feeds[name].astype(self._numpy(name)) for name in feeds.keys() - self._past.keys()}
        results = dict(zip(self._outputs, self._evaluate({**feeds, **typed, **session.fixed})))
        self._past = {name: results[present] for name, present in self._next.items()}
        return results[session.output]

    def _numpy(self, name: str) -> np.dtype:
        dtype = self._types[name].dtype
        assert dtype is not None
        return dtype.numpy()


def session(
    model: ir.Model,
    compiled: Model,
    slots: SlotCaches,
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> Session:
    """Tokens for a decoder, whose batch is 2 and whose first call reads 6 unless `sizes` or the model says otherwise.

    The batch is padded on the left where the model takes a mask. `given` may hold all tokens, by input, the mask that
    says which of them count, and inputs that are the same in every call; the others are synthetic. Raises InputError
    for a model without tokens, and for caches that are given.
    """
    specs = {spec.name: spec for spec in compiled.inputs}
    spec = compiled.manifest.decoder
    assert spec is not None  # of every model with slots
    caches, ids, mask = {*compiled.manifest.donated, *spec.states, slots.length}, spec.ids, spec.mask
    if not ids:
        raise InputError(
            "verify finds no tokens of this decoder: no input [batch, tokens] picks rows of a table, nor is one float "
            "[batch, tokens, width]."
        )
    for name in given:
        if name in caches or name == spec.positions:
            raise InputError(f"a decoder keeps '{name}' itself: leave it out, and let it begin empty.")
    per_token = [specs[name] for name in (ids, *spec.per_token)]
    others = list_fixed_inputs(compiled.manifest, (ids, mask, spec.positions, *spec.per_token))
    check_fixed_dimensions(sizes, compiled.manifest.ranges)
    known = {dim for spec in (specs[ids], *others) for dim in spec.dims}
    known |= {name for name, (low, high) in compiled.manifest.ranges.items() if low == high}
    for name in sizes:
        if name not in known:
            raise InputError(f"the calls of a decoder do not choose dimension '{name}': leave it out.")
    batch, tokens = (_size(specs[ids], axis, sizes, default) for axis, default in ((0, 2), (1, _PROMPT)))
    read = given_tokens(per_token, given)
    if read:
        batch, total = shape_of(read)
        first = max(1, total - _CALLS)
        calls = (first,) + (1,) * (total - first)
    elif isinstance(specs[ids].dims[1], int):
        calls = (tokens,) * max(1, min(_CALLS, slots.capacity // max(1, tokens)))
    else:
        first = max(1, min(tokens, slots.capacity))
        calls = (first,) + (1,) * min(_CALLS, slots.capacity - first)
    sizes = {**sizes, **{name: batch for name in specs[ids].dims[:1] if isinstance(name, str)}}
    chosen = random_tokens(model.graph, per_token, (batch, sum(calls)), rng)
    second = random_tokens(model.graph, per_token, (batch, calls[-1]), rng)
    counts = np.ones((batch, sum(calls)), np.int64)
    if mask and not any(node.op_type == "GroupQueryAttention" for node in model.graph):  # which has no such padding
        hidden = rng.integers(0, calls[0] // 2 + 1, batch)
        counts[:, : calls[0]] = np.arange(calls[0]) >= hidden[:, None]
    fixed = feeds_of(model, others, compiled.manifest.ranges, given, sizes, rng, compiled.manifest.derived)
    kept = {*compiled.manifest.donated.values(), *spec.states.values()}
    output = next(spec.name for spec in compiled.outputs if spec.name not in kept)
    return Session(
        model, compiled, output, mask, spec.positions, tokens={**chosen, **read},
        counts=_counts(given.get(mask, counts), counts.shape), calls=calls, forked=second, fixed=fixed,
    )  # fmt: skip


def _states(compiled: Model) -> dict[str, str]:
    return {} if compiled.manifest.decoder is None else compiled.manifest.decoder.states


def _size(spec: TensorSpec, axis: int, sizes: Mapping[str, int], default: int) -> int:
    dim = spec.dims[axis]
    return dim if isinstance(dim, int) else sizes.get(dim, default)


def said(first: int, last: int) -> str:
    """Tokens, counted from 1."""
    return f"token {last}" if first == last else f"tokens {first} to {last}"


def empty_past(past: ir.Value, batch: int) -> np.ndarray:
    """An array of no rows for an input [batch, heads, length, size], or two of these in one, and zeros for a state
    [batch, sizes].

    Raises InputError for any other input.
    """
    assert past.shape is not None and past.dtype is not None
    if (fixed := numbers(past.shape[1:])) is not None:
        return np.zeros((batch, *fixed), past.dtype.numpy())
    front = (2,) if len(past.shape) == 5 and past.shape[0] == 2 else ()
    sizes = past.shape[len(front) :]
    heads, length, size = (sizes[axis] for axis in (1, 2, 3)) if len(sizes) == 4 else (None, None, None)
    if not (isinstance(heads, int) and isinstance(size, int)) or isinstance(length, int):
        raise InputError(
            f"the past '{past.name}' is {past.shape}, and cannot begin empty: "
            "verify follows decoders whose past has a symbolic length, and no other symbolic size but its batch."
        )
    return np.zeros((*front, batch, heads, 0, size), past.dtype.numpy())


def of_rank(positions: np.ndarray, value: ir.Value) -> np.ndarray:
    """Return positions [B, S] as an input takes them: [n, B, S] where a token has several."""
    assert value.shape is not None
    front = value.shape[0] if len(value.shape) == 3 else None
    return np.broadcast_to(positions, (front, *positions.shape)) if isinstance(front, int) else positions


def _counts(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(mask)
    if array.shape != shape:
        raise InputError(f"the mask must be of the tokens, {list(shape)}, and is {list(array.shape)}.")
    return array.astype(np.int64)
