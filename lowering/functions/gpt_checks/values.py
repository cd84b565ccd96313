"""Checks of single arguments of a call: an array of a type and a shape, a number, a flag, a name."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from ...errors import InputError

INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
FLOAT32 = (np.dtype(np.float32),)

Extent = int | str  # of an axis: a number, or a name for any number


class ArgumentError(InputError, ValueError):
    """An illegal argument of a function, by itself or in combination with others. Nothing was written."""


def refuse(code: str, problem: str, remedy: str) -> NoReturn:
    raise ArgumentError(code, f"{problem}: {remedy}.")


def check_array(name: str, value: Any, dtypes: Collection[np.dtype]) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        actual = "missing" if value is None else f"of type {type(value).__name__}"
        refuse("gpt_attention.array_required", f"{name} is {actual}", f"give a NumPy array of {_list_dtypes(dtypes)}")
    if value.dtype not in dtypes:
        refuse(
            "gpt_attention.dtype_unsupported", f"{name} is an array of {value.dtype}", f"make it {_list_dtypes(dtypes)}"
        )
    return value


def check_shape(
    name: str, value: Any, dtypes: Collection[np.dtype], shape: Sequence[Extent], reason: str = ""
) -> np.ndarray:
    """Return the array, which has one of the types and this shape; `reason` says what the shape follows from."""
    checked = check_array(name, value, dtypes)
    if checked.ndim != len(shape) or any(
        type(expected) is int and expected != size for expected, size in zip(shape, checked.shape)
    ):
        refuse(
            "gpt_attention.shape_mismatch",
            f"{name} has the shape {_format_shape(checked.shape)}",
            f"make it {_format_shape(shape)}{reason and ', ' + reason}",
        )
    return checked


def check_integer(name: str, value: Any, minimum: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum):
        actual = "missing" if value is None else repr(value)
        refuse(
            "gpt_attention.integer_invalid",
            f"{name} is {actual}",
            "give an integer" + ("" if minimum is None else f" of at least {minimum}"),
        )
    return number


def check_number(name: str, value: Any, minimum: float = -math.inf, above: float = -math.inf) -> float:
    """Return a finite number of at least `minimum`, and greater than `above`."""
    try:
        checked = float(value)
    except (TypeError, ValueError):
        checked = math.nan
    if isinstance(value, str) or not (math.isfinite(checked) and checked >= minimum and checked > above):
        limit = "" if minimum == -math.inf else f" of at least {minimum:g}"
        if above > -math.inf:
            limit = f" greater than {above:g}"
        refuse("gpt_attention.number_invalid", f"{name} is {value!r}", f"give a finite number{limit}")
    return checked


def check_flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if not isinstance(value, (np.bool_, int, np.integer)) or value not in (0, 1):
        refuse("gpt_attention.flag_invalid", f"{name} is {value!r}", "make it True or False")
    return bool(value)


def check_member(name: str, value: Any, names: Sequence[str]) -> str:
    """Return the name of a member of an enumeration, which is given by its name or number."""
    if isinstance(value, str):
        if value in names:
            return value
    elif isinstance(value, (int, np.integer)) and 0 <= value < len(names):
        return names[int(value)]
    listed = ", ".join(f"{listed} ({k})" for k, listed in enumerate(names))
    refuse("gpt_attention.name_unknown", f"{name} is {value!r}, which is not one of its values", f"use one of {listed}")


def find_first(wrong: np.ndarray) -> int:
    """Return the first index where a bool array of one axis is true."""
    return int(np.argmax(wrong))


def _list_dtypes(dtypes: Collection[np.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _format_shape(shape: Sequence[Extent]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
