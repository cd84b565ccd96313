"""Static objects compute what artifacts do, bit by bit, in no memory but the caller's, and refuse what is wrong."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import lowering
from lowering.compiling.compiler import compile_static
from tests.emission.models import BRANCHES, CACHE, CASES, WIDE, make_inputs, make_model, make_outputs
from tests.support.static_objects import RUN, StaticError, StaticObject, Threads

LINKER = {"_GLOBAL_OFFSET_TABLE_", "__tls_get_addr"}


@pytest.fixture(scope="module")
def static_objects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a case's name and options to its model and its static object, static_objects once."""
    objects: dict[Any, tuple[onnx.ModelProto, StaticObject]] = {}

    def make(case: str, **options: Any) -> tuple[onnx.ModelProto, StaticObject]:
        key = (case, tuple(sorted(options.items())))
        if key not in objects:
            folder = tmp_path_factory.mktemp(case) / "out"
            model = make_model(*CASES[case][:2])
            objects[key] = model, StaticObject(folder, compile_static(folder, model, **options))
        return objects[key]

    return make


@pytest.mark.parametrize("target", ["cpu", "cpu:x86-64-v3"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_artifact(case: str, target: str, static_objects: Any) -> None:
    model, static = static_objects(case, target=target)
    module = lowering.compile(model, target=target)
    for sizes in CASES[case][2]:
        inputs = make_inputs(model, sizes)
        expected = module.run(inputs)
        outputs = make_outputs(expected)
        static.run(sizes, {**inputs, **outputs})
        for name, array in expected.items():
            np.testing.assert_array_equal(
                outputs[name].reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8), err_msg=name
            )


def test_branches(tmp_path: Path) -> None:
    model = make_model(BRANCHES, {"w": (300, 500)})
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    module = lowering.compile(model)
    x = make_inputs(model, {"n": 7})["x"]
    for c, d in itertools.product((False, True), repeat=2):
        inputs = {"c": np.array(c), "d": np.array(d), "x": x}
        expected = module.run(inputs)
        outputs = make_outputs(expected)
        static.run({"n": 7}, {**inputs, **outputs})
        for name, array in expected.items():
            np.testing.assert_array_equal(outputs[name], array, err_msg=f"{name} {c} {d}")


def test_quantized_weights_and_half_precision(tmp_path: Path) -> None:
    model = make_model(WIDE, {"w": (300, 500)})
    inputs = make_inputs(model, {"n": 9})
    choices: list[dict[str, Any]] = [
        {"weights": "int4"},
        {"weights": "int8", "accuracy_level": 4},
        {"precision": "bfloat16"},
    ]
    for options in choices:
        folder = tmp_path / "-".join(map(str, options.values()))
        static = StaticObject(folder, compile_static(folder, model, **options))
        expected = lowering.compile(model, **options).run(inputs)["y"]
        y = np.full((9, 500), np.nan, "f")
        static.run({"n": 9}, {**inputs, "y": y})
        np.testing.assert_array_equal(y, expected)


def test_donated_caches_are_written_in_place(tmp_path: Path) -> None:
    model = make_model(CACHE, {})
    manifest = compile_static(tmp_path / "out", model, donate=["cache"])
    static = StaticObject(tmp_path / "out", manifest)
    assert manifest.donated == {"cache": "present"} and "present" not in static.fields
    inputs = make_inputs(model, {"b": 2, "t": 3})
    expected = lowering.compile(model).run(inputs)
    total = np.zeros((), "f")
    static.run({"b": 2, "t": 3}, {**inputs, "total": total})
    np.testing.assert_array_equal(inputs["cache"], expected["present"])
    np.testing.assert_array_equal(total, expected["total"])


def share(pool: ThreadPoolExecutor, count: int, seen: list[int]) -> Threads:
    """Return threads that run the tasks of a loop in a pool, in another order than they are numbered."""

    def run(_: int, task: Any, data: int, tasks: int) -> None:
        seen.append(tasks)
        list(pool.map(lambda number: task(data, number), reversed(range(tasks))))

    return Threads(None, count, RUN(run))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_of_the_caller(count: int, static_objects: Any) -> None:
    model, static = static_objects("wide")
    inputs = make_inputs(model, {"n": 64})
    expected = lowering.compile(model).run(inputs)["y"]
    seen: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        threads = share(pool, count, seen)
        unshared, shared = (np.full((64, 500), np.nan, "f") for _ in range(2))
        needed = len(static.run({"n": 64}, {**inputs, "y": unshared}))
        with_threads = len(static.run({"n": 64}, {**inputs, "y": shared}, threads))
    assert seen and set(seen) == {count}
    assert with_threads >= needed and (count == 1) == (with_threads == needed)
    np.testing.assert_array_equal(unshared, expected)
    np.testing.assert_array_equal(shared, expected)


def test_calls_at_the_same_time(static_objects: Any) -> None:
    model, static = static_objects("embedding")
    module = lowering.compile(model)

    def call(n: int) -> None:
        inputs = make_inputs(model, {"batch": 2, "n": n})
        outputs = make_outputs(module.run(inputs))
        for _ in range(20):
            static.run({"batch": 2, "n": n}, {**inputs, **outputs})
        for name, array in module.run(inputs).items():
            np.testing.assert_array_equal(outputs[name], array)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(1, 17)))


