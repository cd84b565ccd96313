"""The files of static objects: reproducible, valid C and C++ for any names, written whole or not at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import lowering
from lowering.commands.cli import main
from lowering.compiling.compiler import compile_static
from lowering.errors import InputError, ModelError, TargetError
from tests.emission.models import ALIASES, CASES, make_model
from tests.support.error_codes import raises
from tests.support.static_objects import StaticObject


@pytest.mark.parametrize("case", ["embedding", "attention", "wide"])
def test_builds_are_the_same_byte_by_byte(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache, and with cached kernels, which are not scheduled again."""
    model = make_model(*CASES[case][:2])
    contents = []
    for number, cache in enumerate(("cache", "cache", "other")):
        monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / cache))
        compile_static(tmp_path / f"out{number}", model)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / f"out{number}").iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert {"model.h", "model.o"} <= set(contents[0]) <= {"model.h", "model.o", "weights.S", "weights.bin"}


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


def test_rejected_models(tmp_path: Path) -> None:
    """A model that cannot be a static object is rejected before anything is written."""
    model = make_model(ALIASES, {})
    folder = tmp_path / "out"
    compile_static(folder, model)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
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
