"""What a served decoder reads of a request: ids, or embeddings, which came from elsewhere and tell no ids, or both."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import TensorSpec
from .arguments import integer, numbers, token_ids


@dataclass(frozen=True)
class RequestTokens:
    """How tokens of requests go into inputs [1, N] or [1, N, width]; a mapping by name where there are several.

    vocabularies: the number of ids by input, where it is known.
    """

    specs: tuple[TensorSpec, ...]
    vocabularies: Mapping[str, int]

    @property
    def are_ids(self) -> bool:
        """Whether equal tokens can be told, so that requests may share what was read of them."""
        return len(self.specs) == 1 and self._input(self.specs[0]).are_ids

    def of_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        """Return the tokens one by one. Raises InputError for anything else, and beyond their type."""
        if len(self.specs) == 1:
            return self._input(self.specs[0]).of_prompt(prompt, request)
        given = self._by_name(prompt, request)
        columns = {spec.name: self._input(spec).of_prompt(given[spec.name], request) for spec in self.specs}
        if len({len(column) for column in columns.values()}) > 1:
            texts = ", ".join(f"{len(column)} of '{name}'" for name, column in columns.items())
            raise InputError(f"the prompt of request {request!r} has {texts}: give each token a value of every input.")
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def of_one(self, token: Any, request: Hashable) -> Any:
        """Return one more token. Raises InputError for what is none."""
        if len(self.specs) == 1:
            return self._input(self.specs[0]).of_one(token, request)
        given = self._by_name(token, request)
        return {spec.name: self._input(spec).of_one(given[spec.name], request) for spec in self.specs}

    def packed(self, tokens: Sequence[list[Any]]) -> dict[str, np.ndarray]:
        """Return the tokens of all requests side by side, as each input takes them."""
        if len(self.specs) == 1:
            return {self.specs[0].name: self._input(self.specs[0]).packed(tokens)}
        parts = {spec: [[token[spec.name] for token in each] for each in tokens] for spec in self.specs}
        return {spec.name: self._input(spec).packed(part) for spec, part in parts.items()}

    def _input(self, spec: TensorSpec) -> _TokenInput:
        return _TokenInput(spec, self.vocabularies.get(spec.name))

    def _by_name(self, given: Any, request: Hashable) -> Mapping[str, Any]:
        names = [spec.name for spec in self.specs]
        if not isinstance(given, Mapping) or given.keys() != set(names):
            what = f"a mapping of {list(given)}" if isinstance(given, Mapping) else type(given).__name__
            raise InputError(f"tokens of request {request!r} must be a mapping of {', '.join(names)}, not {what}.")
        return given


@dataclass(frozen=True)
class _TokenInput:
    """One input, [1, N] or [1, N, width]; vocabulary: the number of ids, None where it is not known."""

    spec: TensorSpec
    vocabulary: int | None

    @property
    def are_ids(self) -> bool:
        return len(self.spec.dims) == 2 and self._dtype.kind in "iu"

    def of_prompt(self, prompt: Any, request: Hashable) -> list[Any]:
        if self.are_ids:
            return self._checked(token_ids(prompt, request), request)
        inner, array = self.spec.dims[2:], numbers(prompt)
        if array is None or array.shape[1:] != inner or not array.ndim:
            what = type(prompt).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
            form = ", ".join(map(str, ("tokens", *inner)))
            raise InputError(f"'{self.spec.name}' of request {request!r} must be [{form}], not {what}.")
        with np.errstate(over="ignore"):
            tokens = array.astype(self._dtype)
        if (np.isinf(tokens) & np.isfinite(array)).any():
            raise InputError(f"tokens of request {request!r} are too large for {self.spec.dtype}: scale them down.")
        return list(tokens)

    def of_one(self, token: Any, request: Hashable) -> Any:
        if self.are_ids:
            return self._checked([integer(token, "token", 0)], request)[0]
        array = numbers(token)
        return self.of_prompt(token if array is None else array[None], request)[0]

    def packed(self, tokens: Sequence[list[Any]]) -> np.ndarray:
        return np.concatenate(tokens, dtype=self._dtype, casting="unsafe")[None]

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.spec.dtype, self.spec.dtype))

    def _checked(self, ids: list[int], request: Hashable) -> list[int]:
        largest = np.iinfo(self._dtype).max if self.vocabulary is None else self.vocabulary - 1
        wrong = next((token for token in ids if not 0 <= token <= largest), None)
        if wrong is not None:
            why = f"as {self.spec.dtype} '{self.spec.name}' takes them"
            if self.vocabulary is not None:
                why = f"rows of the model's table of {self.vocabulary} tokens"
            raise InputError(
                f"tokens of request {request!r} must be ids from 0 to {largest}, {why}, and {wrong} is not."
            )
        return ids