def test_errors(static_objects: Any) -> None:
    model, static = static_objects("embedding")
    sizes = {"batch": 2, "n": 5}
    inputs = make_inputs(model, sizes)
    arrays = {**inputs, **make_outputs(lowering.compile(model).run(inputs))}

    def fail(code: str, changed: Mapping[str, int] = {}, **replaced: Any) -> str:
        with pytest.raises(StaticError) as caught:
            static.run({**sizes, **changed}, {**arrays, **replaced})
        assert caught.value.code == code
        return caught.value.text

    assert "'n' is -1, and must be 0 to" in fail("input.dimension_out_of_range", {"n": -1})
    fail("input.dimension_out_of_range", {"batch": 2**63 - 1})
    fail("run.out_of_memory", {"batch": 2**40, "n": 2**40})
    arrays["ids"][1, 3] = 10
    assert "contains 10 at [1, 3], and dimension 0 of input 'table'" in fail("run.index_out_of_range")
    arrays["ids"][1, 3] = -11
    fail("run.index_out_of_range")
    arrays["ids"][1, 3] = -10
    static.run(sizes, arrays)
    memory = np.zeros(arrays["x"].nbytes + 8, np.uint8)
    assert "'x' does not begin at a multiple of 4" in fail("run.tensor_unaligned", x=memory[1:])
    for field in ("ids", "x", "y", "z", "weights", "workspace"):
        call = static.make_call({**sizes, **{name: array.ctypes.data for name, array in arrays.items()}})
        workspace = np.zeros(static.call("workspace_bytes", call) + 64, np.uint8)
        call.workspace = workspace.ctypes.data + -workspace.ctypes.data % 64
        static.call("run", call)
        setattr(call, field, 0)
        with pytest.raises(StaticError, match=f"'{field}' is NULL"):
            static.call("run", call)
        assert static.library.model_run(ctypes.byref(call), None) == -1  # no record for the error
    assert static.library.model_run(None, None) == static.library.model_workspace_bytes(None, None) == -1
    with pytest.raises(StaticError, match="threads of the call"):
        static.run(sizes, arrays, Threads(None, 2, RUN()))
    for count in (0, -1, 1025):
        with pytest.raises(StaticError, match="threads"):
            static.run(sizes, arrays, Threads(None, count, RUN(lambda *_: None)))


def test_inputs_larger_than_any_memory(tmp_path: Path) -> None:
    """Bytes that wrap to 0 in 64 bits are not those of an empty tensor, which may be NULL."""
    model = make_model("m (float[n, k] x) => (float[n] y) { y = ReduceSum<keepdims = 0>(x, axes) }", {})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axes"))
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    with pytest.raises(StaticError) as caught:
        static.run({"n": 2**22, "k": 2**40}, {"y": np.zeros(2**22, "f")})
    assert caught.value.code == "run.out_of_memory"
    static.run({"n": 0, "k": 2**40}, {})


