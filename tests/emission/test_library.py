"""Libraries for C compute what artifacts do, bit by bit, and reject what artifacts reject."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import lowering
from lowering.commands.cli import main
from lowering.compiling.bundled_sources import FOLDER
from lowering.compiling.compiler import compile_library
from tests.emission.models import BRANCHES, CASES, SEED, make_inputs, make_model
from tests.emission.test_memory_of_calls import LOOP
from tests.exports import table
from tests.support.c_libraries import CLibrary, check, load_loader
from tests.support.static_objects import StaticError

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "exports" / "samples"


def make_library(folder: Path, model: onnx.ModelProto | Path, **options: object) -> CLibrary:
    return CLibrary(folder, compile_library(folder, model, **options))  # type: ignore[arg-type]


def assert_equal(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, array in expected.items():
        assert outputs[name].shape == array.shape and outputs[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_equals_the_artifact(case: str, tmp_path: Path) -> None:
    model = make_model(*CASES[case][:2])
    library, module = make_library(tmp_path / "out", model), lowering.compile(model)
    for sizes in CASES[case][2]:
        inputs = make_inputs(model, sizes)
        expected = module.run(inputs)
        for threads in (0, 1, 2, 5):
            assert_equal(library.compute(inputs, threads), expected)
    library.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda sample: sample.name)
def test_sample(sample: Path, tmp_path: Path) -> None:
    library = make_library(tmp_path / "out", sample / "model.onnx")
    module = lowering.compile(sample / "model.onnx")
    for setting in sorted(sample.glob("*.npz")):
        inputs, _ = table.load_setting(setting)
        assert_equal(library.compute(inputs), module.run(inputs))


def test_branches(tmp_path: Path) -> None:
    model = make_model(BRANCHES, {"w": (300, 500)})
    library, module = make_library(tmp_path / "out", model), lowering.compile(model)
    inputs = {"c": np.array(True), "d": np.array(True), "x": make_inputs(model, {"n": 7})["x"]}
    bound = library.bind(inputs)
    for c, d in ((True, True), (False, True), (False, False)):  # a bound call reads the current content
        bound.inputs["c"][...], bound.inputs["d"][...] = c, d
        assert_equal(bound.run(), module.run(bound.inputs))
    bound.close()


def test_outputs_of_new_memory(tmp_path: Path) -> None:
    """The library allocates for loops, and outputs whose shape depends on data belong to the bound call."""
    model = make_model(LOOP, {"w": (3, 3)})
    library, module = make_library(tmp_path / "out", model), lowering.compile(model)
    inputs = {"count": np.array(5), "go": np.array(True), "last": np.array(9), "x": np.ones((2, 3), "f")}
    bound = library.bind(inputs)
    assert bound.describe(1)[0][0] < 0  # until the first run
    for count in (5, 0, 3):
        bound.inputs["count"][...] = count
        assert_equal(bound.run(), module.run(bound.inputs))
        assert bound.describe(1)[0] == (count, 2, 3)
    bound.close()


def test_decoder_with_static_caches(tmp_path: Path) -> None:
    """The number of tokens is read from its input in each run; caches are written in place."""
    model, slots = SAMPLES / "llama-past-dynamo23" / "model.onnx", 32
    library = make_library(tmp_path / "out", model, static_cache=slots)
    module = lowering.compile(model, static_cache=slots)
    caches = {name: np.zeros((2, 1, slots, 4), "f") for name in module.manifest.donated}
    own_caches = {name: array.copy() for name, array in caches.items()}
    ids, past = np.random.default_rng(SEED).integers(0, 32, (2, slots)), 0
    for tokens in (7, 1, 1, 23):
        inputs = {
            "input_ids": ids[:, past : past + tokens],
            "attention_mask": np.ones((2, past + tokens), np.int64),
            "past_length": np.array(past),
        }
        expected = module.run({**inputs, **caches})
        caches = {name: expected[output] for name, output in module.manifest.donated.items()}
        bound = library.bind({**inputs, **own_caches})
        assert_equal(bound.run(), expected)
        own_caches = {name: bound.inputs[name] for name in own_caches}
        past += tokens
    bound.inputs["past_length"][...] = slots
    with pytest.raises(StaticError, match=r"32"):
        bound.run()
    shared = dict.fromkeys(own_caches, next(iter(own_caches.values())))
    with pytest.raises(StaticError, match=r"donate.memory_shared.*Pass separate arrays"):
        library.bind({**inputs, **shared})


def test_calls_at_the_same_time(tmp_path: Path) -> None:
    model = make_model(*CASES["wide"][:2])
    library, module = make_library(tmp_path / "out", model), lowering.compile(model)

    def call(n: int) -> None:
        inputs = make_inputs(model, {"n": n})
        expected = module.run(inputs)
        bound = library.bind(inputs, n % 4)
        for _ in range(20):
            assert_equal(bound.run(), expected)
        bound.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(1, 30)))


def test_a_forked_child_computes(tmp_path: Path) -> None:
    model = make_model(*CASES["wide"][:2])
    library = make_library(tmp_path / "out", model)
    inputs = make_inputs(model, {"n": 100})
    expected = library.compute(inputs, 2)
    child = os.fork()
    if child == 0:
        try:
            assert_equal(library.compute(inputs, 2), expected)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_an_observer_learns_of_kernels(tmp_path: Path) -> None:
    model = make_model(*CASES["attention"][:2])
    library, module = make_library(tmp_path / "out", model), lowering.compile(model)
    inputs = make_inputs(model, {"batch": 2, "q": 7, "k": 19})
    seen: list[tuple[str, bool, list[int]]] = []
    bound = library.bind(inputs)
    observer = bound.observe(lambda *call: seen.append(call))
    assert_equal(bound.run(), module.run(inputs))
    assert observer and [name for name, is_before, _ in seen if is_before] == [c.kernel for c in module.manifest.calls]
    assert [name for name, is_before, _ in seen if not is_before] == [c.kernel for c in module.manifest.calls]
    query = bound.inputs["query"]
    assert any([query.ctypes.data, query.nbytes, *query.shape] == values[:6] for _, _, values in seen)


def test_errors_of_calls(tmp_path: Path) -> None:
    model = make_model(*CASES["embedding"][:2])
    library = make_library(tmp_path / "out", model, dims={"n": (1, 9)})
    inputs = make_inputs(model, {"batch": 2, "n": 5})

    def fail(code: str, text: str, **replaced: np.ndarray) -> None:
        with pytest.raises(StaticError, match=text) as error:
            library.bind({**inputs, **replaced})
        assert error.value.code == code

    fail("input.rank_mismatch", "'ids' must have 2 dimensions, not 1", ids=inputs["ids"][0])
    fail("input.size_mismatch", "'x' must have size 64 along axis 2, not 63", x=inputs["x"][..., 1:])
    fail("input.dimension_mismatch", "'batch' is 1 in input 'x' .axis 0. and 2", x=inputs["x"][:1])
    long = make_inputs(model, {"batch": 2, "n": 10})
    fail("input.dimension_out_of_range", "'n' is 10 in input 'ids' .axis 1., and must be 1 to 9", **long)
    ids = inputs["ids"].copy()
    ids[1, 3] = 10
    with pytest.raises(StaticError, match=r"contains 10 at \[1, 3\]") as error:
        library.compute({**inputs, "ids": ids})
    assert error.value.code == "run.index_out_of_range"
    with pytest.raises(StaticError, match="threads"):
        library.bind(inputs, 1025)
    with pytest.raises(StaticError, match="threads"):
        library.bind(inputs, -1)
    missing, null = ctypes.c_void_p(), ctypes.c_void_p()
    for arguments in ((None, None, 0, ctypes.byref(missing)), (library.model, None, 0, ctypes.byref(missing))):
        with pytest.raises(StaticError, match="must not be NULL"):
            check("bind", *arguments)
    with pytest.raises(StaticError, match="must not be NULL"):
        check("run", null, None)
    for name in ("unload", "unbind"):
        load_loader()[f"lowering_{name}"](null)


def test_errors_of_folders(tmp_path: Path) -> None:
    model = make_model(*CASES["wide"][:2])
    folder = tmp_path / "out"
    make_library(folder, model).close()

    def fail(code: str, text: str) -> None:
        handle = ctypes.c_void_p()
        with pytest.raises(StaticError, match=text) as error:
            check("load", str(folder).encode(), ctypes.byref(handle))
        assert error.value.code == code and handle.value is None

    weights = (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").write_bytes(weights[:1000])
    fail("artifact.file_truncated", "lacks")
    (folder / "weights.bin").unlink()
    fail("artifact.file_missing", "weights.bin' cannot be opened")
    (folder / "weights.bin").write_bytes(weights)
    code = (folder / "model.so").read_bytes()
    for name, content in (("a", code[:4000]), ("b", b""), ("c", code[:-1]), ("d", b"text " * 99)):
        damaged = folder / name
        damaged.mkdir()
        (damaged / "model.so").write_bytes(content)
        with pytest.raises(StaticError, match="incomplete"):
            check("load", str(damaged).encode(), ctypes.byref(ctypes.c_void_p()))
    shutil.copy(load_loader()._name, folder / "model.so.new")
    os.replace(folder / "model.so.new", folder / "model.so")
    fail("artifact.code_unloadable", "not a library of a model")


def test_names_and_needs_of_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_library(folder, make_model(*CASES["attention"][:2]))
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", "model.so"], cwd=folder, check=True, capture_output=True, text=True
    )
    assert [line.split()[-1] for line in defined.stdout.splitlines()] == ["lowering_description"]
    needed = subprocess.run(["readelf", "-d", "model.so"], cwd=folder, check=True, capture_output=True, text=True)
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", needed.stdout)) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    first = (folder / "model.so").read_bytes()
    compile_library(folder, make_model(*CASES["attention"][:2]))
    assert (folder / "model.so").read_bytes() == first


def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example as its comment says, with the checks of AddressSanitizer, UBSan and LeakSanitizer."""
    onnx.save(make_model(*CASES["wide"][:2]), tmp_path / "model.onnx")
    folder = tmp_path / "out"
    assert main(["compile", str(tmp_path / "model.onnx"), "-o", str(folder), "--emit", "library"]) == 0
    assert "y: float32['n', 500]" in capsys.readouterr().out
    source = ROOT / "examples" / "c_host" / "main.c"
    for compiler in ("gcc -std=c99 -Wpedantic", "gcc -std=c99 -fsanitize=address,undefined -g"):
        flags = [f"-I{folder}", "-Wall", "-Wextra", "-Werror", "-ldl", "-pthread", "-o", "main"]
        subprocess.run([*compiler.split(), source, folder / "lowering.c", *flags], cwd=tmp_path, check=True)
        done = subprocess.run(["./main", "out", "n=3"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        name, numbers = done.stdout.split("] ")
        y = lowering.compile(tmp_path / "model.onnx").run({"x": np.ones((3, 300), "f")})["y"]
        assert name == "y: float32[3, 500"
        np.testing.assert_allclose([float(x) for x in numbers.split()], y[0, :4], rtol=1e-5)
    failed = subprocess.run(["./main", "missing"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("[artifact.code_unloadable] ")


def test_headers_in_cpp(tmp_path: Path) -> None:
    (tmp_path / "main.cc").write_text('#include "lowering.h"\nint main() { lowering_unload(nullptr); }\n')
    subprocess.run(["gcc", "-c", FOLDER / "lowering.c", "-o", "lowering.o"], cwd=tmp_path, check=True)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{FOLDER}"]
    subprocess.run(["g++", *flags, "main.cc", "lowering.o", "-ldl", "-o", "main"], cwd=tmp_path, check=True)
    subprocess.run(["./main"], cwd=tmp_path, check=True)
