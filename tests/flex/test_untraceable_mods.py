"""Texts of the errors of flex_attention about mods that cannot be traced: the mod and line, the problem, the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import flex
from lowering.errors import InputError
from tests.flex.errors_said import assert_says
from tests.support.error_codes import raises

Q = np.ones((1, 2, 5, 8), "f")
BIAS = np.ones((2, 5), "f")
OUTSIDE = np.arange(5)


def attend(**options: Any) -> Any:
    return flex.flex_attention(Q, Q, Q, **options)


def asks_if(s, b, h, i, j):
    if i > j:
        return s
    return -s


def asks_and(b, h, i, j):
    return i > 2 and j > 2


def asks_or(b, h, i, j):
    return i > 2 or j > 2


def asks_not(b, h, i, j):
    return not i > 2


def chains(b, h, i, j):
    return 0 < i < 3


def asks_max(s, b, h, i, j):
    return s + max(i, j)


def asks_while(s, b, h, i, j):
    while i > 0:
        i = i - 1
    return s


def asks_in(b, h, i, j):
    return i in (1, 2)


def to_float(s, b, h, i, j):
    return float(s)


def to_int(s, b, h, i, j):
    return s + int(i)


def to_range(s, b, h, i, j):
    for _ in range(i):
        s = s + 1
    return s


def length_of_number(s, b, h, i, j):
    return s + len(i)


def length_of_array(s, b, h, i, j, *, bias):
    return s + bias[h, i % len(bias)]


def iterates(s, b, h, i, j):
    return s + sum(i)


def iterates_array(s, b, h, i, j, *, bias):
    return s + sum(bias)


def contained(b, h, i, j, *, bias):
    return i in bias


def part_of_number(s, b, h, i, j):
    return s + i[0]


def unknown_attribute(s, b, h, i, j):
    return s.mean()


def unknown_function(s, b, h, i, j):
    return np.cumsum(s)


def as_array(s, b, h, i, j):
    return np.asarray(s)


def rounds(s, b, h, i, j):
    return round(s)


def ordinary_array(s, b, h, i, j):
    return s + OUTSIDE[i]


def array_in_closure():
    table = np.ones(5)

    def mod(s, b, h, i, j):
        return s + table

    return mod


def whole_array(s, b, h, i, j, *, bias):
    return s + bias


def compares_array(b, h, i, j, *, bias):
    return bias == 1


def gives_array(s, b, h, i, j, *, bias):
    return bias


def gives_row(s, b, h, i, j, *, bias):
    return bias[h]


def gives_nothing(s, b, h, i, j):
    s + 1


def gives_two(s, b, h, i, j):
    return s, s


def too_many_indices(s, b, h, i, j, *, bias):
    return s + bias[b, h, i]


def float_index(s, b, h, i, j, *, bias):
    return s + bias[h, i / 2]


def bool_index(s, b, h, i, j, *, bias):
    return s + bias[h, i > j]


def slices(s, b, h, i, j, *, bias):
    return s + bias[h, 1:]


def everything(s, b, h, i, j, *, bias):
    return s + bias[..., i]


def shifts_float(s, b, h, i, j):
    return s >> 1


def joins_floats(b, h, i, j):
    return (i * 0.5) & (j > 1)


def divides_by_zero(s, b, h, i, j):
    return s + i // 0


def too_large(b, h, i, j):
    return i < 2**70


def explodes(s, b, h, i, j):
    for _ in range(40):
        s = s + s
    return s


def too_deep(s, b, h, i, j):
    for _ in range(3000):
        s = s * 0.5
    return s


def without_end(s, b, h, i, j):
    return without_end(s, b, h, i, j)


def text(s, b, h, i, j):
    return s + "1"


def unknown_type(s, b, h, i, j):
    return flex.cast(s, "complex64")


ASKS = r"where\(condition, a, b\), a & b, a \| b, ~a"
UNTRACEABLE: list[tuple[Callable[..., Any], str]] = [
    *((mod, ASKS) for mod in (asks_if, asks_and, asks_or, asks_not, chains, asks_max, asks_while, asks_in)),
    (to_float, r"its value is unknown.*cast\(x, 'float32'\)"),
    (to_int, r"its value is unknown.*cast\(x, 'int32'\)"),
    (to_range, r"cannot be an index of an ordinary array, nor a number of steps.*captures=\{'bias': array\}"),
    (length_of_number, r"one number"),
    (length_of_array, r"Use bias.shape\[0\]"),
    (iterates, r"one number, and cannot be iterated over"),
    *((mod, r"'bias' is used as a number.*bias\[") for mod in (iterates_array, contained, whole_array, compares_array)),
    *((mod, r"one number") for mod in (part_of_number, unknown_attribute, rounds)),
    (unknown_function, r"do not support numpy.cumsum, as .*Use one of .*tanh"),
    (as_array, r"is not an array, nor an index of one. Use the functions of lowering.flex"),
    (ordinary_array, r"captures=\{'bias': array\}, with a keyword-only parameter"),
    (array_in_closure(), r"an array \(ndarray\) from outside.*captures=\{'bias': array\}"),
    (gives_array, r"returns the whole array 'bias'"),
    (gives_row, r"returns the whole array 'bias'"),
    (gives_nothing, r"None \(NoneType\) is not a number"),
    (gives_two, r"\(tuple\) is not a number"),
    (too_many_indices, r"'bias' has 2 dimensions, but is read by 3 indices"),
    (float_index, r"index of type float32, which is not an integer.*cast\(x, 'int32'\)"),
    (bool_index, r"index of type bool, which is not an integer"),
    (slices, r"one index for each dimension, not by slice\(1, None, None\)"),
    (everything, r"one index for each dimension, not by Ellipsis"),
    (shifts_float, r"shifts need integers, not float32"),
    (joins_floats, r"needs truth values or integers, not float32"),
    (divides_by_zero, r"divides by 0"),
    (too_large, r"does not fit in 64 bits"),
    (explodes, r"more than 4000 operations.*capture them"),
    (too_deep, r"nested more than \d+ deep.*capture them"),
    (without_end, r"calls itself without end"),
    (text, r"'1' \(str\) is not a number"),
    (unknown_type, r"elements of type complex64. Use one of bool, int32"),
]


def kind_of(mod: Callable[..., Any]) -> str:
    positional = [p for p in inspect.signature(mod).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return "score_mod" if len(positional) == 5 else "mask_mod"


@pytest.mark.parametrize(("mod", "pattern"), UNTRACEABLE, ids=[mod.__name__ for mod, _ in UNTRACEABLE])
def test_mods_that_cannot_be_traced(mod: Callable[..., Any], pattern: str) -> None:
    captures = {"bias": BIAS} if "bias" in inspect.signature(mod).parameters else None
    with pytest.raises(InputError) as error:
        attend(**{kind_of(mod): mod}, captures=captures)
    assert_says(error.value, pattern)
    first = mod.__code__.co_firstlineno
    line = re.search(
        rf"{kind_of(mod)} `{mod.__qualname__}` \({re.escape(__file__)}:{first}\)(, line (\d+))?", str(error.value)
    )
    assert line, str(error.value)
    if mod.__name__ not in ("gives_array", "gives_row", "gives_nothing", "gives_two"):
        assert first < int(line[2]) <= first + len(inspect.getsource(mod).splitlines())


def test_line_is_that_of_the_mod_itself() -> None:
    """Also where a function that it calls goes wrong."""

    def inner(i: Any) -> Any:
        return i if i > 1 else -i

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s * 2
        return s + inner(i)

    with raises("flex.traced_truth_value"):
        attend(score_mod=mod)


class Trouble(Exception):
    pass


@pytest.mark.parametrize("problem", [Trouble("mine"), TypeError("mine"), AttributeError("mine"), ValueError("mine")])
def test_what_a_mod_raises_itself_comes_through(problem: Exception) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        raise problem

    with pytest.raises(type(problem), match=r"^mine$") as error:
        attend(score_mod=mod)
    assert error.value is problem
