"""Decoders, which own a model's caches between calls: prefill a prompt, then step token by token."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from ...manifest import TensorSpec
from ..arrays.elements import ElementType
from ..arrays.inputs import to_numpy_array
from ..arrays.tensors import copy_tensor
from .decoder_progress import Progress, SequenceProgress, SharedProgress
from .decoder_rows import RowReordering, gather_rows
from .decoder_sources import DecoderSources, check_fixed_inputs
from .decoder_tokens import TokenInputs

if TYPE_CHECKING:
    from ..model import Model


class Decoder:
    """The state of one batch of sequences: its caches, their number of tokens, and which of those count.

    `Model.decoder` creates it. Caches are in the memory of the device that runs the model and are written in place. A
    call that raises leaves the decoder unchanged.
    """

    def __init__(self, model: Model, ids: str, mask: str, positions: str, fixed: Mapping[str, Any]) -> None:
        manifest = model.manifest
        if manifest.decoder is None:
            raise InputError(
                "decoder.caches_missing",
                "the model has no static caches: compile it with static_cache=<number of tokens>.",
            )
        self._model, self._spec = model, manifest.decoder
        self._specs = {t.name: t for t in model.inputs}
        self._ids = ids or self._spec.ids
        if self._ids not in self._specs:
            what = f"'{self._ids}' is not an input" if self._ids else "no input was identified as token ids"
            raise InputError(
                "decoder.ids_unknown",
                f"{what}: name the input of token ids as `ids`. The inputs are {', '.join(self._specs)}.",
            )
        names = (mask or self._spec.mask, positions or self._spec.positions)
        token_inputs = [name for name in self._spec.per_token if name not in (self._ids, *names)]
        self._tokens = TokenInputs(tuple(self._specs[name] for name in (self._ids, *token_inputs)))
        self._mask, self._positions = (n if n in self._specs and n not in fixed else "" for n in names)
        self._length = "" if manifest.slots is None else manifest.slots.length
        self._caches = [name for name in manifest.donated if name not in self._spec.states]
        self._sources = self._create_sources(fixed)
        cache_outputs = {*manifest.donated.values(), *self._spec.states.values()}
        self._output = next(t.name for t in model.outputs if t.name not in cache_outputs)
        self._memory: dict[str, Any] = {}  # caches: NumPy arrays, or tensors on a GPU
        self._states: dict[str, Any] | None = None
        self._batch: int | None = None  # of the caches
        self._reordering = RowReordering()
        self.reset()

    @property
    def capacity(self) -> int:
        """The largest number of tokens of a sequence."""
        return self._spec.capacity

    @property
    def length(self) -> int:
        """Number of tokens in the caches, padding included.

        If each sequence has slots of its own, it is the length of the longest sequence.
        """
        return self._progress.length

    def reset(self, fixed: Mapping[str, Any] | None = None) -> None:
        """Discard all tokens. The caches are reused for the next prompt of the same batch size.

        Args:
            fixed: Arrays of another source, as for `Model.decoder`. Without it the previous ones remain.

        Raises:
            InputError: An array is missing, is not an input, or does not fit.
        """
        if fixed is not None:
            self._sources = self._create_sources(fixed)
        self._sources.reset()
        self._states = None
        self._progress: Progress = SequenceProgress() if self._spec.starts else SharedProgress()

    def fork(self) -> Decoder:
        """Return a second decoder that continues from here, with copies of the caches."""
        forked = copy.copy(self)
        forked._sources, forked._reordering = copy.copy(self._sources), RowReordering()
        forked._memory = self._copy_arrays(self._memory)
        forked._states = None if self._states is None else self._copy_arrays(self._states)
        return forked

    def reorder(self, rows: Any) -> None:
        """Continue every sequence b from the tokens that sequence rows[b] has read, as in beam search.

        Caches are written in place. Adjacent sequences that share a source go on sharing it: the output of a setup is
        copied only if a sequence changes to another source.

        Args:
            rows: int [B], indices of sequences. Each index may occur any number of times.

        Raises:
            InputError: The decoder has read nothing yet, or `rows` are not B indices of sequences.
        """
        order, batch = to_numpy_array(rows, "the array of rows"), 0 if self._batch is None else self._batch
        if not self.length:
            raise InputError("decoder.empty", "the decoder has no tokens to reorder: call prefill first.")
        if order.shape != (batch,) or order.dtype.kind not in "iu" or ((order < 0) | (order >= batch)).any():
            raise InputError(
                "decoder.rows_invalid",
                f"rows must be {batch} integers from 0 to {batch - 1}, not {order.dtype} {order.tolist()}.",
            )
        length = None if self._model.manifest.slots is None else self.length
        for cache in self._memory.values():
            self._reordering.apply(cache, order, length)
        if self._states is not None:
            self._states = {name: gather_rows(state, order) for name, state in self._states.items()}
        self._progress = self._progress.reorder(order)
        self._sources.reorder(order)

    def prefill(self, ids: Any, mask: Any = None) -> np.ndarray:
        """Read tokens, and return the model's first output for each of them, [B, S, ...].

        Further calls append to the sequences. If caches are rings, or the model takes one token at a time because it
        has states, the tokens are read in several calls of the model. Rings that already have tokens are copied before,
        so that either all tokens are read or none.

        Args:
            ids: int [B, S] or [S]; float [B, S, H] for a model that takes embeddings. A mapping of names to such arrays
                for a model that takes several values of each token.
            mask: Shape [B, S], 0 for padding, which must be on the left, so that the next token follows the last one.
                All tokens count if it is None.

        Returns:
            The first output of the model, which is not a cache.

        Raises:
            InputError: Shapes or types do not fit, slots run out, or rings have padding between tokens.
        """
        tokens = self._tokens.read_prompt(ids)
        return self._read_all(tokens, self._read_counts(mask, tokens[self._ids].shape[:2]))

    def step(self, ids: Any) -> np.ndarray:
        """Read one more token of each sequence, and return the model's output for it, [B, ...].

        Args:
            ids: int [B] or a number; float [B, H] for a model that takes embeddings; or a mapping of names to these.
        """
        tokens = self._tokens.read_step(ids)
        return self._read_all(tokens, self._read_counts(None, tokens[self._ids].shape[:2]))[:, -1]

    def _read_all(self, tokens: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        slots, max_tokens = self._model.manifest.slots, self._spec.most
        if max_tokens is None:
            return self._read(tokens, counts)
        rings = {} if slots is None else slots.rings
        if rings:
            self._progress.advance(counts, self.capacity).check_rings(self.capacity)
        answers = self._read_in_chunks(tokens, counts, max_tokens, rings)
        has_rows = answers[0].shape[:2] == counts[:, :max_tokens].shape
        return np.concatenate(answers, axis=1) if has_rows else answers[-1]

    def _read_in_chunks(
        self, tokens: dict[str, np.ndarray], counts: np.ndarray, max_tokens: int, rings: Collection[str]
    ) -> list[np.ndarray]:
        """Call the model for at most `max_tokens` tokens at a time.

        If a call fails, the decoder is restored to its state before the first call.
        """
        starts = range(0, max(1, counts.shape[1]), max_tokens)
        progress, states, saved_rings = self._progress, self._states, dict[str, Any]()
        if self.length and len(starts) > 1:  # each call overwrites slots that windows of earlier tokens need
            saved_rings = self._copy_arrays({name: self._memory[name] for name in rings})
            states = None if states is None else self._copy_arrays(states)
        answers: list[np.ndarray] = []
        try:
            for start in starts:
                chunk = {name: array[:, start : start + max_tokens] for name, array in tokens.items()}
                answers.append(self._read(chunk, counts[:, start : start + max_tokens]))
        except BaseException as error:
            self._progress, self._states = progress, states
            self._memory |= saved_rings
            if isinstance(error, InputError) and start:
                raise InputError(
                    error.code, f"{error} Positions of tokens in this text count from token {start} on."
                ) from error
            raise
        return answers

    def _read(self, tokens: dict[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        """Run one call of the model, and return its output."""
        progress, batch = self._progress.advance(counts, self.capacity), len(counts)
        inputs: dict[str, Any] = {name: progress.arrange(array) for name, array in tokens.items()}
        inputs |= self._get_caches(batch)
        states = self._get_states(batch)
        for name, attribute in (
            (self._length, "past_length"), (self._mask, "mask"), (self._positions, "positions"),
            (self._spec.starts, "starts"), (self._spec.ends, "ends"),
        ):  # fmt: skip
            if name:
                inputs[name] = _broadcast_to_spec(getattr(progress, attribute), self._specs[name])
        results = self._model.run({**inputs, **states, **self._sources.get_arrays(batch)})
        answer = progress.restore(self._model.to_numpy(self._output, results[self._output]))
        self._states = {name: results[output] for name, output in self._spec.states.items()}
        self._progress = progress
        return answer

    def _create_sources(self, fixed: Mapping[str, Any]) -> DecoderSources:
        tokens = [spec.name for spec in self._tokens.specs]
        check_fixed_inputs(self._model.manifest, (*tokens, self._mask, self._positions), fixed)
        return DecoderSources(self._model, fixed, self._specs[self._ids].dims[0])

    def _read_counts(self, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
        mask_array = np.ones(shape) if mask is None else to_numpy_array(mask, "the mask")
        counts = np.atleast_2d(mask_array).astype(np.int64)
        if counts.shape != shape:
            raise InputError(
                "decoder.mask_shape_mismatch",
                f"the mask has shape {list(counts.shape)}, and the token ids have {list(shape)}. "
                "Give both the same shape.",
            )
        return counts

    def _get_caches(self, batch: int) -> dict[str, Any]:
        """Return the caches, which are allocated anew if the batch size has changed since `reset`."""
        if batch != self._batch:
            self._memory, self._batch = {name: self._create_zeros(name, batch) for name in self._caches}, batch
        return self._memory

    def _get_states(self, batch: int) -> dict[str, Any]:
        if self._states is not None:
            return self._states
        return {name: self._create_zeros(name, batch) for name in self._spec.states}

    def _copy_arrays(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        copy_array = np.copy if self._model.gpu is None else copy_tensor
        return {name: copy_array(array) for name, array in arrays.items()}

    def _create_zeros(self, name: str, batch: int) -> Any:
        spec: TensorSpec = self._specs[name]
        sizes = [batch, *(size for size in spec.dims[1:] if isinstance(size, int))]
        if len(sizes) < len(spec.dims):
            raise InputError(
                "decoder.cache_size_symbolic",
                f"cache {spec} has a symbolic size besides its batch: call `run` instead.",
            )
        gpu = self._model.gpu
        return np.zeros(sizes, ElementType(spec.dtype, spec.storage).numpy) if gpu is None else gpu.zeros(spec, sizes)


def _broadcast_to_spec(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Return the array in the type and rank of an input, repeated along leading axes that it lacks."""
    shape = (1,) * (len(spec.dims) - array.ndim) + array.shape
    sizes = [dim if isinstance(dim, int) and size == 1 else size for dim, size in zip(spec.dims, shape)]
    return np.broadcast_to(array, sizes).astype(spec.dtype)
