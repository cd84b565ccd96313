"""Whether a mod is what it was when it was traced, without tracing it again.

What a function does depends on its code, its defaults and attributes, and what its closure and the global names that it
uses hold. Where all of that is numbers, text, libraries and functions of the same kind, it can be compared; where
anything else takes part, such as a list, an object or a class of the caller's, nobody can tell. Libraries are constant.
"""

from __future__ import annotations

import dis
import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from . import vocabulary
from .mod import Combined

_PLAIN = frozenset((int, bool, str, bytes, type(None)))
_LIBRARIES = frozenset(("builtins", "lowering", "math", "ml_dtypes", "numpy", "operator", "torch", "typing"))
_UNSEEN = frozenset(
    ("__import__", "eval", "exec", "getattr", "globals", "id", "input", "locals", "next", "open", "vars")
)
"""Builtins by which a function depends on what its names do not tell."""
_DEPTH = 8
_KNOWN_CODES = 4096


def fingerprint(mod: Any) -> tuple[Any, ...] | None:
    """Hashable, and equal for mods that trace alike; None where that cannot be told. It keeps alive what it names."""
    found: list[Any] = []
    return tuple(found) if _add(mod, (), found, _DEPTH) else None


def _add(value: Any, names: tuple[str, ...], found: list[Any], depth: int) -> bool:
    """Adds what a value tells to a function that uses these names; False where it does not tell all."""
    kind = type(value)
    if kind in _PLAIN:
        found += (kind, value)
        return True
    if kind is float:
        found += (kind, value or str(value))  # -0.0 == 0.0
        return True
    if kind is FunctionType:
        return depth > 0 and _add_function(value, found, depth - 1)
    if kind is ModuleType:
        return depth > 0 and _add_module(value, names, found, depth - 1)
    if isinstance(value, np.generic):
        found += (kind, value.dtype, value.tobytes())
        return kind is not np.object_
    if isinstance(value, (type, np.ufunc, BuiltinFunctionType)):
        found.append(value)
        return _is_of_library(value)
    if depth > 0 and isinstance(value, Combined):
        found += (kind, len(value._mods))
        return all(_add(part, (), found, depth - 1) for part in (value._combine, value._start, *value._mods))
    if depth > 0 and kind is functools.partial:
        given = sorted(value.keywords.items())
        found += (kind, len(value.args), tuple([name for name, _ in given]))
        return all(_add(part, (), found, depth - 1) for part in (value.func, *value.args, *(x for _, x in given)))
    if depth > 0 and kind is tuple:
        found += (kind, len(value))
        return all(_add(part, names, found, depth - 1) for part in value)
    return False


def _add_function(function: FunctionType, found: list[Any], depth: int) -> bool:
    held, code, cells = function.__globals__, function.__code__, function.__closure__
    found.append(_Same(code))
    if held is vocabulary.__dict__ and not cells:
        return True
    names = _names_of(code)
    if names is None:
        return False
    for cell in cells or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return False
        if content is not function and not _add(content, names, found, depth):
            return False
    for name in names:
        if name in held and (value := held[name]) is not function and not _add(value, names, found, depth):
            return False
    more = {**(function.__kwdefaults__ or {}), **function.__dict__}
    signature = more.pop("__signature__", None)
    found += (_Same(signature), tuple(more))
    return _add((*(function.__defaults__ or ()), *more.values()), names, found, depth)


def _add_module(module: ModuleType, names: tuple[str, ...], found: list[Any], depth: int) -> bool:
    """Of a module of the caller's what the function names."""
    found.append(module)
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return True
    held = vars(module)
    return all(_add(held[name], names, found, depth) for name in names if name in held)


def _is_of_library(value: Any) -> bool:
    """Whether a class or a builtin function does always the same."""
    if isinstance(value, BuiltinFunctionType):  # may be the method of an object
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, np.ufunc) or value.__module__.partition(".")[0] in _LIBRARIES


class _Same:
    """An object by identity: comparing what a code object holds would take longer."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


_names: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}
"""By the ids of code objects, which live as long as they are in here."""


def _names_of(code: CodeType) -> tuple[str, ...] | None:
    """The names of globals and attributes that it uses; None if it can reach more than it names."""
    known = _names.get(id(code))
    if known is None:
        if len(_names) >= _KNOWN_CODES:
            _names.clear()
        known = _names[id(code)] = code, _names_in(code)
    return known[1]


def _names_in(code: CodeType) -> tuple[str, ...] | None:
    imported = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    inner = [_names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    if any(name.partition(".")[0] not in _LIBRARIES for name in imported) or not _UNSEEN.isdisjoint(code.co_names):
        return None
    names = dict.fromkeys(code.co_names)
    for part in inner:
        if part is None:
            return None
        names |= dict.fromkeys(part)
    return tuple(names)
