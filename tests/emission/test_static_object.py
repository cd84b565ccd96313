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
from lowering.commands.cli import main
from lowering.compiling.compiler import compile_static
from lowering.errors import InputError, ModelError, TargetError
from tests.support.error_codes import raises
from tests.support.static_objects import RUN, StaticError, StaticObject, Threads

SEED = 20261130
LINKER = {"_GLOBAL_OFFSET_TABLE_", "__tls_get_addr"}
HEAD = '<ir_version: 10, opset_import: ["" : 24]>\n'

EMBEDDING = """
m (int64[batch, n] ids, float[batch, n, 64] x) => (float[batch, n, 96] y, float[batch, n, 64] z)
{
  e = Gather<axis = 0>(table, ids)
  z = Add(x, e)
  a = MatMul(z, w)
  y = Softmax<axis = -1>(a)
}"""
ATTENTION = """
m (float[batch, 4, q, 32] query, float[batch, 2, k, 32] key, float[batch, 2, k, 32] value, bool[batch, 1, q, k] mask)
  => (float[batch, 4, q, 32] y)
{
  y = Attention(query, key, value, mask)
}"""
CACHE = """
m (float[b, 2, 24, 16] cache, float[b, 2, t, 16] fresh, int64[b] start) => (float[b, 2, 24, 16] present, float[] total)
{
  present = TensorScatter<axis = 2>(cache, fresh, start)
  total = ReduceSum<keepdims = 0>(present)
}"""
ALIASES = """
m (float[n, 8] x, int32[n] k)
  => (float[n, 8] same, float[8, n] turned, float[n, 8] relu, float[n, 8] other, int32[n] same_k)
{
  same = Identity(x)
  turned = Transpose(x)
  relu = Relu(x)
  other = Identity(relu)
  same_k = Identity(k)
}"""
WIDE = """
m (float[n, 300] x) => (float[n, 500] y)
{
  a = MatMul(x, w)
  y = Gelu(a)
}"""
BRANCHES = """
m (bool c, bool d, float[n, 300] x) => (float[n, 500] y, float[n, 300] z, float[n, 300] again)
{
  y, z = If(c) <
    then_branch = f () => (float[n, 500] a, float[n, 300] b) { a = MatMul(x, w) b = Neg(x) },
    else_branch = g () => (float[n, 500] a2, float[n, 300] b2)
    {
      b2 = If(d) <then_branch = h () => (float[n, 300] e) { e = Identity(x) },
                  else_branch = i () => (float[n, 300] e2) { e2 = Relu(x) }>
      doubled = Add(x, x)
      a2 = MatMul(doubled, w)
    }>
  again = Add(z, x)
}"""
ACOSH = "m (float[n, 5] x) => (float[n, 5] y) { y = Acosh(x) }"
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], list[dict[str, int]]]] = {
    "embedding": (EMBEDDING, {"table": (10, 64), "w": (64, 96)}, [{"batch": 2, "n": 5}, {"batch": 1, "n": 33}]),
    "attention": (ATTENTION, {}, [{"batch": 2, "q": 7, "k": 19}, {"batch": 1, "q": 1, "k": 300}]),
    "cache": (CACHE, {}, [{"b": 2, "t": 3}, {"b": 1, "t": 1}]),
    "aliases": (ALIASES, {}, [{"n": 3}, {"n": 0}, {"n": 1}]),
    "acosh": (ACOSH, {}, [{"n": 4}]),
    "wide": (WIDE, {"w": (300, 500)}, [{"n": 1}, {"n": 100}, {"n": 0}]),
}


def make_model(text: str, weights: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    rng = np.random.default_rng(SEED)
    model = onnx.parser.parse_model(HEAD + text)
    for name, shape in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    return model


def make_inputs(model: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng(SEED), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            arrays[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            arrays[value.name] = rng.integers(0, 2 if dtype.kind == "b" else 10, shape).astype(dtype)
    return arrays


def make_outputs(expected: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(bytearray(b"\xa5" * array.nbytes), array.dtype).reshape(array.shape)
            for name, array in expected.items()}  # fmt: skip


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
    for options in ({"weights": "int4"}, {"weights": "int8", "accuracy_level": 4}, {"precision": "bfloat16"}):
        folder = tmp_path / "-".join(map(str, options.values()))
        static = StaticObject(folder, compile_static(folder, model, **options))  # type: ignore[arg-type]
        expected = lowering.compile(model, **options).run(inputs)["y"]  # type: ignore[arg-type]
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


def test_builds_are_the_same_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(*CASES["embedding"][:2])
    contents = []
    for number in range(2):
        monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / f"cache{number}"))
        compile_static(tmp_path / f"out{number}", model)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / f"out{number}").iterdir()})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == ["model.h", "model.o", "weights.S", "weights.bin"]


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


