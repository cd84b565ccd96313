"""Operators that read or make strings: StringConcat, StringSplit, RegexFullMatch and StringNormalizer.

The compiled code has a number for each string, which tells whether strings are equal, and nothing else. So letters are
those of constants, which are computed with when the model is compiled. Of strings of the run StringNormalizer can take
out whole ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from ..errors import NodeError
from ..importing import symbolic
from ..importing.node import Node
from ..importing.values import Value
from . import op
from .kernels import compute
from .reshape import reshape_to
from .selection import non_zero

_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@op("StringConcat", since=20)
def string_concat(node: Node, x: Value, y: Value) -> Value:
    texts, ends = _letters(node, "X", x), _letters(node, "Y", y)
    try:
        texts, ends = np.broadcast_arrays(texts, ends)
    except ValueError:
        raise node.error(f"inputs X {list(x.shape)} and Y {list(y.shape)} do not broadcast.") from None
    return node.constant(_mapped(str.__add__, texts, ends))


@op("StringSplit", since=20)
def string_split(node: Node, x: Value) -> tuple[Value, Value]:
    """The parts of each string, followed by empty strings where others have more, and how many they are."""
    texts, limit = _letters(node, "X", x), node.attr("maxsplit", None)
    parts = [text.split(node.attr("delimiter", "") or None, -1 if limit is None else limit) for text in texts.flat]
    counts = np.array([len(row) for row in parts], np.int64).reshape(texts.shape)
    made = np.full((len(parts), counts.max(initial=0)), "", object)
    for row, found in zip(made, parts):
        row[: len(found)] = found
    return node.constant(made.reshape(*texts.shape, made.shape[1])), node.constant(counts)


@op("RegexFullMatch", since=20)
def regex_full_match(node: Node, x: Value) -> Value:
    pattern = node.attr("pattern", "")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise node.error(f"attribute pattern is '{pattern}', which is not a regular expression: {error}.") from None
    texts = _letters(node, "X", x)
    return node.constant(np.array([compiled.fullmatch(text) is not None for text in texts.flat]).reshape(texts.shape))


@op("StringNormalizer", since=10)
def string_normalizer(node: Node, x: Value) -> Value:
    """The strings [C] or [1, C] without stop words, in another case; one empty string where none is left."""
    action, stopwords = node.attr("case_change_action", "NONE"), node.attr("stopwords", [])
    if action not in _CASES:
        raise node.error(f"attribute case_change_action is '{action}'.", f"Use one of {', '.join(_CASES)}.")
    if x.rank not in (1, 2) or (x.rank == 2 and x.shape[0] != 1):
        raise node.error(f"input X is {list(x.shape)}.", "Make it [C] or [1, C].")
    by_letters = bool(stopwords) and not node.attr("is_case_sensitive", 0)
    if x.constant is None and action == "NONE" and not by_letters:
        return _without(node, x, stopwords)
    if x.constant is None:
        what = f"case_change_action {action}" if action != "NONE" else "stopwords without is_case_sensitive"
        raise _of_run(node, f"X, whose letters {what} needs,")
    change: Callable[[str], str] = str.lower if by_letters else str
    removed = {change(word) for word in stopwords}
    kept = [_CASES[action](text) for text in x.constant.flat if change(text) not in removed] or [""]
    return node.constant(np.array(kept, object).reshape((1,) * (x.rank - 1) + (-1,)))


def _without(node: Node, x: Value, stopwords: list[str]) -> Value:
    """Return strings of the run without some."""
    texts = reshape_to(node, x, (x.shape[-1],))
    codes = node.string_codes(np.array(stopwords, object)).tolist()

    def is_kept(index: Any, x: Any) -> Any:
        return tirx.all(tirx.const(True, "bool"), *(x(*index) != tirx.const(code, "int32") for code in codes))

    places = non_zero(node, compute(node, "is_kept", is_kept, [texts], texts.shape, dtype="bool"))
    count = places.shape[1]
    nothing = tirx.const(node.string_codes(np.array([""], object)).tolist()[0], "int32")

    def element(index: Any, x: Any, at: Any, count: Any) -> Any:
        return tirx.if_then_else(index[0] < count, x(at(0, index[0])), nothing)

    shape = (node.simplify(symbolic.maximum(count, 1)),)
    kept = compute(node, "kept", element, [texts, places], shape, [count])
    return reshape_to(node, kept, (1,) * (x.rank - 1) + shape)


def _mapped(function: Callable[..., str], *texts: np.ndarray) -> np.ndarray:
    made = np.empty(texts[0].shape, object)
    made.reshape(-1)[:] = [function(*each) for each in zip(*(array.flat for array in texts))]
    return made


def _letters(node: Node, name: str, value: Value) -> np.ndarray:
    """Return the strings of a constant. Raises NodeError for others."""
    if value.constant is None:
        raise _of_run(node, name)
    return value.constant


def _of_run(node: Node, name: str) -> NodeError:
    return node.error(
        f"input {name} is known to the run only, and compiled code tells of strings only whether they are equal.",
        "Make it a constant, or compute it before the model.",
    )
