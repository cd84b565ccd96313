"""What callers pass, as plain Python and NumPy values: each of another kind is an InputError."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import InputError

_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def unhashable(name: Any) -> InputError:
    return InputError(f"the name of a request must be hashable, and {name!r} is not.")


def is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def integer(value: Any, what: str, least: int) -> int:
    if not is_integer(value) or (number := operator.index(value)) < least:
        raise InputError(f"{what} must be an integer of at least {least}, not {value!r}.")
    return number


def token_ids(tokens: Any, request: Hashable) -> list[int]:
    try:
        # numbers of Python compare and hash faster than NumPy's
        return [operator.index(i) for i in (tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)]
    except (TypeError, ValueError, RuntimeError):  # the latter are of other libraries' arrays
        raise InputError(f"tokens of request {request!r} must be a sequence of integers, not {tokens!r}.") from None


def numbers(values: Any) -> np.ndarray | None:
    """Return the array of numbers that NumPy makes of these; None for values that are none, or that a mask hides."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # rows of several lengths, and arrays that NumPy cannot read
        return None
    is_number = array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"
    return array if is_number and not isinstance(values, np.ma.MaskedArray) else None


def listed(requests: Iterable[Any]) -> list[Any]:
    if isinstance(requests, str | bytes) or not isinstance(requests, Iterable):
        raise InputError(f"requests must be a list of names, not {requests!r}.")
    return list(requests)


def cache_dtype(dtype: Any) -> Any:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}, not {name}.")
    return _DTYPES[name]
