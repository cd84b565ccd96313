"""gpt_attention equals the float64 reference: random calls in which every two features meet. Caches are within the
bounds of float32 rounding, most of them bit for bit.

A short run draws some configurations, several calls of each; the long one (-m slow) thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lowering import gpt_attention
from tests.serving.coverage_of_serving import GPT
from tests.serving.gpt_attention import gpt_attention_reference as reference
from tests.serving.gpt_attention.gpt_attention_cases import Case, cases

TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
FP8 = 0.07  # half a unit in the last position of float8_e4m3fn


def copy_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return [copy_value(x) for x in value] if isinstance(value, (list, tuple)) else value


def list_caches(arguments: dict[str, Any]) -> list[np.ndarray]:
    pools = arguments.get("host_kv_cache_pool_pointers")
    caches = arguments.get("past_key_value") if pools is None else pools
    if caches is None:
        return []
    return list(caches) if isinstance(caches, (list, tuple)) else [caches]


def check(case: Case, rng: np.random.Generator, target: str = "cpu") -> None:
    arguments = case.arrays(rng)
    copies = {name: copy_value(value) for name, value in arguments.items()}
    expected, expected_lse, _ = reference.gpt_attention(**arguments)
    low, high = reference.cache_bounds(**arguments)
    context, lse = gpt_attention(**copies, return_lse=True, target=target)
    scale = arguments.get("attention_output_orig_quant_scale")
    tolerance = TOLERANCE[_find_dtype(arguments["qkv"])]
    if arguments.get("use_fp8_context_fmha"):
        tolerance = max(tolerance, FP8)
    near = tolerance if scale is None else tolerance * float(scale[0]) + 0.01
    relative = tolerance if scale is None else max(2 * FP8, tolerance)
    np.testing.assert_allclose(np.asarray(context).astype(np.float64), expected, relative, near, err_msg=str(case))
    np.testing.assert_allclose(lse, expected_lse, max(tolerance, 1e-4), max(tolerance, 1e-4), err_msg=str(case))
    for cache, lowest, highest in zip(list_caches(copies), low, high, strict=True):
        assert _is_within(cache, lowest, highest), f"cache of {case}"
    for name, value in arguments.items():
        if name not in ("past_key_value", "host_kv_cache_pool_pointers") and isinstance(value, np.ndarray):
            assert copies[name].tobytes() == value.tobytes(), f"{name} was written"


def _find_dtype(qkv: Any) -> str:
    return np.asarray(qkv[0] if isinstance(qkv, (list, tuple)) else qkv).dtype.name


def _is_within(actual: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    bits = [x.view(np.uint8).reshape(*x.shape, -1) for x in (actual, low)]
    numbers = [x.astype(np.float64) for x in (actual, low, high)]
    between = (numbers[0] >= numbers[1]) & (numbers[0] <= numbers[2])
    return bool(((bits[0] == bits[1]).all(-1) | between).all())


def check_cases(drawn: Iterator[Case], calls: int) -> None:
    for number, case in enumerate(drawn):
        print(f"configuration {number}: {case}")
        rng = np.random.default_rng(number)
        for _ in range(calls):
            check(case, rng)


@pytest.mark.timeout(600)
def test_equals_the_reference() -> None:
    seed, count, calls = GPT["CPU"]
    check_cases(cases(seed, count), calls)


FOUND = {26: "sink tokens of a tile of rows, the first of which sees fewer keys than there are sinks"}


@pytest.mark.parametrize("number", FOUND)
def test_what_was_found_once_stays_right(number: int) -> None:
    check_cases((case for k, case in enumerate(cases(0, number + 1)) if k == number), 2)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, GPT["CPU, long"][1], 10))
def test_equals_the_reference_at_length(first: int) -> None:
    seed, _, calls = GPT["CPU, long"]
    check_cases((case for k, case in enumerate(cases(seed, first + 10)) if k >= first), calls)
