"""The compiled checks of GptAttention refuse contents of calls that do not fit, by node, argument and request.

A run that is refused writes nothing.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import lowering
from lowering.errors import InputError
from tests.serving.gpt_attention import gpt_attention_cases
from tests.serving.gpt_attention.gpt_malformed_calls import DEFECTS, corrupt_call
from tests.serving.request_checks import check_gpt, make_gpt_node

# Defects of contents, by their names in gpt_malformed_calls: a run must find them.
CONTENTS = {
    *("sequence_length", "sequence_length of two beams", "a chunk without rows", "a negative past"),
    *("host_context_lengths", "rows of packed qkv", "rows of padded qkv", "a second chunk", "a past without a cache"),
    *("generation without a cache", "generation first", "a step in a padded batch", "a short cache"),
    *("too few columns", "an entry outside", "a beam outside", "two requests", "two beams", "no cross_kv"),
    *("cross_kv of fewer tokens", "cross_kv that ends early", "cross_kv of other requests", "a window of 0"),
    *("beams with a window", "sinks fill the window", "a mapped layer beyond the pool", "a mask of fewer columns"),
    *(
        "a packed mask of fewer 32-bit words",
        "logn of few positions",
        "bias of few positions",
        "angles of few positions",
    ),
    *("blocks of one pool of several", "cache_indirection that ends early"),
}


def test_legal_calls_of_gpt_attention_pass() -> None:
    rng = np.random.default_rng(5)
    for case in gpt_attention_cases.cases(5, 12):
        check_gpt(case.arrays(rng))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(20))
def test_many_legal_calls_of_gpt_attention_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for case in gpt_attention_cases.cases(100 + seed, 100):
        check_gpt(case.arrays(rng))


def draw_corrupted_calls(seed: int, names: set[str]) -> list[gpt_attention_cases.Malformed]:
    calls = []
    for defect in DEFECTS:
        if defect.name in names:
            tries = (corrupt_call(defect, seed + n) for n in range(200))
            calls.append(next(call for call in tries if call is not None))
    assert {call.name for call in calls} == names
    return calls


def check_blame(call: gpt_attention_cases.Malformed, text: str) -> None:
    assert "GptAttention-1 'gpt_attention'" in text, text
    assert any(name in text for name in call.names), (call.name, text)
    named = {int(number) for number in re.findall(r"request (\d+)", text)}
    assert not call.requests or named & set(call.requests), (call.name, text)


def test_illegal_contents_of_gpt_attention_are_refused() -> None:
    for call in draw_corrupted_calls(11, CONTENTS):
        with pytest.raises(ValueError) as caught:
            check_gpt(call.arguments)
        check_blame(call, str(caught.value))


@pytest.mark.parametrize("name", ["two requests", "a short cache"])  # paged and contiguous
def test_refused_runs_of_gpt_attention_write_nothing(name: str) -> None:
    (call,) = draw_corrupted_calls(23, {name})
    proto, arrays = make_gpt_node(call.arguments, symbolic=True)
    before = {key: array.tobytes() for key, array in arrays.items()}
    with pytest.raises(InputError) as caught:
        lowering.compile(proto, threads=1).run(arrays)
    check_blame(call, str(caught.value))
    assert {key: array.tobytes() for key, array in arrays.items()} == before
