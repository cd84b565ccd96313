"""Convert callers' values to plain Python and NumPy values; values of other types raise InputError."""

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


def make_unhashable_error(name: Any) -> InputError:
    return InputError("batcher.name_unhashable", f"the name of a request must be hashable, and {name!r} is not.")


def is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_integer(value: Any, what: str, minimum: int) -> int:
    if not is_integer(value) or (number := operator.index(value)) < minimum:
        raise InputError("argument.integer_invalid", f"{what} must be an integer of at least {minimum}, not {value!r}.")
    return number


def read_token_ids(tokens: Any, request: Hashable) -> list[int]:
    try:
        # Python integers compare and hash faster than NumPy integers
        return [operator.index(i) for i in (tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError is raised by arrays of other libraries
        raise InputError(
            "batcher.token_ids_invalid",
            f"tokens of request {request!r} must be a sequence of integers, not {tokens!r}.",
        ) from None


def read_numbers(values: Any) -> np.ndarray | None:
    """Return the values as a NumPy array of numbers, or None if they are not numbers or a masked array."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or arrays that NumPy cannot read
        return None
    is_number = array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"
    return array if is_number and not isinstance(values, np.ma.MaskedArray) else None


def read_request_names(requests: Iterable[Any]) -> list[Any]:
    if isinstance(requests, str | bytes) or not isinstance(requests, Iterable):
        raise InputError("batcher.names_not_a_list", f"requests must be a list of names, not {requests!r}.")
    return list(requests)


def read_cache_dtype(dtype: Any) -> Any:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise InputError("batcher.dtype_unsupported", f"dtype must be one of {', '.join(_DTYPES)}, not {name}.")
    return _DTYPES[name]
