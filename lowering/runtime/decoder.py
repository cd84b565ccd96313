"""A decoder keeps a model's caches between calls: prefill a prompt, then step token by token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
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
        self._model, self._ids, self._mask_input, self._positions = model, ids, mask, positions
        self._fixed = fixed
        manifest = model.manifest
        if manifest.slots is None:
            raise InputError("the model keeps no caches: compile it with static_cache=<number of tokens>.")
        self._slots = manifest.slots
        self._specs = {t.name: t for t in model.inputs}
        if ids not in self._specs:
            raise InputError(f"there is no input '{ids}' for token ids. The inputs are {', '.join(self._specs)}.")
        ours = {ids, mask, positions, self._slots.length, *manifest.donated} - set(fixed)
        others = [name for name in self._specs if name not in ours and name not in fixed]
        if others:
            raise InputError(f"a decoder cannot know input '{others[0]}': pass its array in `fixed`.")
        caches = set(manifest.donated.values())
        self._output = next(t.name for t in model.outputs if t.name not in caches)
        self._caches: dict[str, Any] = {}  # NumPy's, or tensors of a GPU
        self._batch: int | None = None  # of the caches
        self.reset()

    @property
    def capacity(self) -> int:
        """The largest number of tokens."""
        return self._slots.capacity

    @property
    def length(self) -> int:
        """Tokens in the caches, padding included."""
        return self._length

    def reset(self) -> None:
        """Forgets all tokens. Memory is kept for the next prompt of the same batch size."""
        self._length = 0
        self._seen: np.ndarray | None = None  # [B, length] of 0 and 1

    def fork(self) -> Decoder:
        """A second decoder that goes on from here, with caches of its own."""
        other = copy.copy(self)
        copied = np.copy if self._model.gpu is None else copy_of
        other._caches = {name: copied(cache) for name, cache in self._caches.items()}
        other._seen = None if self._seen is None else self._seen.copy()
        return other

    def prefill(self, ids: Any, mask: Any = None) -> np.ndarray:
        """Reads tokens, int [B, S] or [S]; answers with the model's first output for each of them, [B, S, ...].

        mask, of the shape of ids, is 0 for padding (on the left, so that the next token follows the last one); all
        tokens count without it. Called again it reads on. Raises InputError where slots run out.
        """
        tokens = np.atleast_2d(plain_array(ids, "the array of token ids"))
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise InputError(f"token ids must be integers [batch, tokens], not {tokens.dtype} {list(tokens.shape)}.")
        given = np.ones(tokens.shape) if mask is None else plain_array(mask, "the mask")
        count = np.atleast_2d(given).astype(np.int64)
        if count.shape != tokens.shape:
            raise InputError(f"the mask has shape {list(count.shape)}, and the token ids have {list(tokens.shape)}.")
        before = np.zeros((len(tokens), 0), np.int64) if self._seen is None else self._seen
        if len(before) != len(tokens):
            raise InputError(f"the decoder holds {len(before)} sequences and was given {len(tokens)}. Call reset().")
        seen = np.concatenate([before, count], axis=1)
        inputs = {self._ids: tokens.astype(self._specs[self._ids].dtype), **self._memory(len(tokens))}
        inputs[self._slots.length] = np.array(self._length, np.int64)
        if self._mask_input in self._specs and self._mask_input not in self._fixed:
            inputs[self._mask_input] = seen.astype(self._specs[self._mask_input].dtype)
        if self._positions in self._specs:
            at = np.maximum(seen.cumsum(axis=1) - 1, 0)[:, self._length :]
            inputs[self._positions] = at.astype(self._specs[self._positions].dtype)
        result = self._model.to_numpy(self._output, self._model.run({**inputs, **self._fixed})[self._output])
        self._length, self._seen = seen.shape[1], seen
        return result

    def step(self, ids: Any) -> np.ndarray:
        """Reads one more token of each sequence, int [B] or a number; answers for it, [B, ...]."""
        return self.prefill(np.atleast_1d(plain_array(ids, "the array of token ids")).reshape(-1, 1))[:, -1]

    def _memory(self, batch: int) -> dict[str, Any]:
        """The caches; new ones for the first prompt, and where the batch size has changed, by way of `reset`."""
        if batch != self._batch:
            caches = {}
            for name in self._model.manifest.donated:
                spec = self._specs[name]
                sizes = [batch, *(size for size in spec.dims[1:] if isinstance(size, int))]
                if len(sizes) < len(spec.dims):
                    raise InputError(f"cache {spec} has a symbolic size besides its batch: call `run` instead.")
                caches[name] = self._zeros(spec, sizes)
            self._caches, self._batch = caches, batch
        return self._caches

    def _zeros(self, spec: TensorSpec, sizes: list[int]) -> Any:
        gpu = self._model.gpu
        return np.zeros(sizes, ElementType(spec.dtype, spec.storage).numpy) if gpu is None else gpu.zeros(spec, sizes)
