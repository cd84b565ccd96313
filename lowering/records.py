"""Decoder of plain data, such as JSON, into records (dataclasses) whose fields have their declared types."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

_NAMES = {dict: "an object", list: "a list", int: "a whole number", str: "a string", type(None): "null"}


def decode(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as a value of the type `kind`.

    Args:
        kind: int, float, str, None, a dataclass, or a tuple, dictionary or union of them.
        data: Plain data.
        where: The name of the data in messages.

    Raises:
        ValueError: The data has another form, such as a missing or unknown field, or a string that is not legal
            Unicode. The text names the location.
    """
    origin = get_origin(kind)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, where)
    if origin is dict:
        (_, value) = get_args(kind)
        _demand(isinstance(data, dict), dict, data, where)
        return {decode(str, k, where): decode(value, v, f"{where}.{k}") for k, v in data.items()}
    if origin in (Union, types.UnionType):
        return _decode_one_of(get_args(kind), data, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _demand(isinstance(data, dict), dict, data, where)
        fields = _fields(kind)
        for name in [*(n for n in fields if n not in data), *(n for n in data if n not in fields)]:
            raise ValueError(f"{where} {'lacks' if name in fields else 'has the unknown'} field '{name}'")
        return kind(**{name: decode(fields[name], data[name], f"{where}.{name}") for name in fields})
    _demand(type(data) is kind or (kind is float and type(data) is int), kind, data, where)
    if kind is str:
        data.encode()  # half a surrogate pair is legal JSON, and a UnicodeEncodeError, which is a ValueError
    return data


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_tuple(kinds: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _demand(isinstance(data, list), list, data, where)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(data)
    if len(kinds) != len(data):
        raise ValueError(f"{where} has {len(data)} entries, not {len(kinds)}")
    return tuple(decode(kind, entry, f"{where}[{k}]") for k, (kind, entry) in enumerate(zip(kinds, data)))


def _decode_one_of(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    error = None
    for kind in kinds:
        try:
            return decode(kind, data, where)
        except ValueError as first:
            error = error or first
    raise error or ValueError(where)


def _demand(condition: bool, kind: Any, data: Any, where: str) -> None:
    if not condition:
        expected = _NAMES.get(kind, f"a {kind.__name__}")
        raise ValueError(f"{where} must be {expected}, not {str(data)[:40]!r}")
