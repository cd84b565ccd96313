"""What a served decoder reads of a request: ids, or embeddings, which came from elsewhere and tell no ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .arguments import integer, numbers, token_ids


@dataclass(frozen=True)
class RequestTokens:
    """How tokens of requests go into the input `spec`, [1, N] of ids or [1, N, width] of embeddings."""

    spec: TensorSpec

    @property
    def are_ids(self) -> bool:
        """Whether equal tokens can be told, so that requests may share what was read of them."""
        return len(self.spec.dims) == 2

    def of_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        """Return the tokens one by one. Raises InputError for anything else, and beyond their type."""
        if self.are_ids:
            return self._checked(token_ids(prompt, request), request)
        width, array = self.spec.dims[2], numbers(prompt)
        if array is None or array.ndim != 2 or array.shape[1] != width:
            what = type(prompt).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
            raise InputError(f"the prompt of request {request!r} must be embeddings [tokens, {width}], not {what}.")
        with np.errstate(over="ignore"):
            tokens = array.astype(self._dtype)
        if (np.isinf(tokens) & np.isfinite(array)).any():
            raise InputError(f"tokens of request {request!r} are too large for {self.spec.dtype}: scale them down.")
        return list(tokens)

    def of_one(self, token: Any, request: Hashable) -> Any:
        """Return one more token. Raises InputError for what is none."""
        if self.are_ids:
            return self._checked([integer(token, "token", 0)], request)[0]
        array = numbers(token)
        return self.of_prompt(token if array is None else array[None], request)[0]

    def packed(self, tokens: Sequence[list[Any]]) -> np.ndarray:
        """Return the tokens of all requests side by side, as the input takes them."""
        return np.concatenate(tokens, dtype=self._dtype, casting="unsafe")[None]

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.spec.dtype, self.spec.dtype))

    def _checked(self, ids: list[int], request: Hashable) -> list[int]:
        largest = np.iinfo(self._dtype).max
        for token in ids:
            if not 0 <= token <= largest:
                raise InputError(
                    f"tokens of request {request!r} must be ids from 0 to {largest}, as {self.spec.dtype} "
                    f"'{self.spec.name}' takes them, and {token} is not."
                )
        return ids
