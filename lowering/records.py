"""Records: dataclasses that JSON stores, and that are read again by the declared types of their fields."""

from __future__ import annotations

import dataclasses
import json
import types
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import Self

_NAMES = {dict: "an object", list: "a list", int: "a whole number", str: "a string", type(None): "null"}


class Record:
    """Base of dataclasses that are the value of a function's attribute, or another text."""

    def to_json(self) -> str:
        """Return the JSON text of the record."""
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record of a text that `to_json` wrote.

        Raises:
            ValueError: The text is another one.
        """
        return decode(cls, json.loads(text), cls.__name__)


def encode(value: Any) -> Any:
    """Return plain data of which `decode` makes the value again: by its `to_data`, or by the fields of a dataclass."""
    if hasattr(value, "to_data"):
        return value.to_data()
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    return value


def decode(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as a value of the type `kind`.

    Args:
        kind: int, float, str, None, a literal, a class with `from_data`, a dataclass, or a tuple, dictionary or union
            of them.
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
    if origin is Literal:
        if data not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(map(repr, get_args(kind)))}, not {str(data)[:40]!r}")
        return data
    if hasattr(kind, "from_data"):
        return _decode_by_class(kind, data, where)
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


def _decode_by_class(kind: Any, data: Any, where: str) -> Any:
    try:
        return kind.from_data(data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} is not {kind.__name__}") from error


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
