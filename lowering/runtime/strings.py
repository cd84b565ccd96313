"""Strings are numbers inside: equal strings have equal codes, and that is all the compiled code uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError


class Dictionary:
    """The strings of one call: the model's constants, with the codes it was compiled with, then those of the inputs."""

    def __init__(self, constants: Sequence[str]) -> None:
        self._strings = list(constants)
        self._codes = {text: code for code, text in enumerate(constants)}

    def encode(self, array: np.ndarray, where: str) -> np.ndarray:
        """int32 codes of an array of strings, which messages call `where`. Raises InputError for other elements."""
        kind = next((type(x) for x in array.flat if not isinstance(x, str)), str)
        if kind is not str:
            raise InputError(f"{where} must hold nothing but str, not {kind.__name__}.")
        codes = (self._code(str(text)) for text in array.flat)
        return np.fromiter(codes, np.int32, array.size).reshape(array.shape)

    def _code(self, text: str) -> int:
        code = self._codes.setdefault(text, len(self._strings))
        if code == len(self._strings):
            self._strings.append(text)
        return code

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The strings, as an array of dtype object."""
        array = np.empty(codes.shape, object)
        array[...] = np.array(self._strings, object)[codes]
        return array
