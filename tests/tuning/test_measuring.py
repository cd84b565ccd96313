"""Candidates are checked and timed in processes of their own, and their errors are reported by cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lowering.measuring import answers, arguments
from lowering.measuring.isolated import CandidateFailure, Helper
from lowering.measuring.measure import Job, expect, measure_job
from tests.tuning.models import SIZE, crashes, hangs, library, right, slow, spoils_what_it_reads, wants_memory, wrong


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    helper = Helper(["lowering.measuring.measure"])
    yield helper
    helper.close()


@pytest.fixture
def folder(tmp_path: Path, helper: Helper) -> Path:
    """Write the arguments of the functions in models.py, and the expected results."""
    x = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    tensors = [("float32", (SIZE,), a.view(np.uint8), False, k == 1) for k, a in enumerate((x, 0 * x))]
    arguments.write_arguments(tmp_path, tensors)
    helper.call(expect, str(library(right, tmp_path, "right")), str(tmp_path), 1, seconds=60, memory=1 << 30)
    return tmp_path


def job(folder: Path, path: Path) -> Job:
    return Job(str(path), str(folder / "right.so"), str(folder), threads=1, pairs=8, cache=1 << 20)


def test_a_kernel_that_is_right_and_slower(folder: Path, helper: Helper) -> None:
    result = helper.call(measure_job, job(folder, library(slow, folder, "slow")), seconds=60, memory=1 << 30)
    assert result.error == 0 and result.ratio > 2 and result.baseline > 0
    assert len(result.ratios) < 8  # it was clear before all pairs were taken


def test_a_kernel_against_itself(folder: Path, helper: Helper) -> None:
    result = helper.call(measure_job, job(folder, folder / "right.so"), seconds=60, memory=1 << 30)
    assert result.ratio == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    "func, cause, message",
    [
        (wrong, "wrong", "argument 1 is"),
        (spoils_what_it_reads, "wrong", "argument 0 was written, which is only read"),
        (crashes, "crash", "Segmentation fault"),
        (hangs, "hang", "stopped after 2 seconds"),
        (wants_memory, "memory", "bad_alloc"),
    ],
)
def test_faulty_candidates_are_told_by_cause(func, cause: str, message: str, folder: Path, helper: Helper) -> None:
    path = library(func, folder, "bad")
    begin = time.monotonic()
    with pytest.raises(CandidateFailure) as failed:
        helper.call(measure_job, job(folder, path), seconds=2, memory=1 << 30)
    assert failed.value.cause == cause and message in failed.value.text
    assert time.monotonic() - begin < 10
    assert helper.call(measure_job, job(folder, folder / "right.so"), seconds=60, memory=1 << 30).error == 0


def test_no_library_and_no_arguments_are_errors(folder: Path, helper: Helper) -> None:
    for missing in (folder / "missing.so", folder / "arguments.json"):
        with pytest.raises(CandidateFailure) as failed:
            helper.call(measure_job, job(folder, missing), seconds=60, memory=1 << 30)
        assert failed.value.cause == "error"


def test_a_helper_that_was_killed_starts_again(folder: Path) -> None:
    helper = Helper(["lowering.measuring.measure"])
    helper.prepare(os.putenv, "PREPARED", "yes")
    try:
        first = helper.call(os.getppid, seconds=10, memory=1 << 30)
        with pytest.raises(CandidateFailure, match="crash"):
            helper.call(os.kill, first, signal.SIGKILL, seconds=10, memory=1 << 30)
        assert helper.call(os.getppid, seconds=10, memory=1 << 30) != first
    finally:
        helper.close()


def test_no_process_outlives_the_caller(tmp_path: Path) -> None:
    helper = Helper([])
    pid = helper.call(os.getppid, seconds=10, memory=1 << 30)
    helper.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "dtype, right, got, error",
    [
        ("float32", [1.0, -100.0], [1.001, -100.0], 1e-5),
        ("float32", [1.0, -100.0], [2.0, -100.0], None),
        ("float32", [np.nan, 1.0], [np.nan, 1.0], 0.0),
        ("float32", [np.nan, 1.0], [1.0, 1.0], None),
        ("float32", [np.inf, 1.0], [-np.inf, 1.0], None),
        ("float32", [0.0, 0.0], [0.0, 0.0], 0.0),
        ("bfloat16", [1.0, 2.0], [1.015625, 2.0], 0.0079),
        ("bfloat16", [1.0, 2.0], [1.25, 2.0], None),
        ("int64", [1, 2], [1, 2], 0.0),
        ("int64", [1, 2], [1, 3], None),
        ("bool", [True, False], [True, True], None),
        ("int8", [1] * 200, [2] + [1] * 199, 0.004),
        ("int8", [1] * 20, [2] + [1] * 19, None),
        ("int8", [1] * 200, [3] + [1] * 199, None),
    ],
)
def test_answers(dtype: str, right: list, got: list, error: float | None) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.array(x).astype(kind).view(np.uint8) for x in (got, right))
    if error is None:
        with pytest.raises(CandidateFailure, match="wrong"):
            answers.check("y", dtype, a, b)
    else:
        assert answers.check("y", dtype, a, b) == pytest.approx(error, rel=0.1)