TWO_MODELS = """
#include "first/model.h"
#include "second/model.h"
#include <stdlib.h>
static void* reserve(int64_t bytes) { return aligned_alloc(64, ((size_t)bytes + 64) / 64 * 64); }
int main(void) {
    lowering_error error;
    float x[256] = {1}, y[256], z[256];
    first_call first;
    second_call second;
    first.n = second.n = 2;
    first.x = x, first.y = y, second.x = y, second.y = z;
    first.weights = first_weights;
    second.threads = NULL;
    first.workspace = reserve(first_workspace_bytes(&first, &error));
    second.workspace = reserve(second_workspace_bytes(&second, &error));
    if (first_run(&first, &error) != 0 || second_run(&second, NULL) != 0) return 1;
    return y[0] != 2 || y[1] != 0 || z[0] != 0 || z[255] != 0;
}
"""


@pytest.mark.parametrize("compiler", ["gcc -std=c99 -Wpedantic", "g++ -std=c++20"])
def test_two_models_in_one_program(compiler: str, tmp_path: Path) -> None:
    text = "m (float[n, 128] x) => (float[n, 128] y) { y = %s }"
    double = make_model(text % "MatMul(x, w)", {})
    double.graph.initializer.append(onnx.numpy_helper.from_array(2 * np.eye(128, dtype="f"), "w"))
    compile_static(tmp_path / "first", double, name="first", threads=1)
    compile_static(tmp_path / "second", make_model(text % "Sub(x, x)", {}), name="second")
    (tmp_path / "main.c").write_text(TWO_MODELS)
    command = [*compiler.split(), "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "main.c", "-c", "-o", "main.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    objects = ["main.o", "first/model.o", "-Ifirst", "first/weights.S", "second/model.o"]
    subprocess.run(["gcc", *objects, "-o", "main"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "main"]).returncode == 0


def test_names_of_models_are_data(tmp_path: Path) -> None:
    """Names become C names, and cannot end a comment or a literal."""
    names = [
        "int",
        "a/b",
        "a.b",
        "weights",
        '*/ "\n#error',
        "große",
        "a/*b",
        "asm",
        "linux",
        "INT64_MAX",
        "concept",
        "HIDDEN",
    ]
    inputs = [onnx.helper.make_tensor_value_info(name, 1, ["size 1", name]) for name in names]
    outputs = [onnx.helper.make_tensor_value_info(f"{name}?", 1, ["size 1", name]) for name in names]
    nodes = [onnx.helper.make_node("Neg", [name], [f"{name}?"], name) for name in names]
    graph = onnx.helper.make_graph(nodes, "m", inputs, outputs)
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 23)])
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    assert len(set(static.fields)) == len(static.fields) == 1 + 3 * len(names) + 2
    count = len(names)
    arrays = {field: np.full((2, 3), k, "f") for k, field in enumerate(static.fields[1 + count :][: 2 * count])}
    static.run(dict.fromkeys(static.fields[: 1 + count], 3) | {"size_1": 2}, arrays)
    values = list(arrays.values())
    for x, y in zip(values[:count], values[count:]):
        np.testing.assert_array_equal(y, -x)


LOOP = """
m (int64 count, float[n] x) => (float[n] y)
{
  y = Loop(count, , x) <body = b (int64 i, bool go, float[n] v) => (bool next, float[n] w) {
    next = Identity(go)
    w = Neg(v)
  }>
}"""
UNEQUAL = """
m (bool c, float[n] x) => (float[k] y)
{
  y = If(c) <then_branch = g () => (float[k] a) { a = Concat<axis = 0>(x, x) },
             else_branch = h () => (float[k] b) { b = Relu(x) }>
}"""
DYNAMIC = "m (float[n] x) => (int64[1, count] y) { y = NonZero(x) }"


def test_rejected_models(tmp_path: Path) -> None:
    """A model that cannot be a static object is rejected before anything is written."""
    model = make_model(ALIASES, {})
    folder = tmp_path / "out"
    compile_static(folder, model)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for text in (LOOP, UNEQUAL, DYNAMIC):
        with raises("static.unsupported", kind=ModelError):
            compile_static(folder, make_model(text, {}))
    for name in ("", "1st", "a-b", "a b"):
        with raises("static.name_invalid", kind=InputError):
            compile_static(folder, model, name=name)
    with raises("static.strings_unsupported", kind=ModelError):
        compile_static(folder, make_model("m (string[n] x) => (string[n] y) { y = Identity(x) }", {}))
    with raises("static.serve_unsupported", kind=InputError):
        compile_static(folder, model, serve=lowering.Serve(context=32))
    with raises("static.target_unsupported", kind=InputError):
        compile_static(folder, model, "cuda:sm_90a")
    with raises("toolchain.linker_missing", kind=TargetError):
        compile_static(folder, model, cc="no-such-compiler")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(make_model(*CASES["embedding"][:2]), tmp_path / "model.onnx")
    command = ["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out")]
    assert main([*command, "--emit", "static", "--name", "encoder"]) == 0
    assert "x: float32['batch', 'n', 64]" in capsys.readouterr().out
    assert "int encoder_run(const encoder_call* call" in (tmp_path / "out" / "model.h").read_text()
    for options, code in (
        (["--emit", "static", "--sign", "key.pem"], "static.sign_unsupported"),
        (["--name", "encoder"], "argument.name_without_static"),
    ):
        assert main([*command, *options]) == 1
        assert f"error[{code}]" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.o").exists()
    assert main(command) == 0  # replaced by an artifact
    assert (tmp_path / "out" / "manifest.json").exists() and not (tmp_path / "out" / "model.o").exists()
