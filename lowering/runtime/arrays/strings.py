"""Strings as integer ids in compiled code: equal strings have equal ids, and only ids are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import InputError


class StringTable:
    """The strings of one call: the model's constants with their compiled ids, then those of the inputs."""

    def __init__(self, constants: Sequence[str]) -> None:
        self._strings = list(constants)
        self._ids = {text: number for number, text in enumerate(constants)}

    def encode(self, array: np.ndarray, where: str) -> np.ndarray:
        """Return the int32 ids of an array of strings, which messages name by `where`.

        Raises InputError for other elements.
        """
        element_type = next((type(x) for x in array.flat if not isinstance(x, str)), str)
        if element_type is not str:
            raise InputError(
                "input.element_type_unsupported", f"{where} must contain only str, not {element_type.__name__}."
            )
        ids = (self._intern(str(text)) for text in array.flat)
        return np.fromiter(ids, np.int32, array.size).reshape(array.shape)

    def _intern(self, text: str) -> int:
        number = self._ids.setdefault(text, len(self._strings))
        if number == len(self._strings):
            self._strings.append(text)
        return number

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Return the strings as an array of dtype object."""
        array = np.empty(ids.shape, object)
        array[...] = np.array(self._strings, object)[ids]
        return array
