"""A decoder keeps a model's caches between calls: prefill a prompt, then step token by token."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .decoder_progress import Progress, SequenceProgress, SharedProgress
from .decoder_rows import Reordering, gathered
from .decoder_sources import Sources, check_fixed
from .decoder_tokens import TokenInputs
from .elements import ElementType
from .inputs import plain_array
from .tensors import copy_of

if TYPE_CHECKING:
    from .model import Model


class Decoder:
    """The state of one batch of sequences: its caches, how many tokens they hold, and which of those count.

    Made by `Model.decoder`. Caches lie where the model runs and are written in place; a call that raises leaves the
    decoder as it was.
    """

    def __init__(self, model: Model, ids: str, mask: str, positions: str, fixed: Mapping[str, Any]) -> None:
        manifest = model.manifest
        if manifest.decoder is None:
            raise InputError("the model keeps no caches: compile it with static_cache=<number of tokens>.")
        self._model, self._spec = model, manifest.decoder
        self._specs = {t.name: t for t in model.inputs}
        self._ids = ids or self._spec.ids
        if self._ids not in self._specs:
            what = f"'{self._ids}' is not an input" if self._ids else "no input is known to hold token ids"
            raise InputError(f"{what}: name the input of token ids as `ids`. The inputs are {', '.join(self._specs)}.")
        names = (mask or self._spec.mask, positions or self._spec.positions)
        others = [name for name in self._spec.per_token if name not in (self._ids, *names)]
        self._tokens = TokenInputs(tuple(self._specs[name] for name in (self._ids, *others)))
        self._mask, self._positions = (n if n in self._specs and n not in fixed else "" for n in names)
        self._length = "" if manifest.slots is None else manifest.slots.length
        self._caches = [name for name in manifest.donated if name not in self._spec.states]
        self._sources = self._sources_of(fixed)
        kept = {*manifest.donated.values(), *self._spec.states.values()}
        self._output = next(t.name for t in model.outputs if t.name not in kept)
        self._memory: dict[str, Any] = {}  # caches: NumPy's, or tensors of a GPU
        self._states: dict[str, Any] | None = None
        self._batch: int | None = None  # of the caches
        self._reordering = Reordering()
        self.reset()

    @property
    def capacity(self) -> int:
        """The largest number of tokens."""
        return self._spec.capacity

    @property
    def length(self) -> int:
        """Tokens in the caches: with padding, or of the longest sequence where each has slots of its own."""
        return self._progress.length

    def reset(self, fixed: Mapping[str, Any] | None = None) -> None:
        """Forget all tokens. Memory is kept for the next prompt of the same batch size.

        Args:
            fixed: Arrays of another source, as for `Model.decoder`; those of before are kept without it.

        Raises:
            InputError: One is missing, is not an input, or does not fit.
        """
        if fixed is not None:
            self._sources = self._sources_of(fixed)
        self._sources.reset()
        self._states = None
        self._progress: Progress = SequenceProgress() if self._spec.starts else SharedProgress()

    def fork(self) -> Decoder:
        """Return a second decoder that goes on from here, with caches of its own."""
        other = copy.copy(self)
        other._sources, other._reordering = copy.copy(self._sources), Reordering()
        other._memory = self._copies(self._memory)
        other._states = None if self._states is None else self._copies(self._states)
        return other

    def reorder(self, rows: Any) -> None:
        """Let every sequence b go on from what sequence rows[b] has read, as a beam search does between steps.

        Caches are written in place. Sequences that share a source, side by side, keep it: what a setup made of it is
        copied only where a sequence gets that of another.

        Args:
            rows: int [B], numbers of sequences, each any number of times.

        Raises:
            InputError: The decoder has read nothing yet, or `rows` are not that many numbers of sequences.
        """
        order, batch = plain_array(rows, "the array of rows"), 0 if self._batch is None else self._batch
        if not self.length:
            raise InputError("the decoder has read nothing that could be reordered: call prefill first.")
        if order.shape != (batch,) or order.dtype.kind not in "iu" or ((order < 0) | (order >= batch)).any():
            raise InputError(
                f"rows must be {batch} integers from 0 to {batch - 1}, not {order.dtype} {order.tolist()}."
            )
        length = None if self._model.manifest.slots is None else self.length
        for cache in self._memory.values():
            self._reordering.apply(cache, order, length)
        if self._states is not None:
            self._states = {name: gathered(state, order) for name, state in self._states.items()}
        self._progress = self._progress.reordered(order)
        self._sources.reorder(order)

    def prefill(self, ids: Any, mask: Any = None) -> np.ndarray:
        """Read tokens, and return the model's first output for each of them, [B, S, ...].

        Called again it reads on. Where caches are rings, or states those of one token, the tokens are read in several
        calls of the model; rings that hold tokens already are copied before, so that all of the tokens are read or
        none.

        Args:
            ids: int [B, S] or [S]; float [B, S, H] for a model that takes embeddings. A mapping of names to such arrays
                for a model that takes several values of each token.
            mask: Of the shape [B, S], 0 for padding, which is on the left, so that the next token follows the last one.
                All tokens count without it.

        Raises:
            InputError: Shapes or types do not fit, slots run out, or rings have padding between tokens.
        """
        tokens = self._tokens.of_prompt(ids)
        return self._read_all(tokens, self._counts(mask, tokens[self._ids].shape[:2]))

    def step(self, ids: Any) -> np.ndarray:
        """Read one more token of each sequence, and return the model's answer, [B, ...].

        ids is int [B] or a number, float [B, H] for a model that takes embeddings, or a mapping of these.
        """
        tokens = self._tokens.of_step(ids)
        return self._read_all(tokens, self._counts(None, tokens[self._ids].shape[:2]))[:, -1]

    def _read_all(self, tokens: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        slots, most = self._model.manifest.slots, self._spec.most
        if most is None:
            return self._read(tokens, counts)
        rings = {} if slots is None else slots.rings
        if rings:
            self._progress.after(counts, self.capacity).check_rings(self.capacity)
        answers = self._read_parts(tokens, counts, most, rings)
        has_rows = answers[0].shape[:2] == counts[:, :most].shape
        return np.concatenate(answers, axis=1) if has_rows else answers[-1]

    def _read_parts(
        self, tokens: dict[str, np.ndarray], counts: np.ndarray, most: int, rings: Collection[str]
    ) -> list[np.ndarray]:
        """Call the model for so many tokens at a time. If a call fails, the decoder is as it was before all of them."""
        starts = range(0, max(1, counts.shape[1]), most)
        progress, states, kept = self._progress, self._states, dict[str, Any]()
        if self.length and len(starts) > 1:  # each call writes over what the windows of earlier tokens see
            kept = self._copies({name: self._memory[name] for name in rings})
            states = None if states is None else self._copies(states)
        answers: list[np.ndarray] = []
        try:
            for start in starts:
                part = {name: array[:, start : start + most] for name, array in tokens.items()}
                answers.append(self._read(part, counts[:, start : start + most]))
        except BaseException as error:
            self._progress, self._states = progress, states
            self._memory |= kept
            if isinstance(error, InputError) and start:
                raise InputError(f"{error} Positions of tokens in this text count from token {start} on.") from error
            raise
        return answers

    def _read(self, tokens: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        """Call the model once."""
        progress, batch = self._progress.after(counts, self.capacity), len(counts)
        inputs: dict[str, Any] = {name: progress.arrange(array) for name, array in tokens.items()}
        inputs |= self._caches_of(batch)
        states = self._states_of(batch)
        for name, what in (
            (self._length, "past_length"), (self._mask, "mask"), (self._positions, "positions"),
            (self._spec.starts, "starts"), (self._spec.ends, "ends"),
        ):  # fmt: skip
            if name:
                inputs[name] = _of_shape(getattr(progress, what), self._specs[name])
        results = self._model.run({**inputs, **states, **self._sources.of(batch)})
        answer = progress.restore(self._model.to_numpy(self._output, results[self._output]))
        self._states = {name: results[after] for name, after in self._spec.states.items()}
        self._progress = progress
        return answer

    def _sources_of(self, fixed: Mapping[str, Any]) -> Sources:
        tokens = [spec.name for spec in self._tokens.specs]
        check_fixed(self._model.manifest, (*tokens, self._mask, self._positions), fixed)
        return Sources(self._model, fixed, self._specs[self._ids].dims[0])

    def _counts(self, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
        given = np.ones(shape) if mask is None else plain_array(mask, "the mask")
        counts = np.atleast_2d(given).astype(np.int64)
        if counts.shape != shape:
            raise InputError(f"the mask has shape {list(counts.shape)}, and the token ids have {list(shape)}.")
        return counts

    def _caches_of(self, batch: int) -> dict[str, Any]:
        """The caches; new ones for the first prompt, and where the batch size has changed, by way of `reset`."""
        if batch != self._batch:
            self._memory, self._batch = {name: self._zeros(name, batch) for name in self._caches}, batch
        return self._memory

    def _states_of(self, batch: int) -> dict[str, Any]:
        if self._states is not None:
            return self._states
        return {name: self._zeros(name, batch) for name in self._spec.states}

    def _copies(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        copied = np.copy if self._model.gpu is None else copy_of
        return {name: copied(array) for name, array in arrays.items()}

    def _zeros(self, name: str, batch: int) -> Any:
        spec: TensorSpec = self._specs[name]
        sizes = [batch, *(size for size in spec.dims[1:] if isinstance(size, int))]
        if len(sizes) < len(spec.dims):
            raise InputError(f"cache {spec} has a symbolic size besides its batch: call `run` instead.")
        gpu = self._model.gpu
        return np.zeros(sizes, ElementType(spec.dtype, spec.storage).numpy) if gpu is None else gpu.zeros(spec, sizes)


def _of_shape(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The array in the type of an input, with more axes in front where it has more, repeated along those."""
    shape = (1,) * (len(spec.dims) - array.ndim) + array.shape
    sizes = [dim if isinstance(dim, int) and size == 1 else size for dim, size in zip(spec.dims, shape)]
    return np.broadcast_to(array, sizes).astype(spec.dtype)
