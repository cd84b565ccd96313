"""Every error has a stable code, and errors survive a pickle."""

from __future__ import annotations

import pickle

import pytest

import lowering
from lowering.errors import InputError, LoweringError, NodeError
from lowering.runtime.failures import describe_failure
from tests.support import error_codes


def test_every_error_has_a_literal_code() -> None:
    sites = list(error_codes.find_raise_sites())
    assert len(sites) > 1000
    without = [f"{site.path}:{site.line}" for site in sites if site.code is None]
    assert {name.partition(":")[0] for name in without} == set(error_codes.FORWARDING), without


def test_checks_in_c_have_codes() -> None:
    codes = {code for code, _ in error_codes.find_native_codes()}
    assert {"run.index_out_of_range", "run.size_mismatch"} <= codes
    assert len([code for code in codes if code.startswith(("requests.", "gpt_attention."))]) > 20


@pytest.mark.parametrize("error", [InputError("input.missing", "x is missing"), NodeError("a.b", "node", "what", "Do")])
def test_errors_are_pickled(error: LoweringError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.code == error.code


def test_checks_of_a_run_pass_on_their_code() -> None:
    assert describe_failure(ValueError("[run.size_mismatch] a: text")) == ("run.size_mismatch", "a: text")
    assert describe_failure(ValueError("another text")) == ("run.check_failed", "another text")
    assert describe_failure(RuntimeError("bad_alloc"))[0] == "run.out_of_memory"


def test_a_program_matches_the_code() -> None:
    with pytest.raises(LoweringError) as caught:
        lowering.compile("model.onnx", threads=0)
    assert caught.value.code == "argument.integer_invalid"
