"""Each case runs in one of the successive samples, and a quarter of the tests gets optimized code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te

from lowering.compiling.cache import object_cache
from tests.support import sampled, unoptimized


class Item:
    """A collected test with markers."""

    def __init__(self, nodeid: str, **markers: int) -> None:
        self.nodeid = nodeid
        self.markers = {name: getattr(pytest.mark, name)(value).mark for name, value in markers.items()}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


def run_sample(monkeypatch: pytest.MonkeyPatch, number: int, cases: int, every: int) -> list[str]:
    monkeypatch.setenv(sampled.VARIABLE, str(number))
    items = [Item(f"tests/test_a.py::test_b[{case}]", sampled=every) for case in range(cases)]
    items.append(Item("tests/test_a.py::test_c"))
    sampled.mark_others_as_slow(items)
    return [item.nodeid for item in items if "slow" not in item.markers]


@pytest.mark.parametrize(("cases", "every"), [(10, 3), (12, 3), (2, 5), (1, 4), (7, 7)])
def test_each_case_is_in_one_of_the_samples(cases: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [run_sample(monkeypatch, number, cases, every) for number in range(min(every, cases))]
    assert all(sample[-1] == "tests/test_a.py::test_c" and len(sample) > 1 for sample in samples)
    assert sorted(test for sample in samples for test in sample[:-1]) == sorted(
        f"tests/test_a.py::test_b[{case}]" for case in range(cases)
    )


def test_code_is_optimized_for_a_quarter_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/test_a.py::test_{number}" for number in range(400)]
    counts = []
    for number in range(unoptimized.EVERY):
        monkeypatch.setenv(sampled.VARIABLE, str(number))
        counts.append(sum(sampled.is_in_sample(Item(name), unoptimized.EVERY) for name in names))
    assert sum(counts) == len(names) and min(counts) > 60


def compile_sum() -> tuple[bytes, Path | None]:
    x = te.placeholder((1024,), name="x")
    y = te.compute((1024,), lambda i: x[i] * 2.0 + 1.0, name="y")
    function = tvm.compile(tvm.IRModule({"main": te.create_prim_func([x, y])}), target="llvm")
    inputs = np.arange(1024, dtype="float32")
    result = tvm.runtime.empty((1024,), "float32")
    function(tvm.runtime.tensor(inputs), result)
    np.testing.assert_array_equal(result.numpy(), inputs * 2 + 1)
    return function.mod.inspect_source("asm").encode(), object_cache.folder()


def test_optimized_code_is_other_code_in_another_folder(request: pytest.FixtureRequest) -> None:
    try:
        unoptimized.select(Item("tests/test_a.py::test_b", optimized=1))
        code, folder = compile_sum()
        tests = [Item(f"test_{number}") for number in range(20)]
        unoptimized.select(next(test for test in tests if not sampled.is_in_sample(test, unoptimized.EVERY)))
        slower, other_folder = compile_sum()
    finally:
        unoptimized.select(request.node)
    assert slower != code
    assert folder != other_folder