def test_sizes_below_those_of_the_model(tmp_path: Path) -> None:
    """A window larger than its input makes sizes inside negative: no memory before the workspace is theirs."""
    text = """
m (float[n, 64] x, float[1, 8, n, 8] img) => (float[n, 512] y, float[1, 64, q, 8] z)
{
  y = MatMul(x, w)
  b = Conv<dilations = [400, 1], strides = [2, 1]>(img, v)
  z = Conv(b, u)
}"""
    model = make_model(text, {"w": (64, 512), "v": (256, 8, 3, 1), "u": (64, 256, 1, 1)})
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    small = {"x": np.zeros((5, 64), "f"), "img": np.zeros((1, 8, 5, 8), "f"), "y": np.zeros((5, 512), "f")}
    with pytest.raises(StaticError) as caught:
        static.run({"n": 5}, {**small, "z": np.zeros(8, "f")})
    assert caught.value.code == "node.window_too_large"
    inputs = make_inputs(model, {"n": 805})
    expected = lowering.compile(model).run(inputs)
    outputs = make_outputs(expected)
    static.run({"n": 805}, {**inputs, **outputs})
    np.testing.assert_array_equal(outputs["z"], expected["z"])


def test_an_error_inside_leaves_no_state(static_objects: Any) -> None:
    model, static = static_objects("embedding")
    sizes = {"batch": 1, "n": 3}
    inputs = make_inputs(model, sizes)
    expected = lowering.compile(model).run(inputs)
    broken = {**inputs, "ids": np.full((1, 3), 99)}
    outputs = make_outputs(expected)
    for arrays in (broken, inputs, broken, inputs):
        try:
            static.run(sizes, {**arrays, **outputs})
        except StaticError as error:
            assert error.code == "run.index_out_of_range" and arrays is broken
    np.testing.assert_array_equal(outputs["y"], expected["y"])


def test_names_of_the_object(static_objects: Any) -> None:
    """It defines its functions, and needs what the header says, which are functions of C's mathematics at most."""
    for case in CASES:
        _, static = static_objects(case)
        header = (static.folder / "model.h").read_text()
        (said,) = re.findall(r"Functions of a C library that it calls: (.*)\.$", header, re.MULTILINE)
        text = subprocess.run(["nm", "-g", "model.o"], cwd=static.folder, capture_output=True, text=True, check=True)
        names = {tuple(line.split()[-2:]) for line in text.stdout.splitlines()}
        assert {name for kind, name in names if kind != "U"} == {"model_run", "model_workspace_bytes"}
        needed = {name for kind, name in names if kind == "U"}
        assert (sorted(needed - LINKER) or ["none"]) == said.split(", ")
        assert needed <= {"memcpy", "memset", *LINKER, *(["acoshf"] if case == "acosh" else [])}


def test_a_size_of_zero_divides(tmp_path: Path) -> None:
    """Sizes that a caller gives may be 0, also where the model divides by them."""
    text = """
m (float[n, k] x, float[r, 2] z) => (float[r, c] y)
{
  rows = Shape<start = 0, end = 1>(z)
  rest = Constant<value_ints = [-1]>()
  shape = Concat<axis = 0>(rows, rest)
  y = Reshape(x, shape)
}"""
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", make_model(text, {})))
    x, y = np.arange(24, dtype="f").reshape(4, 6), np.zeros((3, 8), "f")
    static.run({"n": 4, "k": 6, "r": 3}, {"x": x, "z": np.zeros((3, 2), "f"), "y": y})
    np.testing.assert_array_equal(y, x.reshape(3, 8))
    with pytest.raises(StaticError):
        static.run({"n": 4, "k": 6, "r": 0}, {"x": x, "y": y})
