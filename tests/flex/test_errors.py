"""Texts of the errors of flex_attention about mods, captures and arrays that do not fit: the problem and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowering import flex
from lowering.errors import InputError
from tests.flex.errors_said import assert_says
from tests.support.error_codes import raises

Q = np.ones((1, 2, 5, 8), "f")
BIAS = np.ones((2, 5), "f")


def attend(**options: Any) -> Any:
    return flex.flex_attention(Q, Q, Q, **options)


# -- mods and captures that do not fit --------------------------------------------------------------------------------


def biased(s, b, h, i, j, *, bias):
    return s + bias[h, i]


def causal(b, h, i, j):
    return i >= j


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a score_mod that masks": ({"score_mod": lambda s, b, h, i, j: i > j}, r"returns a truth value.*mask_mod"),
    "a mask_mod that scores": ({"mask_mod": lambda b, h, i, j: i - j}, r"returns a number \(int32\).*score_mod"),
    "a mask_mod as score_mod": ({"score_mod": causal}, r"takes 4 arguments, but a score_mod takes 5: \(score, b, h"),
    "a score_mod as mask_mod": (
        {"mask_mod": flex.mods.noop},
        r"takes 5 arguments, but a mask_mod takes 4: \(b, h, q_idx",
    ),
    "no arguments": ({"score_mod": lambda: 1}, r"takes 0 arguments"),
    "no function": ({"score_mod": 7}, r"score_mod is 7, not a function. Write def mod"),
    "a class": ({"mask_mod": "causal"}, r"mask_mod is 'causal', not a function"),
    "a missing capture": (
        {"score_mod": biased},
        r"reads the array 'bias', which is not among captures. Pass captures=",
    ),
    "an unused capture": (
        {"captures": {"bias": BIAS}},
        r"'bias', which is not a parameter of any mod.*def mod\(..., \*, bias\)",
    ),
    "a capture that a mod does not name": (
        {"score_mod": biased, "captures": {"bias": BIAS, "biases": BIAS}},
        r"'biases', which is not a parameter of any mod",
    ),
    "a reserved name": (
        {"score_mod": lambda s, b, h, i, j, *, k: s + k[j], "captures": {"k": BIAS}},
        r"cannot be called 'k'.*Rename it",
    ),
    "a name that is none": ({"captures": {"a b": BIAS}}, r"'a b', which cannot be a parameter of a mod"),
    "a number as name": ({"captures": {3: BIAS}}, r"3, which cannot be a parameter of a mod"),
    "text": (
        {"score_mod": biased, "captures": {"bias": np.array(["x"])}},
        r"'bias' has elements of type .*Use one of bool",
    ),
    "objects": ({"score_mod": biased, "captures": {"bias": {}}}, r"'bias' has elements of type object"),
    "complex": (
        {"score_mod": biased, "captures": {"bias": BIAS.astype("c8")}},
        r"'bias' has elements of type complex64",
    ),
    "uint64": ({"score_mod": biased, "captures": {"bias": BIAS.astype("u8")}}, r"'bias' has elements of type uint64"),
    "too few dimensions": (
        {"score_mod": biased, "captures": {"bias": BIAS[0]}},
        r"'bias' has 1 dimension, but is read by 2 indices",
    ),
    "captures that are none": ({"score_mod": biased, "captures": BIAS}, r"captures is a ndarray.*\{'name': array\}"),
    "too small": (
        {"score_mod": biased, "captures": {"bias": BIAS[:, :4]}},
        r"^the captured array 'bias' is read from 0 to 4 along dimension 1, which has size 4\.$",
    ),
    "too few heads": (
        {"score_mod": biased, "captures": {"bias": BIAS[:1]}},
        r"^the captured array 'bias' is read from 0 to 1 along dimension 0, which has size 1\.$",
    ),
    "too small from the end": (
        {"score_mod": lambda s, b, h, i, j, *, bias: s + bias[h, i - j], "captures": {"bias": BIAS[:, :4]}},
        r"^the captured array 'bias' is read from -4 to 4 along dimension 1, which has size 4\.$",
    ),
    "empty": (
        {"score_mod": biased, "captures": {"bias": BIAS[:, :0]}},
        r"^the captured array 'bias' is read from 0 to 4 along dimension 1, which has size 0\.$",
    ),
    "empty, by data": (
        {
            "score_mod": lambda s, b, h, i, j, *, bias, at: s + bias[at[i]],
            "captures": {"bias": BIAS[0, :0], "at": np.zeros(5, np.int32)},
        },
        r"^the captured array 'bias' is empty along dimension 0, and is read\.$",
    ),
    "a target": ({"target": "tpu"}, r"tpu"),
    "a scale": ({"scale": "large"}, r"scale is 'large'. Give a number"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_mods_and_captures_that_do_not_fit(case: str) -> None:
    options, pattern = UNFIT[case]
    for _ in range(2):  # also where a kernel is already cached
        with pytest.raises(Exception) as error:
            attend(**options)
        assert isinstance(error.value, InputError) or case == "a target", repr(error.value)
        assert_says(error.value, pattern)


def test_captured_arrays_that_fit_once_are_checked_again() -> None:
    """A call that fits makes the kernel; one that does not is refused by it."""
    attend(score_mod=biased, captures={"bias": BIAS})
    with raises("flex.index_out_of_range"):
        attend(score_mod=biased, captures={"bias": BIAS[:, :3]})


# -- arrays -----------------------------------------------------------------------------------------------------------


def ones(*shape: int, dtype: str = "f") -> np.ndarray:
    return np.ones(shape, dtype)


ARRAYS: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "rank": ((Q[0], Q, Q), {}, r"q has the shape \[2, 5, 8\]. Make it \[batch, heads, length, head size\]"),
    "types": ((Q, Q.astype("f2"), Q), {}, r"q is float32, k is float16, v is float32. Give them one element type"),
    "integers": ((Q.astype(int),) * 3, {}, r"q, k and v are int64. Use one of float32"),
    "lists": (([1.0], Q, Q), {}, r"q is a list, not an array"),
    "head sizes": ((Q, Q[..., :7], Q), {}, r"the head size of q is 8 and that of k is 7"),
    "keys": ((Q, Q, Q[:, :, :4]), {}, r"k has 5 keys and v has 4"),
    "heads of k and v": ((Q, Q, Q[:, :1]), {"enable_gqa": True}, r"k has 2 heads and v has 1"),
    "batches": ((ones(2, 2, 5, 8), ones(3, 2, 5, 8), ones(3, 2, 5, 8)), {}, r"q has 2 batches and k has 3"),
    "batches of k and v": ((Q, ones(1, 2, 5, 8), ones(2, 2, 5, 8)), {}, r"k has 1 batches and v has 2"),
    "shared heads": ((Q, Q[:, :1], Q[:, :1]), {}, r"q has 2 heads and k has 1. Pass enable_gqa=True"),
    "heads that do not divide": (
        (ones(1, 3, 5, 8), Q, Q),
        {"enable_gqa": True},
        r"the 3 heads of q are not a multiple of the 2 heads of k and v",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_do_not_fit(case: str) -> None:
    (q, k, v), options, pattern = ARRAYS[case]
    for block_mask in (None, flex.create_block_mask(causal, None, None, 5, 5)):
        with pytest.raises(InputError) as error:
            flex.flex_attention(q, k, v, block_mask=block_mask, **options)
        assert_says(error.value, pattern)
