"""Single arguments of a call: an array of a type and a shape, a number, a flag, a name; anything else is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from ...errors import InputError

INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
FLOAT32 = (np.dtype(np.float32),)

Extent = int | str  # of an axis: a number, or a name for what may be any


class ArgumentError(InputError, ValueError):
    """An argument of a function is illegal, by itself or beside the others. Nothing was written."""


def refuse(problem: str, remedy: str) -> NoReturn:
    raise ArgumentError(f"{problem}: {remedy}.")


def array(name: str, value: Any, dtypes: Collection[np.dtype]) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        given = "missing" if value is None else f"of type {type(value).__name__}"
        refuse(f"{name} is {given}", f"give a NumPy array of {_listed(dtypes)}")
    if value.dtype not in dtypes:
        refuse(f"{name} is an array of {value.dtype}", f"make it {_listed(dtypes)}")
    return value


def shaped(name: str, value: Any, dtypes: Collection[np.dtype], shape: Sequence[Extent], why: str = "") -> np.ndarray:
    """The array, which has one of the types and this shape. why says what the shape follows from."""
    found = array(name, value, dtypes)
    if found.ndim != len(shape) or any(
        type(wanted) is int and wanted != size for wanted, size in zip(shape, found.shape)
    ):
        refuse(f"{name} has the shape {_shape(found.shape)}", f"make it {_shape(shape)}{why and ', ' + why}")
    return found


def integer(name: str, value: Any, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        given = "missing" if value is None else repr(value)
        refuse(f"{name} is {given}", "give an integer" + ("" if least is None else f" of at least {least}"))
    return number


def number(name: str, value: Any, least: float = -math.inf, above: float = -math.inf) -> float:
    """A finite number of at least `least`, and greater than `above`."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, str) or not (math.isfinite(found) and found >= least and found > above):
        limit = "" if least == -math.inf else f" of at least {least:g}"
        if above > -math.inf:
            limit = f" greater than {above:g}"
        refuse(f"{name} is {value!r}", f"give a finite number{limit}")
    return found


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if not isinstance(value, (np.bool_, int, np.integer)) or value not in (0, 1):
        refuse(f"{name} is {value!r}", "make it True or False")
    return bool(value)


def member(name: str, value: Any, names: Sequence[str]) -> str:
    """The name of a member of an enumeration, which is given by that or by its number."""
    if isinstance(value, str):
        if value in names:
            return value
    elif isinstance(value, (int, np.integer)) and 0 <= value < len(names):
        return names[int(value)]
    known = ", ".join(f"{known} ({k})" for k, known in enumerate(names))
    refuse(f"{name} is {value!r}, which is none of its values", f"use one of {known}")


def int64(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64)


def outside(values: np.ndarray, count: int) -> np.ndarray:
    """Where values, int32 or int64, are not from 0 to count - 1."""
    unsigned: Any = np.uint32 if values.dtype.itemsize == 4 else np.uint64
    return np.asarray(values.view(unsigned) >= count)  # what is negative is large then


def first(wrong: np.ndarray) -> int:
    """The first place where it is so, of a bool array of one axis."""
    return int(np.argmax(wrong))


def _listed(dtypes: Collection[np.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _shape(shape: Sequence[Extent]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
