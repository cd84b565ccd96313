"""The compiled check of GptAttention's tables and the rules of the attacks, written apart, refuse the same calls."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from lowering.functions.gpt_attention import gpt_attention
from lowering.functions.gpt_checks import ArgumentError, check_call
from lowering.functions.gpt_checks.rows import check_qkv
from lowering.functions.gpt_checks.settings import check_settings
from tests.attacks.attack import Illegal
from tests.attacks.generators.served.gpt_contents import contents_fit
from tests.serving.gpt_attention.gpt_attention_cases import cases, malformed

DEFAULTS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(gpt_attention).parameters.values()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def refuses(call: dict[str, Any]) -> tuple[bool, bool] | None:
    """Return whether the check refuses the contents of a call, and whether the rules do; None for illegal shapes."""
    options = {name: value for name, value in call.items() if name != "qkv"}
    if not options.keys() <= DEFAULTS.keys():
        return None
    arguments, qkv = DEFAULTS | options, call["qkv"]
    try:
        check_call(qkv, arguments, contents=False)
    except (ArgumentError, NotImplementedError):
        return None
    by_check = by_rules = False
    try:
        check_call(qkv, arguments)
    except ArgumentError as error:
        by_check = error.code != "gpt_attention.masks_differ"  # which the rules do not compare
    try:
        settings = check_settings(arguments)
        contents_fit(arguments, settings, check_qkv(qkv, arguments, settings))
    except Illegal:
        by_rules = True
    return by_check, by_rules


@pytest.mark.parametrize("seed", range(4))
def test_changed_numbers_are_judged_alike(seed: int) -> None:
    rng, answers = np.random.default_rng(seed), []
    for case in cases(seed, 30):
        call = case.arrays(rng)
        tables = [x for x in call.values() if isinstance(x, np.ndarray) and x.dtype.kind == "i" and x.size]
        for _ in range(10 if tables else 0):
            table = tables[rng.integers(len(tables))]
            index = tuple(rng.integers(size) for size in table.shape)
            before, change = table[index], rng.choice([-1, 1, -2, 3, 1000, -1000])
            if np.iinfo(table.dtype).min <= int(before) + change <= np.iinfo(table.dtype).max:
                table[index] = int(before) + change
            answers.append(refuses(call))
            table[index] = before
    judged = [answer for answer in answers if answer is not None]
    assert all(by_check == by_rules for by_check, by_rules in judged)
    assert len({by_check for by_check, _ in judged}) == 2 and len(judged) > 100


def test_malformed_calls_are_judged_alike() -> None:
    answers = [(call.name, refuses(call.arguments)) for call in malformed(5, 200)]
    assert [name for name, answer in answers if answer is not None and answer[0] != answer[1]] == []
