"""What a served decoder reads of a request: ids, or embeddings, which came from elsewhere and tell no ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  names its types for NumPy
import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .paged_cache import integer, token_ids


@dataclass(frozen=True)
class RequestTokens:
    """How tokens of requests go into the input `spec`, [1, N] of ids or [1, N, width] of embeddings."""

    spec: TensorSpec

    @property
    def are_ids(self) -> bool:
        """Whether equal tokens can be told, so that requests may share what was read of them."""
        return len(self.spec.dims) == 2

    def of_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        """Return the tokens one by one. Raises InputError for what is no sequence of them."""
        if self.are_ids:
            return token_ids(prompt, request)
        width, array = self.spec.dims[2], _floats(prompt)
        if array is None or array.ndim != 2 or array.shape[1] != width:
            what = type(prompt).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
            raise InputError(f"the prompt of request {request!r} must be embeddings [tokens, {width}], not {what}.")
        return list(array.astype(self.spec.dtype))

    def of_one(self, token: Any, request: Hashable) -> Any:
        """Return one more token. Raises InputError for what is none."""
        if self.are_ids:
            return integer(token, "token", 0)
        array = _floats(token)
        return self.of_prompt(array if array is None else array[None], request)[0]

    def packed(self, tokens: Sequence[list[Any]]) -> np.ndarray:
        """Return the tokens of all requests side by side, as the input takes them."""
        return np.concatenate(tokens, dtype=np.dtype(self.spec.dtype), casting="unsafe")[None]


def _floats(values: Any) -> np.ndarray | None:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of several lengths
        return None
    is_number = array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"
    return array if is_number else None
