"""Mods: conversion of Python functions to expressions.

    score_mod(score, b, h, q_idx, kv_idx, *, bias)   the score in place of scale * q . k
    mask_mod(b, h, q_idx, kv_idx, *, document)       whether row q_idx of query head h sees key kv_idx

Keyword-only parameters are captured arrays, by name.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from ..attention.expr.node import INDICES, PAIR, Expr
from ..errors import InputError
from .captured import ArraySpec, Captured, make_parameter
from .traced import Traced, cast, trace_value

Mod: TypeAlias = Callable[..., Any]
Kind = Literal["score_mod", "mask_mod"]

_POSITIONAL = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
_ORDINARY = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ModSignature:
    """The parameters of a mod: captures are the names of its keyword-only parameters without a default."""

    def __init__(self, mod: Mod) -> None:
        try:
            parameters = inspect.signature(mod).parameters.values()
        except (TypeError, ValueError) as error:
            raise InputError(
                "flex.mod_not_traceable", f"{mod!r} is not a function that can be traced: {error}."
            ) from error
        kinds = inspect.Parameter
        self.count = sum(p.kind in _ORDINARY and p.default is kinds.empty for p in parameters)
        self.max_count = sum(p.kind in _ORDINARY for p in parameters)
        if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
            self.max_count = len(INDICES)
        self.keywords = [p for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        self.captures = tuple(p.name for p in self.keywords if p.default is kinds.empty)

    def bindings(self, captures: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the captures that the mod takes."""
        return {p.name: captures[p.name] for p in self.keywords if p.name in captures}


def describe_mod(mod: Mod) -> str:
    """Return the name of a mod in errors: its name, and its file and line."""
    name = getattr(mod, "__qualname__", None) or type(mod).__name__
    code = getattr(mod, "__code__", None)
    return f"`{name}`" if code is None else f"`{name}` ({code.co_filename}:{code.co_firstlineno})"


def check_signature(mod: Mod, kind: Kind, captures: Iterable[str]) -> ModSignature:
    """Return the signature of a mod. Raises InputError if it cannot be called as one of its kind."""
    if not callable(mod):
        raise InputError(
            "flex.mod_not_callable",
            f"{kind} is {mod!r}, not a function. Write def mod({', '.join(_POSITIONAL[kind])}).",
        )
    signature, names = ModSignature(mod), _POSITIONAL[kind]
    if not signature.count <= len(names) <= signature.max_count:
        raise InputError(
            "flex.mod_signature_mismatch",
            f"{kind} {describe_mod(mod)} takes {signature.count} arguments, but a {kind} takes {len(names)}: "
            f"({', '.join(names)}), then captured arrays after a *.",
        )
    missing = [name for name in signature.captures if name not in captures]
    if missing:
        raise InputError(
            "flex.capture_missing",
            f"{kind} {describe_mod(mod)} reads the array '{missing[0]}', which is not among captures. Pass "
            f"captures={{'{missing[0]}': array}}.",
        )
    return signature


def trace_score(mod: Mod, captures: Mapping[str, ArraySpec], dtype: str) -> Expr:
    """Return the new score as an expression of INDICES, in the type of the scores: float32 or float64."""
    result = _call(mod, "score_mod", INDICES, captures, dtype)
    if result.dtype == "bool":
        raise InputError(
            "flex.score_mod_returns_bool",
            f"score_mod {describe_mod(mod)} returns a truth value. Return a score, or pass it as mask_mod.",
        )
    return cast(result, dtype).expr


def trace_mask(mod: Mod, captures: Mapping[str, ArraySpec]) -> Expr:
    """Return whether a pair is visible, as an expression of PAIR."""
    result = _call(mod, "mask_mod", PAIR, captures, "float32")
    if result.dtype != "bool":
        raise InputError(
            "flex.mask_mod_returns_number",
            f"mask_mod {describe_mod(mod)} returns a number ({result.dtype}), not a truth value. Compare it, or pass "
            "the mod as score_mod.",
        )
    return result.expr


def _call(mod: Mod, kind: Kind, names: tuple[str, ...], captures: Mapping[str, ArraySpec], dtype: str) -> Traced:
    signature = check_signature(mod, kind, captures)
    indices = [Traced(Expr("index", dtype if name == "s" else "int32", value=name)) for name in names]
    ordered = [*indices[-1:], *indices[:-1]] if kind == "score_mod" else indices  # the score comes first
    arrays = {name: make_parameter(name, captures[name]) for name in signature.bindings(captures)}
    try:
        result = mod(*ordered, **arrays)
        if isinstance(result, Captured):
            raise InputError("flex.mod_returns_array", f"it returns the whole array '{result.name}'.")
        return trace_value(result)
    except InputError as error:
        raise InputError(error.code, f"{kind} {describe_mod(mod)}{_line(mod, error)}: {error}") from error
    except RecursionError as error:
        raise InputError(
            "flex.mod_recursive", f"{kind} {describe_mod(mod)}{_line(mod, error)}: it calls itself without end."
        ) from error
    except (TypeError, AttributeError) as error:
        if not re.search("Traced|Captured", str(error)):
            raise
        message = (
            str(error)
            .replace("'Traced'", "traced value")
            .replace("'Captured'", "captured array")
            .replace("Traced", "traced value")
        )
        raise InputError(
            "flex.operation_unsupported",
            f"{kind} {describe_mod(mod)}{_line(mod, error)}: {message}. A traced value is one number: it supports "
            "only Python's operators and the functions of lowering.flex.",
        ) from error


def _line(mod: Mod, error: BaseException) -> str:
    """Return the line of the mod's own file from which the error was raised."""
    code, line, trace = getattr(mod, "__code__", None), None, error.__traceback__
    while trace is not None and code is not None:
        if trace.tb_frame.f_code.co_filename == code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f", line {line}"


class ComposedMod:
    """A mod composed of others: it takes the captures of all of them, and its own.

    compose(mods, *arguments, **own) gets the mods with their captures bound, so that it calls them by position alone.
    Arrays of the same name are one.
    """

    def __init__(self, name: str, kind: Kind, compose: Callable[..., Any], mods: tuple[Mod, ...]) -> None:
        self.compose, self.mods = compose, mods
        self.__qualname__ = f"{name}({', '.join(getattr(mod, '__qualname__', type(mod).__name__) for mod in mods)})"
        self._own, self._inner = ModSignature(compose), [ModSignature(mod) for mod in mods]
        keywords: dict[str, inspect.Parameter] = {}
        for signature in (*self._inner, self._own):
            for parameter in signature.keywords:
                if parameter.name not in keywords or parameter.default is parameter.empty:
                    keywords[parameter.name] = parameter
        positions = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _POSITIONAL[kind]]
        self.__signature__ = inspect.Signature([*positions, *keywords.values()])

    def __call__(self, *arguments: Any, **captures: Any) -> Any:
        mods = [functools.partial(mod, **inner.bindings(captures)) for mod, inner in zip(self.mods, self._inner)]
        return self.compose(mods, *arguments, **self._own.bindings(captures))
