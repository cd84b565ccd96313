"""Fingerprints of mods: whether a mod is unchanged since it was traced, without tracing it again.

The behavior of a function depends on its code, its defaults and attributes, and the values of its closure and of the
global names that it uses. If all of these are numbers, text, libraries and functions of the same kind, they can be
compared. If any other value is used, such as a list, an object or a class of the caller's, they cannot be compared.
Libraries are constant.
"""

from __future__ import annotations

import dis
import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from . import vocabulary
from .mod import ComposedMod

_PLAIN = frozenset((int, bool, str, bytes, type(None)))
_LIBRARIES = frozenset(("builtins", "lowering", "math", "ml_dtypes", "numpy", "operator", "torch", "typing"))
_OPAQUE_BUILTINS = frozenset(
    ("__import__", "eval", "exec", "getattr", "globals", "id", "input", "locals", "next", "open", "vars")
)
"""Builtins by which a function depends on values that its names do not show."""
_MAX_DEPTH = 8
_MAX_CODE_OBJECTS = 4096


def fingerprint(mod: Any) -> tuple[Any, ...] | None:
    """Return a hashable value that is equal for mods that trace alike; None if that cannot be decided.

    It keeps the objects that it references alive.
    """
    entries: list[Any] = []
    return tuple(entries) if _append_value(mod, (), entries, _MAX_DEPTH) else None


def _append_value(value: Any, names: tuple[str, ...], entries: list[Any], depth: int) -> bool:
    """Append the entries of a value used by a function with these names; return False if they are incomplete."""
    kind = type(value)
    if kind in _PLAIN:
        entries += (kind, value)
        return True
    if kind is float:
        entries += (kind, value or str(value))  # -0.0 == 0.0
        return True
    if kind is FunctionType:
        return depth > 0 and _append_function(value, entries, depth - 1)
    if kind is ModuleType:
        return depth > 0 and _append_module(value, names, entries, depth - 1)
    if isinstance(value, np.generic):
        entries += (kind, value.dtype, value.tobytes())
        return kind is not np.object_
    if isinstance(value, (type, np.ufunc, BuiltinFunctionType)):
        entries.append(value)
        return _is_of_library(value)
    if depth > 0 and isinstance(value, ComposedMod):
        entries += (kind, len(value.mods))
        return all(_append_value(member, (), entries, depth - 1) for member in (value.compose, *value.mods))
    if depth > 0 and kind is functools.partial:
        keywords = sorted(value.keywords.items())
        entries += (kind, len(value.args), tuple([name for name, _ in keywords]))
        return all(
            _append_value(member, (), entries, depth - 1)
            for member in (value.func, *value.args, *(x for _, x in keywords))
        )
    if depth > 0 and kind is tuple:
        entries += (kind, len(value))
        return all(_append_value(member, names, entries, depth - 1) for member in value)
    return False


def _append_function(function: FunctionType, entries: list[Any], depth: int) -> bool:
    module_globals, code, cells = function.__globals__, function.__code__, function.__closure__
    entries.append(_Identity(code))
    if module_globals is vocabulary.__dict__ and not cells:
        return True
    names = _find_names(code)
    if names is None:
        return False
    for cell in cells or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return False
        if content is not function and not _append_value(content, names, entries, depth):
            return False
    for name in names:
        if (
            name in module_globals
            and (value := module_globals[name]) is not function
            and not _append_value(value, names, entries, depth)
        ):
            return False
    attributes = {**(function.__kwdefaults__ or {}), **function.__dict__}
    signature = attributes.pop("__signature__", None)
    entries += (_Identity(signature), tuple(attributes))
    return _append_value((*(function.__defaults__ or ()), *attributes.values()), names, entries, depth)


def _append_module(module: ModuleType, names: tuple[str, ...], entries: list[Any], depth: int) -> bool:
    """Append the entries of a module: for one of the caller's, those of the attributes that the function names."""
    entries.append(module)
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return True
    members = vars(module)
    return all(_append_value(members[name], names, entries, depth) for name in names if name in members)


def _is_of_library(value: Any) -> bool:
    """Return whether a class or a builtin function always behaves the same."""
    if isinstance(value, BuiltinFunctionType):  # may be the method of an object
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, np.ufunc) or value.__module__.partition(".")[0] in _LIBRARIES


class _Identity:
    """An object compared by identity: comparing the contents of a code object would take longer."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


_code_names: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}
"""By the ids of code objects, which live as long as they are in this dictionary."""


def _find_names(code: CodeType) -> tuple[str, ...] | None:
    """Return the names of globals and attributes that code uses; None if it can reach more than it names."""
    cached = _code_names.get(id(code))
    if cached is None:
        if len(_code_names) >= _MAX_CODE_OBJECTS:
            _code_names.clear()
        cached = _code_names[id(code)] = code, _collect_names(code)
    return cached[1]


def _collect_names(code: CodeType) -> tuple[str, ...] | None:
    imported = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "IMPORT_NAME"]
    inner = [_collect_names(member) for member in code.co_consts if isinstance(member, CodeType)]
    if any(name.partition(".")[0] not in _LIBRARIES for name in imported) or not _OPAQUE_BUILTINS.isdisjoint(
        code.co_names
    ):
        return None
    names = dict.fromkeys(code.co_names)
    for member in inner:
        if member is None:
            return None
        names |= dict.fromkeys(member)
    return tuple(names)
