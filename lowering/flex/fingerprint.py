"""Whether a mod is what it was when it was traced, without tracing it again.

What a function does depends on its code, its defaults, and what its closure and the global names that it uses hold.
Where all of that is numbers, text, modules and functions of the same kind, it can be compared. Modules count as
constant.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .mod import Composed

_PLAIN = (int, float, bool, str, bytes, type(None), np.generic)
_CONSTANT = (ModuleType, BuiltinFunctionType, type, np.ufunc)
_DEPTH = 8


def fingerprint(mod: Any) -> tuple[Any, ...] | None:
    """Hashable, and equal for mods that trace alike; None where that cannot be told. It keeps alive what it names."""
    found: list[Any] = []
    return tuple(found) if _add(mod, found, _DEPTH) else None


def _add(value: Any, found: list[Any], depth: int) -> bool:
    if isinstance(value, _PLAIN):
        found += (type(value), value)
        return True
    if isinstance(value, FunctionType):
        return depth > 0 and _add_function(value, found, depth - 1)
    if isinstance(value, _CONSTANT):
        found.append(value)
        return True
    if isinstance(value, Composed):
        found += (Composed, len(value.mods))
        return depth > 0 and all(_add(part, found, depth - 1) for part in (value.compose, *value.mods))
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *(x for pair in sorted(value.keywords.items()) for x in pair))
        found.append(len(parts))
        return depth > 0 and all(_add(part, found, depth - 1) for part in parts)
    if isinstance(value, tuple):
        found += (tuple, len(value))
        return depth > 0 and all(_add(part, found, depth - 1) for part in value)
    return False


def _add_function(function: FunctionType, found: list[Any], depth: int) -> bool:
    found.append(_Same(function.__code__))
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return False
        if content is not function and not _add(content, found, depth):
            return False
    held = function.__globals__
    for name in _global_names(function.__code__):
        if name in held and held[name] is not function and not _add(held[name], found, depth):
            return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not defaults or _add(defaults, found, depth)


class _Same:
    """A code object by identity: comparing what it holds would take longer."""

    __slots__ = ("code",)

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.code is other.code


@functools.lru_cache(maxsize=1024)
def _names_of(code: _Same) -> tuple[str, ...]:
    inner = [part for part in code.code.co_consts if isinstance(part, CodeType)]
    return tuple(dict.fromkeys((*code.code.co_names, *(n for part in inner for n in _names_of(_Same(part))))))


def _global_names(code: CodeType) -> tuple[str, ...]:
    return _names_of(_Same(code))
