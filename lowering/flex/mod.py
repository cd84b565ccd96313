"""Mods: from Python functions to expressions.

    score_mod(score, b, h, q_idx, kv_idx, *, bias)   the score that counts in place of scale * q . k
    mask_mod(b, h, q_idx, kv_idx, *, document)       whether row q_idx of query head h sees key kv_idx

Keyword-only parameters are captured arrays, by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from ..attention.expr.node import INDICES, PAIR, Expr
from ..errors import InputError
from .captured import ArraySpec, Captured, parameter
from .traced import Traced, cast, traced

Mod: TypeAlias = Callable[..., Any]
Kind = Literal["score_mod", "mask_mod"]

_POSITIONAL = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}
_ORDINARY = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """What a mod takes: captures are the names of its keyword-only parameters without a default."""

    def __init__(self, mod: Mod) -> None:
        try:
            parameters = inspect.signature(mod).parameters.values()
        except (TypeError, ValueError) as error:
            raise InputError(f"{mod!r} is no function that can be traced: {error}.") from error
        kinds = inspect.Parameter
        self.count = sum(p.kind in _ORDINARY and p.default is kinds.empty for p in parameters)
        self.most = sum(p.kind in _ORDINARY for p in parameters)
        if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
            self.most = len(INDICES)
        self.captures = tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty)
        self.optional = tuple(
            p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY and p.default is not kinds.empty
        )

    def given(self, captures: Mapping[str, Any]) -> dict[str, Any]:
        """Of the captures those that the mod takes."""
        return {name: captures[name] for name in (*self.captures, *self.optional) if name in captures}


def name_of(mod: Mod) -> str:
    """How errors call a mod: its name, and where it is."""
    name = getattr(mod, "__qualname__", None) or type(mod).__name__
    code = getattr(mod, "__code__", None)
    return f"`{name}`" if code is None else f"`{name}` ({code.co_filename}:{code.co_firstlineno})"


def check_signature(mod: Mod, kind: Kind, captures: Iterable[str]) -> Signature:
    """Raises InputError for a mod that cannot be called as one of its kind."""
    if not callable(mod):
        raise InputError(f"{kind} is {mod!r}, no function. Write def mod({', '.join(_POSITIONAL[kind])}).")
    signature, wanted = Signature(mod), _POSITIONAL[kind]
    if not signature.count <= len(wanted) <= signature.most:
        raise InputError(
            f"{kind} {name_of(mod)} takes {signature.count} arguments, and a {kind} takes {len(wanted)}: "
            f"({', '.join(wanted)}), then captured arrays behind a *."
        )
    missing = [name for name in signature.captures if name not in captures]
    if missing:
        raise InputError(
            f"{kind} {name_of(mod)} reads the array '{missing[0]}', which is not among captures. Pass "
            f"captures={{'{missing[0]}': array}}."
        )
    return signature


def trace_score(mod: Mod, captures: Mapping[str, ArraySpec], dtype: str) -> Expr:
    """The new score as an expression of INDICES, in the type of the scores: float32 or float64."""
    result = _call(mod, "score_mod", INDICES, captures, dtype)
    if result.dtype == "bool":
        raise InputError(f"score_mod {name_of(mod)} gives a truth value. Give a score, or pass it as mask_mod.")
    return cast(result, dtype).expr


def trace_mask(mod: Mod, captures: Mapping[str, ArraySpec]) -> Expr:
    """Whether a pair is visible, as an expression of PAIR."""
    result = _call(mod, "mask_mod", PAIR, captures, "float32")
    if result.dtype != "bool":
        raise InputError(
            f"mask_mod {name_of(mod)} gives a number ({result.dtype}), no truth value. Compare it, or pass the mod as "
            "score_mod."
        )
    return result.expr


def _call(mod: Mod, kind: Kind, names: tuple[str, ...], captures: Mapping[str, ArraySpec], dtype: str) -> Traced:
    signature = check_signature(mod, kind, captures)
    indices = [Traced(Expr("index", dtype if name == "s" else "int32", value=name)) for name in names]
    ordered = [*indices[-1:], *indices[:-1]] if kind == "score_mod" else indices  # the score comes first
    arrays = {name: parameter(name, captures[name]) for name in signature.given(captures)}
    try:
        result = mod(*ordered, **arrays)
        if isinstance(result, Captured):
            raise InputError(f"it gives the whole array '{result.name}'.")
        return traced(result)
    except InputError as error:
        raise InputError(f"{kind} {name_of(mod)}{_line(mod, error)}: {error}") from error
    except RecursionError as error:
        raise InputError(f"{kind} {name_of(mod)}{_line(mod, error)}: it calls itself without end.") from error
    except (TypeError, AttributeError) as error:
        if not re.search("Traced|Captured", str(error)):
            raise
        what = (
            str(error)
            .replace("'Traced'", "traced value")
            .replace("'Captured'", "captured array")
            .replace("Traced", "traced value")
        )
        raise InputError(
            f"{kind} {name_of(mod)}{_line(mod, error)}: {what}. A traced value is one number: it has Python's operators "
            "and the functions of lowering.flex, nothing else."
        ) from error


def _line(mod: Mod, error: BaseException) -> str:
    """In which line of the mod's own file the error came up."""
    code, found, trace = getattr(mod, "__code__", None), None, error.__traceback__
    while trace is not None and code is not None:
        if trace.tb_frame.f_code.co_filename == code.co_filename:
            found = trace.tb_lineno
        trace = trace.tb_next
    return "" if found is None else f", line {found}"


class Combined:
    """A mod made of several, which takes the captures of all of them."""

    def __init__(self, combine: Callable[..., Any], start: Any, mods: tuple[Mod, ...], kind: Kind, name: str) -> None:
        self._combine, self._start, self._mods = combine, start, mods
        signatures = [Signature(mod) for mod in mods]
        names = dict.fromkeys(name for signature in signatures for name in signature.captures)
        kinds = inspect.Parameter
        self.__qualname__ = f"{name}({', '.join(getattr(m, '__qualname__', type(m).__name__) for m in mods)})"
        self.__signature__ = inspect.Signature(
            [
                *(kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in _POSITIONAL[kind]),
                *(kinds(n, kinds.KEYWORD_ONLY) for n in names),
            ]
        )
        self._names = [(*signature.captures, *signature.optional) for signature in signatures]

    def __call__(self, *args: Any, **captures: Any) -> Any:
        result = self._start
        for mod, names in zip(self._mods, self._names):
            value = mod(*args, **{name: captures[name] for name in names if name in captures})
            result = value if result is None else self._combine(result, value)
        return True if result is None else result
