"""How many threads compute, on which CPUs, and that any number of callers may share a model."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from tvm import relax
from tvm.script import tirx as T

import lowering
from lowering.errors import InputError
from tests.runtime import modules
from tests.support.error_codes import raises

Load = Callable[..., lowering.Model]

# Some tasks take a while, so that others overtake them.
X = np.array([2000, 0, 0, 100] * 4, "int32")


def threads_of(outputs: dict[str, Any]) -> int:
    return len(set(outputs["who"].tolist()))


def workers() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_of_a_call_a_model_and_an_artifact(artifact: Callable[..., Path], tmp_path: Path, threads: int) -> None:
    module = lowering.load(artifact("threads"), threads=threads)
    own_id = threading.get_native_id()
    for _ in range(3):
        outputs = module.run({"x": X})
        assert threads_of(outputs) == threads and outputs["who"][0] == own_id
        assert threads_of(module.run({"x": X}, threads=2)) == 2
        assert threads_of(module.bind({"x": X})()) == threads
        assert threads_of(module.bind({"x": X}, threads=3)()) == 3
    assert threads_of(lowering.load(modules.threads(tmp_path / "m", threads=threads)).run({"x": X})) == threads


def test_more_threads_than_work(model: Load) -> None:
    outputs = model("threads").run({"x": X[:3]}, threads=8)
    assert threads_of(outputs) == 3
    assert model("threads").run({"x": X[:0]}, threads=8)["who"].shape == (0,)


CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("mask", [CPUS[:1], CPUS[-1:], CPUS])
def test_the_callers_affinity_decides_and_stays(artifact: Callable[..., Path], mask: list[int]) -> None:
    code = f"""
import os
os.sched_setaffinity(0, {mask})
import lowering, numpy as np
model = lowering.load({os.fspath(artifact("threads"))!r})
x = np.full(16, 100, "int32")
before = len(os.listdir("/proc/self/task"))
for _ in range(20):
    outputs = model.run({{"x": x}})
    assert len(set(outputs["who"].tolist())) == {len(mask)}
    assert set(outputs["where"].tolist()) <= set({mask})
