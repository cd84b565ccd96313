"""Tokens of requests: ids, embeddings from another source, or both."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .arguments import check_integer, read_numbers, read_token_ids


@dataclass(frozen=True)
class RequestTokens:
    """Conversion of requests' tokens to inputs [1, N] or [1, N, width]; a mapping by name for several inputs.

    vocabularies is the number of ids by input, if it can be determined.
    """

    specs: tuple[TensorSpec, ...]
    vocabularies: Mapping[str, int]

    @property
    def are_ids(self) -> bool:
        """Whether tokens are ids only, so that requests with equal tokens may share cached keys and values."""
        return len(self.specs) == 1 and self._create_input(self.specs[0]).are_ids

    def read_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        """Return the tokens one by one. Raises InputError for invalid values and values beyond their type."""
        if len(self.specs) == 1:
            return self._create_input(self.specs[0]).read_prompt(prompt, request)
        mapping = self._check_mapping(prompt, request)
        columns = {spec.name: self._create_input(spec).read_prompt(mapping[spec.name], request) for spec in self.specs}
        if len({len(column) for column in columns.values()}) > 1:
            texts = ", ".join(f"{len(column)} of '{name}'" for name, column in columns.items())
            raise InputError(
                "batcher.token_count_mismatch",
                f"the prompt of request {request!r} has {texts}: give each token a value of every input.",
            )
        return [dict(zip(columns, token_values)) for token_values in zip(*columns.values())]

    def read_token(self, token: Any, request: Hashable) -> Any:
        """Return one more token. Raises InputError if it is invalid."""
        if len(self.specs) == 1:
            return self._create_input(self.specs[0]).read_token(token, request)
        values = self._check_mapping(token, request)
        return {spec.name: self._create_input(spec).read_token(values[spec.name], request) for spec in self.specs}

    def pack(self, tokens: Sequence[list[Any]]) -> dict[str, np.ndarray]:
        """Return the tokens of all requests concatenated, as each input takes them."""
        if len(self.specs) == 1:
            return {self.specs[0].name: self._create_input(self.specs[0]).pack(tokens)}
        by_spec = {spec: [[token[spec.name] for token in row] for row in tokens] for spec in self.specs}
        return {spec.name: self._create_input(spec).pack(column) for spec, column in by_spec.items()}

    def _create_input(self, spec: TensorSpec) -> _TokenInput:
        return _TokenInput(spec, self.vocabularies.get(spec.name))

    def _check_mapping(self, values: Any, request: Hashable) -> Mapping[str, Any]:
        names = [spec.name for spec in self.specs]
        if not isinstance(values, Mapping) or values.keys() != set(names):
            text = f"a mapping of {list(values)}" if isinstance(values, Mapping) else type(values).__name__
            raise InputError(
                "batcher.tokens_not_a_mapping",
                f"tokens of request {request!r} must be a mapping of {', '.join(names)}, not {text}.",
            )
        return values


@dataclass(frozen=True)
class _TokenInput:
    """One input, [1, N] or [1, N, width]. vocabulary is the number of ids, or None if it is unknown."""

    spec: TensorSpec
    vocabulary: int | None

    @property
    def are_ids(self) -> bool:
        return len(self.spec.dims) == 2 and self._dtype.kind in "iu"

    def read_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        if self.are_ids:
            return self._check_ids(read_token_ids(prompt, request), request)
        inner, array = self.spec.dims[2:], read_numbers(prompt)
        if array is None or array.shape[1:] != inner or not array.ndim:
            text = type(prompt).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
            shape = ", ".join(map(str, ("tokens", *inner)))
            raise InputError(
                "batcher.token_shape_mismatch",
                f"'{self.spec.name}' of request {request!r} must be [{shape}], not {text}.",
            )
        with np.errstate(over="ignore"):
            tokens = array.astype(self._dtype)
        if (np.isinf(tokens) & np.isfinite(array)).any():
            raise InputError(
                "batcher.token_value_too_large",
                f"tokens of request {request!r} are too large for {self.spec.dtype}: scale them down.",
            )
        return list(tokens)

    def read_token(self, token: Any, request: Hashable) -> Any:
        if self.are_ids:
            return self._check_ids([check_integer(token, "token", 0)], request)[0]
        array = read_numbers(token)
        return self.read_prompt(token if array is None else array[None], request)[0]

    def pack(self, tokens: Sequence[list[Any]]) -> np.ndarray:
        return np.concatenate(tokens, dtype=self._dtype, casting="unsafe")[None]

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.spec.dtype, self.spec.dtype))

    def _check_ids(self, ids: list[int], request: Hashable) -> list[int]:
        largest = np.iinfo(self._dtype).max if self.vocabulary is None else self.vocabulary - 1
        invalid = next((token for token in ids if not 0 <= token <= largest), None)
        if invalid is not None:
            reason = f"as {self.spec.dtype} '{self.spec.name}' takes them"
            if self.vocabulary is not None:
                reason = f"rows of the model's table of {self.vocabulary} tokens"
            raise InputError(
                "batcher.token_id_out_of_range",
                f"tokens of request {request!r} must be ids from 0 to {largest}, {reason}, and {invalid} is not.",
            )
        return ids
