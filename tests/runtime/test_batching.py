"""Calls in the background, and calls of several threads that become one."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

import lowering
from lowering.errors import InputError
from tests.support.error_codes import raises


def model(text: str = "(float[n, 4] x, float[n, k] z) => (float[n, 4] y, float[n, k] w) { y = Exp (x) w = Neg (z) }"):
    return lowering.compile(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> m {text}'))


@pytest.fixture(scope="module")
def two() -> lowering.Model:
    return model()


class Counted:
    """A model whose calls are counted, by their rows."""

    def __init__(self, inner: lowering.Model, delay: float = 0.0) -> None:
        self.inner, self.delay, self.rows = inner, delay, list[int]()
        self.manifest, self.inputs = inner.manifest, inner.inputs

    def run(self, inputs, threads=None):
        self.rows.append(len(inputs["x"]))
        time.sleep(self.delay)
        return self.inner.run(inputs, threads)


def request(rng: np.random.Generator, rows: int, width: int = 3) -> dict[str, np.ndarray]:
    return {name: rng.standard_normal((rows, n)).astype("float32") for name, n in (("x", 4), ("z", width))}


def right(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(outputs["y"], np.exp(inputs["x"]), rtol=1e-5)
    np.testing.assert_array_equal(outputs["w"], -inputs["z"])


def test_a_call_in_the_background(two: lowering.Model) -> None:
    rng = np.random.default_rng(0)
    calls = [request(rng, rows) for rows in (1, 5, 2)]
    for inputs, future in zip(calls, [two.submit(inputs, threads=1) for inputs in calls]):
        right(inputs, future.result(10))
    with raises("input.missing"):
        two.submit({"x": calls[0]["x"]}).result(10)


def test_requests_that_wait_are_one_call(two: lowering.Model) -> None:
    """In the order in which they came, whatever their rows; what does not fit is in the next."""
    counted, rng = Counted(two, 0.05), np.random.default_rng(1)
    calls = [request(rng, rows) for rows in (1, 2, 3, 2, 9, 1)]
    with lowering.Batching(counted, most=6, wait=10.0) as batching:
        futures = [batching.submit(inputs) for inputs in calls]
        for inputs, future in zip(calls, futures):
            right(inputs, future.result(10))
            if future is futures[3]:
                break
        batching.submit(request(rng, 6)).result(10)
    assert counted.rows == [6, 2, 9, 1, 6]
    for inputs, future in zip(calls, futures):
        right(inputs, future.result(0))


def test_other_sizes_are_another_call(two: lowering.Model) -> None:
    counted, rng = Counted(two, 0.02), np.random.default_rng(2)
    calls = [request(rng, 1, width) for width in (3, 3, 5, 5, 3)]
    with lowering.Batching(counted, wait=1.0) as batching:
        futures = [batching.submit(inputs) for inputs in calls]
    assert counted.rows == [2, 2, 1]
    for inputs, future in zip(calls, futures):
        right(inputs, future.result(0))


def test_one_alone_waits_no_longer_than_said(two: lowering.Model) -> None:
    inputs = request(np.random.default_rng(3), 2)
    with lowering.Batching(two, wait=0.05) as batching:
        batching.run(inputs)
        start = time.monotonic()
        right(inputs, batching.run(inputs))
        assert 0.04 < time.monotonic() - start < 2.0


def test_who_is_to_blame_fails_alone() -> None:
    """An index out of its table corrupts the call of all, which are run again one by one."""
    gather = model("(int64[n] i) => (float[n, 2] y) <float[3, 2] t = {1, 2, 3, 4, 5, 6}> { y = Gather (t, i) }")
    with lowering.Batching(gather, wait=0.2) as batching:
        futures = [batching.submit({"i": np.array([i])}) for i in (0, 7, 2)]
        np.testing.assert_array_equal(futures[0].result(10)["y"], [[1, 2]])
        np.testing.assert_array_equal(futures[2].result(10)["y"], [[5, 6]])
        with pytest.raises(InputError):
            futures[1].result(10)
        with raises("input.name_unknown"):
            batching.run({"j": np.zeros(1)})
        with raises("batching.array_type_unsupported"):
            batching.submit({"i": [0]})


def test_many_threads(two: lowering.Model) -> None:
    counted = Counted(two)

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            inputs = request(rng, int(rng.integers(0, 4)), int(rng.integers(1, 3)))
            right(inputs, batching.run(inputs))

    with lowering.Batching(counted, most=8, wait=0.001) as batching, ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))
    assert len(counted.rows) < 160


def test_canceled_and_closed(two: lowering.Model) -> None:
    counted, rng = Counted(two, 0.1), np.random.default_rng(4)
    batching = lowering.Batching(counted, wait=0.0)
    first, second = (batching.submit(request(rng, 1)) for _ in range(2))
    assert second.cancel() or second.result(10)
    batching.close()
    assert first.done() and second.done()
    with raises("run.closed"):
        batching.submit(request(rng, 1))
    batching.close()


def test_nobody_need_close_it(two: lowering.Model) -> None:
    before = threading.active_count()
    batching = lowering.Batching(two)
    batching.run(request(np.random.default_rng(5), 1))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "Batching")
    del batching
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and threading.active_count() <= before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(float[2, 4] x) => (float[2, 4] y) { y = Exp (x) }", "no symbolic dimension is the first one"),
        ("(float[n, m] x) => (float[m, n] y) { y = Transpose (x) }", "no symbolic dimension is the first one"),
        ("(float[n, n] x) => (float[n, n] y) { y = Exp (x) }", "no symbolic dimension is the first one"),
    ],
)
def test_models_without_a_batch(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        lowering.Batching(model(text))


def test_numbers_that_are_none(two: lowering.Model) -> None:
    for options in ({"most": 0}, {"wait": -1.0}, {"wait": float("nan")}, {"threads": 0}):
        with pytest.raises(InputError):
            lowering.Batching(two, **options)


@pytest.mark.parametrize("way", ["submit", "batching"])
def test_sixteen_threads_with_errors_among_them(two: lowering.Model, way: str) -> None:
    """Results are those of single calls to the bit, and who is to blame gets the error: missing inputs, other ranks and
    types, rows that differ."""
    wrongs = [
        (lambda inputs: inputs.pop("z"), "'z' is missing"),
        (lambda inputs: inputs.update(q=inputs["x"]), "no input 'q'"),
        (lambda inputs: inputs.update(x=inputs["x"][None]), "'x'"),
        (lambda inputs: inputs.update(z=inputs["z"].astype("int8")), "'z'"),
        (lambda inputs: inputs.update(z=np.concatenate([inputs["z"]] * 2)), "dimension"),
    ]

    def client(seed: int, batching: lowering.Batching) -> int:
        rng = np.random.default_rng(seed)
        begun = []
        for _ in range(60):
            inputs = request(rng, int(rng.integers(1, 5)), int(rng.integers(1, 3)))
            words = None
            if rng.random() < 0.2:
                damage, words = wrongs[int(rng.integers(len(wrongs)))]
                damage(inputs)
            begun.append((inputs, words, (batching if way == "batching" else two).submit(inputs)))
        for inputs, words, future in begun:
            if words is None:
                outputs, expected = future.result(60), two.run(inputs)
                for name in ("y", "w"):
                    np.testing.assert_array_equal(outputs[name], expected[name])
            else:
                with pytest.raises(InputError, match=words):
                    future.result(60)
        return sum(words is not None for _, words, _ in begun)

    with lowering.Batching(two, most=16, wait=0.001) as batching, ThreadPoolExecutor(16) as pool:
        errors = list(pool.map(client, range(16), [batching] * 16))
    assert 100 < sum(errors) < 300
