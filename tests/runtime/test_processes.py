"""Models in other processes: forked, spawned, pickled; and callbacks that wait for the thread that they run in."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowering
from tests.runtime import modules
from tests.support.error_codes import raises

TEXT = "(float[n, 4] x) => (float[n, 4] y) { y = Exp (x) }"
X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> lowering.Model:
    import onnx

    text = f'<ir_version: 10, opset_import: ["": 21]> g {TEXT}'
    folder = tmp_path_factory.mktemp("exp") / "m"
    lowering.compile(onnx.parser.parse_model(text)).save(folder)
    return lowering.load(folder, threads=1)


@pytest.mark.parametrize("used", ["submit", "Batching", "both", "neither"])
@pytest.mark.parametrize("then", ["submit", "Batching"])
def test_a_forked_child_has_threads_of_its_own(exp: lowering.Model, used: str, then: str, tmp_path: Path) -> None:
    """A process works whatever its parent has used before, and whichever lock another thread has taken."""
    exp.save(tmp_path / "m")
    code = f"""
import os, signal, threading, warnings, lowering, numpy as np
warnings.simplefilter("ignore")
model, x = lowering.load({os.fspath(tmp_path / "m")!r}, threads=1), np.ones((2, 4), np.float32)
batching = lowering.Batching(model)
one, other = [model.submit], [batching.submit]
calls = {{"submit": one, "Batching": other, "both": one + other, "neither": []}}
for submit in calls[{used!r}]:
    submit({{"x": x}}).result(60)
stop = threading.Event()
def others():
    while not stop.is_set():
        for submit in calls[{used!r}]: submit({{"x": x}}).result(60)
        stop.wait(0.001)
thread = threading.Thread(target=others); thread.start()
for k in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        for _ in range(3):
            (submit,) = calls[{then!r}]
            np.testing.assert_allclose(submit({{"x": x}}).result(60)["y"], np.exp(x), rtol=1e-6)
        if k == 4:
            raise SystemExit(0)  # an exit that runs all destructors
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set(); thread.join()
"""
    assert modules.run_python(code) == 0


@pytest.mark.parametrize("kind", ["submit", "Batching"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_callbacks_may_wait(exp: lowering.Model, kind: str, depth: int) -> None:
    """Calls that callbacks submit themselves work with others before and after them, also in calls that fail."""
    batching = lowering.Batching(exp, most=4, wait=0.01)
    submit: Callable[..., Future[Any]] = exp.submit if kind == "submit" else batching.submit
    values, done = list[float](), threading.Event()

    def then(future: Future[Any], left: int) -> None:
        value = future.result()["y"]
        values.append(float(value[0, 0]))
        if not left:
            done.set()
            return
        futures = [submit({"x": np.full((1, 4), k, np.float32)}) for k in (7, 8)]
        following = submit({"x": np.zeros_like(X)})
        last = submit({"y": X})  # is refused
        following.add_done_callback(lambda future: then(future, left - 1))
        assert [round(float(np.log(other.result()["y"][0, 0])), 4) for other in reversed(futures)] == [8, 7]
        assert isinstance(last.exception(), lowering.InputError)
        following.result()

    first = [submit({"x": X}) for _ in range(3)]
    first[0].add_done_callback(lambda future: first[2].result() and then(future, depth))
    assert done.wait(60)
    assert len(values) == depth + 1 and values[1:] == [1.0] * depth
    batching.close()


def test_waiting_has_an_end_elsewhere(exp: lowering.Model) -> None:
    with lowering.Batching(exp, most=100, wait=5.0) as batching:
        future = batching.submit({"x": X})
        with pytest.raises(TimeoutError):
            future.result(0.01)
        with pytest.raises(TimeoutError):
            future.exception(0.01)


def test_what_was_submitted_is_done_before_the_end(exp: lowering.Model, tmp_path: Path) -> None:
    exp.save(tmp_path / "m")
    code = f"""
import lowering, numpy as np
model = lowering.load({os.fspath(tmp_path / "m")!r}, threads=1)
futures = [model.submit({{"x": np.ones((20000, 4), np.float32)}}) for _ in range(20)]
futures[-1].add_done_callback(lambda future: open({os.fspath(tmp_path / "done")!r}, "w").close())
"""
    assert modules.run_python(code) == 0 and (tmp_path / "done").exists()


def test_a_callback_that_submits_at_the_end_ends_nothing(exp: lowering.Model, tmp_path: Path) -> None:
    exp.save(tmp_path / "m")
    code = f"""
import lowering, numpy as np, time
model = lowering.load({os.fspath(tmp_path / "m")!r}, threads=1)
x = {{"x": np.ones((2, 4), np.float32)}}
def then(future):
    time.sleep(0.5)
    model.submit(x).result()
model.submit(x).add_done_callback(then)
"""
    assert modules.run_python(code) == 0


def test_calls_that_end_their_thread_do_not(exp: lowering.Model) -> None:
    class Ending:
        __module__ = "numpy"
        dtype, shape = np.dtype("float32"), (2, 4)

        def __dlpack__(self, **options: Any) -> Any:
            raise SystemExit

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    future = exp.submit({"x": Ending()})
    future.add_done_callback(lambda _: (_ for _ in ()).throw(SystemExit))
    assert isinstance(future.exception(60), SystemExit)
    np.testing.assert_allclose(exp.submit({"x": X}).result(60)["y"], np.exp(X), rtol=1e-6)


def exp_of(model: lowering.Model, x: np.ndarray) -> np.ndarray:
    return model.run({"x": x})["y"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled(exp: lowering.Model, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(exp, protocol))
    assert again.manifest == exp.manifest and again._threads == 1
    np.testing.assert_array_equal(exp_of(again, X), exp_of(exp, X))
    assert pickle.loads(pickle.dumps(again)).manifest == exp.manifest  # whose folder is gone


def test_copied(exp: lowering.Model) -> None:
    assert copy.copy(exp) is exp and copy.deepcopy({"model": [exp]})["model"][0] is exp


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_in_pools_of_processes(exp: lowering.Model, start: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as pool:
        np.testing.assert_array_equal(pool.submit(exp_of, exp, X).result(120), exp_of(exp, X))


def test_signed_weights_travel(artifact: Callable[..., Path], tmp_path: Path) -> None:
    signing = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = signing.Ed25519PrivateKey.generate()
    lowering.load(artifact("dense")).save(tmp_path / "m", sign_key=key)
    again = pickle.loads(pickle.dumps(lowering.load(tmp_path / "m")))
    again.save(tmp_path / "n")
    lowering.load(tmp_path / "n", verify_key=key.public_key())


def test_what_has_been_written_to_is_not_pickled(artifact: Callable[..., Path], tmp_path: Path) -> None:
    lowering.load(artifact("dense")).save(tmp_path / "m")
    model = lowering.load(tmp_path / "m")
    weights = tmp_path / "m" / "weights.bin"
    weights.write_bytes(b"\1" * weights.stat().st_size)
    with raises("artifact.file_changed"):
        pickle.dumps(model)