assert len(os.listdir("/proc/self/task")) == before + {len(mask)} - 1
for task in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(task)) == set({mask})
"""
    assert modules.run_python(code) == 0


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_workers_follow_the_thread_they_work_for(model: Load) -> None:
    """One pool serves callers of different masks; a caller's own mask is never touched."""
    module = model("threads")
    problems: list[Any] = []

    def call(mask: set[int]) -> None:
        os.sched_setaffinity(0, mask)  # of this thread
        for _ in range(20):
            outputs = module.run({"x": X // 20}, threads=3)
            if not set(outputs["where"].tolist()) <= mask or os.sched_getaffinity(0) != mask:
                problems.append((mask, outputs["where"]))

    for mask in ({CPUS[0]}, {CPUS[1]}, {CPUS[0]}):
        thread = threading.Thread(target=call, args=(mask,))
        thread.start()
        thread.join()
    assert not problems and os.sched_getaffinity(0) == set(CPUS)


def hammer(callers: int, work: Callable[[int], None]) -> None:
    """Runs work(k) in that many threads at once; raises what any of them raises."""
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_threads_on_one_model(model: Load) -> None:
    """Their inputs, sizes, errors and numbers of threads stay apart."""
    dense, observed = model("dense"), model("threads")
    expected = {k: dense.run({"x": np.full((k + 1, 64), k, "f")})["y"] for k in range(8)}

    def work(k: int) -> None:
        x = np.full((k + 1, 64), k, "f")
        bound = dense.bind({"x": x})
        for _ in range(100):
            np.testing.assert_array_equal(dense.run({"x": x})["y"], expected[k])
            np.testing.assert_array_equal(bound()["y"], expected[k])
            with pytest.raises(InputError, match=f"not {k + 2}:"):
                dense.run({"x": np.zeros([1] * (k + 2), "f")} if k else {"x": np.zeros((1, 2), "f")})
            who = observed.run({"x": np.zeros(16, "int32")}, threads=k % 3 + 1)["who"]
            assert who[0] == threading.get_native_id() and len(set(who.tolist())) <= k % 3 + 1

    hammer(8, work)


def test_calls_overlap(model: Load) -> None:
    """Python's lock is free while the compiled code runs: four calls of 0.2 s that wait for nothing."""
    module = model("threads")
    start = time.perf_counter()
    hammer(4, lambda k: module.run({"x": np.full(4, 50_000, "int32")}, threads=1))
    assert 0.2 <= time.perf_counter() - start < 0.6


def test_one_bound_call_from_several_threads(model: Load) -> None:
    x = np.ones((64, 64), "f")
    call = model("addition").bind({"x": x, "y": x})
    hammer(4, lambda k: [np.testing.assert_array_equal(call()["z"], 2 * x) for _ in range(200)])


def test_concurrent_callers_do_not_oversubscribe(artifact: Callable[..., Path]) -> None:
    module = lowering.load(artifact("threads"))
    before = workers()
    hammer(6, lambda k: [module.run({"x": X // 20}, threads=2) for _ in range(50)])
    deadline = time.monotonic() + 5  # a joined thread leaves the list a little later
    while workers() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers() <= before + 1


def test_idle_workers_sleep(model: Load) -> None:
    module = model("threads")
    module.run({"x": X}, threads=4)
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.05


def test_errors_in_workers_are_raised(tmp_path: Path) -> None:
    """A parallel loop of which one iteration fails, in the caller's share or in a worker's."""

    @T.prim_func(s_tir=True)
    def check(a: T.handle, b: T.handle) -> None:
        T.func_attr({"op_pattern": 8})
        x = T.match_buffer(a, (8,), "int32")
        y = T.match_buffer(b, (8,), "int32")
        for i in T.parallel(8):
            with T.sblock("check"):
                vi = T.axis.spatial(8, i)
                assert x[vi] >= 0, ("ValueError", ["negative"])
                y[vi] = x[vi]

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        function = builder.add_func(check, "check")
        return [builder.emit(relax.op.call_tir(function, inputs, out_ty=inputs[0].ty))]

    specs = [[modules.spec(n, "int32", 8)] for n in "xy"]
    module = lowering.load(modules.build(tmp_path / "m", *specs, body))
    for bad in ([0], [7], [0, 7], list(range(8)), []):
        x = np.arange(8, dtype="int32")
        x[bad] = -1
        for threads in (1, 2, 8):
            if bad:
                with raises("run.check_failed"):
                    module.run({"x": x}, threads=threads)
            else:
                assert (module.run({"x": x}, threads=threads)["y"] == x).all()


def test_threads_take_over_the_shares_of_slower_ones(tmp_path: Path) -> None:
    """In planned loops only: others are too short for it."""
    x = np.array([0] * 32 + [2000] * 32, "int32")
    for planned in (False, True):
        module = lowering.load(modules.threads(tmp_path / f"{planned}", planned))
        for threads in (2, 3, 8):
            who = module.run({"x": x}, threads=threads)["who"]
            rest = who[-(-who.size // threads) :]
            assert np.any(rest == who[0]) == planned, (planned, threads, who)


def test_any_number_of_threads_computes_a_long_loop(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        m (float[M, 700] a, float[700, N] b) => (float[M, N] y) { y = MatMul (a, b) }""")
    module = lowering.compile(model)
    rng = np.random.default_rng(7)
    for m, n in ((130, 130), (1, 20000), (333, 517), (20000, 3)):
        arrays = {"a": rng.standard_normal((m, 700), "f"), "b": rng.standard_normal((700, n), "f")}
        expected = module.run(arrays, threads=1)["y"]
        np.testing.assert_allclose(expected, arrays["a"].astype(float) @ arrays["b"], rtol=1e-4, atol=1e-3)
        for threads in (2, 3, 7, 40):
            np.testing.assert_array_equal(module.run(arrays, threads=threads)["y"], expected)


def test_the_most_threads_from_a_small_stack(artifact: Callable[..., Path]) -> None:
    """This is true next to other callers, and with fewer threads than the machine would make."""
    code = f"""
import threading, lowering, numpy as np
model = lowering.load({os.fspath(artifact("threads"))!r})
model.run({{"x": np.zeros(4, "int32")}})
done = []
def call():
    for threads in (1, 31, 32, 33, 64, 1024):
        who = model.run({{"x": np.full(1100, 10, "int32")}}, threads=threads)["who"]
        done.append(len(set(who.tolist())) <= threads)
threading.stack_size(128 * 1024)
callers = [threading.Thread(target=call) for _ in range(2)]
for caller in callers: caller.start()
for caller in callers: caller.join()
assert done == [True] * 12, done
set_threads = model.function("lowering_set_threads")
for threads in (10**6, 2**31, 2**62, -1, -2**40):
    set_threads(threads)
    model.run({{"x": np.zeros(16, "int32")}})
"""
    assert modules.run_python(code) == 0


def test_barriers(tmp_path: Path) -> None:
    """TVM's barrier between the parallel loops of one launch works with this pool's groups."""

    @T.prim_func
    def rotate(a: T.Buffer((64,), "int32"), b: T.Buffer((64,), "int32"), c: T.Buffer((64,), "int32")) -> None:
        with T.attr(0, "pragma_parallel_launch_point", 1):
            with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
                for i in T.parallel(64):
                    b[i] = a[i] + T.call_extern("int32", "usleep", a[i])
            for j in T.parallel(64):
                c[j] = b[(j + 32) % 64]

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        kind = inputs[0].ty
        function = builder.add_func(rotate.with_attr("op_pattern", 8), "rotate")
        return [builder.emit(relax.op.call_tir(function, inputs, out_ty=[kind, kind]))[1]]

    specs = [[modules.spec(n, "int32", 64)] for n in "xy"]
    module = lowering.load(modules.build(tmp_path / "m", *specs, body, views=False))
    x = np.random.default_rng(0).integers(0, 50, 64, dtype="int32")
    for threads in (1, 2, 5, 40):
        for _ in range(10):
            np.testing.assert_array_equal(module.run({"x": x}, threads=threads)["y"], np.roll(x, 32))


def test_a_forked_child_can_run_and_exit(artifact: Callable[..., Path]) -> None:
    """The child has none of its parent's workers, and makes its own."""
    code = f"""
import os, threading, warnings, lowering, numpy as np
warnings.simplefilter("ignore")
model = lowering.load({os.fspath(artifact("threads"))!r})
x = np.full(16, 100, "int32")
for _ in range(5):
    assert len(set(model.run({{"x": x}}, threads=3)["who"].tolist())) == 3
    stop = threading.Event()
    def others():
        while not stop.is_set(): model.run({{"x": x}}, threads=3)
    thread = threading.Thread(target=others); thread.start()
    child = os.fork()
    if child == 0:
        for _ in range(3):
            assert len(set(model.run({{"x": x}}, threads=3)["who"].tolist())) == 3
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stop.set(); thread.join()
if os.fork() == 0:
    model.run({{"x": x}}, threads=3)
    raise SystemExit(0)  # an exit that runs all destructors
assert os.wait()[1] == 0
"""
    assert modules.run_python(code) == 0


def mapped() -> set[str]:
    """The inodes of the code of models that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:model.so" in line}


def test_unloading_ends_the_workers(tmp_path: Path) -> None:
    folder = modules.threads(tmp_path / "m")
    gc.collect()
    before, loaded = workers(), mapped()
    for _ in range(3):
        module = lowering.load(folder)
        assert len(mapped()) == len(loaded) + 1
        call = module.bind({"x": X // 20}, threads=4)
        results = call()
        assert workers() == before + 3
        del module
        gc.collect()
        assert threads_of(call()) == 4, "a bound call keeps what it needs"
        del call
        gc.collect()
        assert workers() == before and threads_of(results) == 4
    gc.collect()
    assert mapped() == loaded


def test_exit_while_calls_run(artifact: Callable[..., Path]) -> None:
    """Neither idle workers nor such that compute keep the process from ending, or bring it down."""
    code = f"""
import threading, time, lowering, numpy as np
model = lowering.load({os.fspath(artifact("threads"))!r})
model.run({{"x": np.zeros(16, "int32")}}, threads=5)
endless = np.full(16, 10**9, "int32")
threading.Thread(target=lambda: model.run({{"x": endless}}, threads=3), daemon=True).start()
time.sleep(0.2)
"""
    assert modules.run_python(code) == 0


def test_signals_go_to_the_host(artifact: Callable[..., Path]) -> None:
    """A worker that took a signal would leave the host's main thread asleep."""
    code = f"""
import os, signal, threading, time, lowering, numpy as np
model = lowering.load({os.fspath(artifact("threads"))!r})
model.run({{"x": np.full(16, 100, "int32")}}, threads=4)
mine = set(os.listdir("/proc/self/task"))
for task in mine:
    blocked = next(l for l in open(f"/proc/self/task/{{task}}/status") if l.startswith("SigBlk"))
    if int(task) in model.run({{"x": np.full(16, 100, "int32")}}, threads=4)["who"] and int(task) != os.getpid():
        assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1, blocked
"""
    assert modules.run_python(code) == 0


def test_little_work_of_one_task_does_not_leave_the_next_loop_alone() -> None:
    """A matmul of one row whose depth only the run tells, then one that is enough for all threads."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (float[1, K] a, float[K, 8] b, float[256, 256] x) => (float[1, 8] y, float[256, 256] z) {
          y = MatMul (a, b)
          z = MatMul (x, x)
        }"""
    module = lowering.compile(onnx.parser.parse_model(text))
    arrays = {"a": np.ones((1, 3), "f"), "b": np.ones((3, 8), "f"), "x": np.ones((256, 256), "f")}
    before = workers()
    y, z = module.run(arrays, threads=3).values()
    assert workers() == before + 2 and (y == 3).all() and (z == 256).all()
