"""Operators that read or make strings: StringConcat, StringSplit, RegexFullMatch and StringNormalizer.

The compiled code has an id for each string, which tells only whether strings are equal. So only constant strings have
letters, which are processed at compile time. Of strings that are dynamic, StringNormalizer can remove whole ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from ...errors import NodeError
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers import symbolic
from ..helpers.kernels import compute
from ..helpers.requirements import require_choice
from ..tensor.reshape import reshape_to
from ..tensor.selection import non_zero

_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@op("StringConcat", since=20)
def string_concat(node: Node, x: Value, y: Value) -> Value:
    texts, ends = _read_strings(node, "X", x), _read_strings(node, "Y", y)
    try:
        texts, ends = np.broadcast_arrays(texts, ends)
    except ValueError:
        raise node.error(
            "node.shapes_not_broadcastable", f"inputs X {list(x.shape)} and Y {list(y.shape)} do not broadcast."
        ) from None
    return node.constant(_map_strings(str.__add__, texts, ends))


@op("StringSplit", since=20)
def string_split(node: Node, x: Value) -> tuple[Value, Value]:
    """Return the substrings of each string, padded with empty strings, and their numbers."""
    texts, limit = _read_strings(node, "X", x), node.attr("maxsplit", None)
    substrings = [text.split(node.attr("delimiter", "") or None, -1 if limit is None else limit) for text in texts.flat]
    counts = np.array([len(row) for row in substrings], np.int64).reshape(texts.shape)
    padded = np.full((len(substrings), counts.max(initial=0)), "", object)
    for row, row_substrings in zip(padded, substrings):
        row[: len(row_substrings)] = row_substrings
    return node.constant(padded.reshape(*texts.shape, padded.shape[1])), node.constant(counts)


@op("RegexFullMatch", since=20)
def regex_full_match(node: Node, x: Value) -> Value:
    pattern = node.attr("pattern", "")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise node.error(
            "regex_full_match.pattern_invalid",
            f"attribute pattern is '{pattern}', which is not a regular expression: {error}.",
        ) from None
    texts = _read_strings(node, "X", x)
    return node.constant(np.array([compiled.fullmatch(text) is not None for text in texts.flat]).reshape(texts.shape))


@op("StringNormalizer", since=10)
def string_normalizer(node: Node, x: Value) -> Value:
    """Return the strings [C] or [1, C] without stop words, in another case; if none remain, one empty string."""
    action, stopwords = node.attr("case_change_action", "NONE"), node.attr("stopwords", [])
    require_choice(node, "case_change_action", action, _CASES, code="string_normalizer.case_unsupported")
    if x.rank not in (1, 2) or (x.rank == 2 and x.shape[0] != 1):
        raise node.error(
            "string_normalizer.shape_unsupported",
            f"input X has the shape {list(x.shape)}.",
            "Give it the shape [C] or [1, C].",
        )
    by_letters = bool(stopwords) and not node.attr("is_case_sensitive", 0)
    if x.constant is None and action == "NONE" and not by_letters:
        return _remove_stopwords(node, x, stopwords)
    if x.constant is None:
        requirement = f"case_change_action {action}" if action != "NONE" else "stopwords without is_case_sensitive"
        raise _make_runtime_error(node, f"X, whose letters {requirement} needs,")
    change: Callable[[str], str] = str.lower if by_letters else str
    removed = {change(word) for word in stopwords}
    remaining = [_CASES[action](text) for text in x.constant.flat if change(text) not in removed] or [""]
    return node.constant(np.array(remaining, object).reshape((1,) * (x.rank - 1) + (-1,)))


def _remove_stopwords(node: Node, x: Value, stopwords: list[str]) -> Value:
    """Return dynamic strings without the stop words."""
    texts = reshape_to(node, x, (x.shape[-1],))
    stopword_ids = node.encode_strings(np.array(stopwords, object)).tolist()

    def remains(index: Any, x: Any) -> Any:
        return tirx.all(
            tirx.const(True, "bool"), *(x(*index) != tirx.const(stopword_id, "int32") for stopword_id in stopword_ids)
        )

    indices = non_zero(node, compute(node, "is_kept", remains, [texts], texts.shape, dtype="bool"))
    count = indices.shape[1]
    empty_id = tirx.const(node.encode_strings(np.array([""], object)).tolist()[0], "int32")

    def element(index: Any, x: Any, position: Any, count: Any) -> Any:
        return tirx.if_then_else(index[0] < count, x(position(0, index[0])), empty_id)

    shape = (node.simplify(symbolic.maximum(count, 1)),)
    remaining = compute(node, "kept", element, [texts, indices], shape, [count])
    return reshape_to(node, remaining, (1,) * (x.rank - 1) + shape)


def _map_strings(function: Callable[..., str], *texts: np.ndarray) -> np.ndarray:
    result = np.empty(texts[0].shape, object)
    result.reshape(-1)[:] = [function(*strings) for strings in zip(*(array.flat for array in texts))]
    return result


def _read_strings(node: Node, name: str, value: Value) -> np.ndarray:
    """Return the strings of a constant.

    Raises:
        NodeError: The value is not constant.
    """
    if value.constant is None:
        raise _make_runtime_error(node, name)
    return value.constant


def _make_runtime_error(node: Node, name: str) -> NodeError:
    return node.error(
        "node.string_at_run_time",
        f"input {name} is computed at run time, where compiled code can only compare strings for equality.",
        "Make it a constant, or compute it before the model.",
    )
