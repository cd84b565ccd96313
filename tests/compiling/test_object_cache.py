"""Code of kernels that was compiled once is found again, and nothing else is ever linked."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
import tvm
from tvm import tirx

import lowering
import schedules
from lowering.commands.cli import main
from lowering.compiling import objects
from lowering.compiling.cache import object_cache
from lowering.compiling.cache.fingerprints import fingerprint_program
from tests.support.this_machine import WIDEST

TEXT = """
    m (float[N, 24] x) => (float[N, 40] {y}) <float[24, 40] w, float[40] b> {{
      p = MatMul (x, w)
      s = Add (p, b)
      {y} = Relu (s)
    }}
"""


def model(seed: int = 0, y: str = "y") -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {TEXT.format(y=y)}')
    rng = np.random.default_rng(seed)
    del proto.graph.initializer[:]
    for name, shape in (("w", (24, 40)), ("b", (40,))):
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        )
    return proto


def right(compiled: lowering.Model, proto: onnx.ModelProto) -> bool:
    w, b = map(onnx.numpy_helper.to_array, proto.graph.initializer)
    x = np.random.default_rng(1).standard_normal((3, 24)).astype(np.float32)
    (actual,) = compiled.run({"x": x}).values()
    return np.allclose(actual, np.maximum(x @ w + b, 0), rtol=1e-4, atol=1e-5)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Symbols of the kernels that are compiled from now on, with a cache of this test alone."""
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "cache"))
    symbols: list[str] = []
    compile_kernel = objects.KernelCompiler.compiled

    def record_symbol(self: objects.KernelCompiler, func, target) -> bytes:
        symbols.append(str(func.attrs["global_symbol"]))
        return compile_kernel(self, func, target)

    monkeypatch.setattr(objects.KernelCompiler, "compiled", record_symbol)
    return symbols


def test_a_second_compile_only_links(compiled: list[str], tmp_path: Path) -> None:
    lowering.compile(model()).save(tmp_path / "first")
    assert compiled
    compiled.clear()
    again = lowering.compile(model())
    again.save(tmp_path / "second")
    assert not compiled and right(again, model())
    assert (tmp_path / "first" / "model.so").read_bytes() == (tmp_path / "second" / "model.so").read_bytes()


def test_other_weights_and_names_share_code_and_other_targets_do_not(compiled: list[str], tmp_path: Path) -> None:
    lowering.compile(model())
    compiled.clear()
    other = model(seed=7, y="result")
    assert right(lowering.compile(other), other) and not compiled
    from lowering.compiling.compiler import compile_to

    other_target = next(level for level in ("x86-64-v3", "x86-64-v4") if level != WIDEST)
    compile_to(tmp_path / "out", model(), f"cpu:{other_target}")
    assert compiled


def test_what_has_code_is_not_scheduled_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody looks inside, or the sources are others."""
    lowering.compile(model())
    compiled.clear()
    scheduled: list[tirx.PrimFunc] = []
    schedule = schedules.made

    def record_function(func: tirx.PrimFunc, *how: Any) -> tirx.PrimFunc:
        scheduled.append(func)
        return schedule(func, *how)

    monkeypatch.setattr(schedules, "made", record_function)
    other = model(seed=3, y="z")
    model_of_other = lowering.compile(other)
    assert not scheduled and right(model_of_other, other)
    assert [(k.schedule, k.kind) for k in model_of_other.manifest.kernels] == [("matmul", "matmul")]
    lowering.compile(model(), dump=lambda name, module: None)
    assert scheduled and not compiled
    scheduled.clear()
    monkeypatch.setattr(objects, "sources", lambda: "other sources")
    lowering.compile(model())
    assert scheduled and not compiled


def test_one_file_may_be_several_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ccache, or clang, which compile for what they are called."""
    (tmp_path / "driver").write_text("#!/bin/sh\n")
    (tmp_path / "driver").chmod(0o755)
    for name in ("here-cc", "there-cc"):
        (tmp_path / name).symlink_to("driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fingerprint_program("here-cc") == fingerprint_program("here-cc") != fingerprint_program("there-cc")


@pytest.mark.parametrize("harm", ["short", "other", "empty"])
def test_what_is_not_whole_is_compiled_anew(compiled: list[str], harm: str) -> None:
    lowering.compile(model())
    count = len(compiled)
    for path in object_cache.folder().iterdir():
        content = path.read_bytes()
        path.write_bytes({"short": content[:-9], "other": content[:-1] + b"!", "empty": b""}[harm])
    compiled.clear()
    assert right(lowering.compile(model()), model()) and len(compiled) == count


def test_a_cache_that_cannot_be_written_is_none(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "file"))
    assert right(lowering.compile(model()), model()) and compiled


def test_the_least_recently_used_go_first(compiled: list[str]) -> None:
    for k in range(5):
        object_cache.put(f"k{k}", bytes(1000))
        os.utime(object_cache.folder() / f"k{k}.object", (k, k))
    assert object_cache.get("k0") == bytes(1000)  # is used now
    killed = object_cache.folder() / ".written"
    killed.touch()
    os.utime(killed, (0, 0))
    writing = object_cache.folder() / ".writing"
    writing.touch()
    entry = (object_cache.folder() / "k0.object").stat()
    object_cache.trim(max_bytes=int(2.5 * max(entry.st_size, entry.st_blocks * 512)))
    assert [object_cache.get(f"k{k}") is not None for k in range(5)] == [True, False, False, False, True]
    assert not killed.exists() and writing.exists()


def test_many_files_are_seldom_looked_at(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(object_cache, "trim", lambda: looks.append(1))
    for operator in ("Exp", "Tanh", "Erf"):
        other = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 23]> g (float[n] x) => (float[n] y) {{ y = {operator}(x) }}'
        )
        lowering.compile(other)
    assert len(compiled) > 2 and len(looks) == 1
    stamp = object_cache.folder() / ".trimmed"
    os.utime(stamp, (0, 0))
    object_cache.trim_seldom()
    assert len(looks) == 2 and time.time() - stamp.stat().st_mtime < 60


def test_writers_may_race(compiled: list[str]) -> None:
    """Readers see all of one writer's bytes or none."""
    stop, wrong = time.monotonic() + 0.5, []

    def write(byte: int) -> None:
        while time.monotonic() < stop:
            object_cache.put("raced", bytes([byte]) * 100_000)
            stored = object_cache.get("raced")
            if stored is not None and len(set(stored)) != 1:
                wrong.append(stored)

    threads = [threading.Thread(target=write, args=(byte,)) for byte in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and object_cache.get("raced")


def test_show_and_clear(compiled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lowering.compile(model())
    assert main(["cache", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kernels"]["count"] == len(set(compiled)) and shown["kernels"]["bytes"] > 1000
    assert main(["cache", "clear"]) == 0 and "removed" in capsys.readouterr().out
    assert object_cache.size() == (0, 0)


def test_arguments_are_checked_once(tmp_path: Path) -> None:
    """By the model, and not by every kernel again: ranks, types, sizes and where elements are."""
    compiled_model = lowering.compile(model())
    compiled_model.save(tmp_path / "m")
    assert b".ndim on argument #" not in (tmp_path / "m" / "model.so").read_bytes()
    for wrong in (np.zeros((3, 23), "float32"), np.zeros(24, "float32"), np.zeros((3, 24), "int32")):
        with pytest.raises(lowering.LoweringError):
            compiled_model.run({"x": wrong})
    rows = tvm.runtime.tensor(np.zeros((6, 24), np.float32))
    with pytest.raises(lowering.InputError, match="byte offset"):
        compiled_model.run({"x": rows._create_view((2, 24), "float32", relative_byte_offset=4 * 24)})


def test_donated_memory_with_an_offset_is_untouched() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
        m (float[n, s, 4] p, float[n, t, 4] u, int64[n] w) => (float[n, s, 4] y) {
          y = TensorScatter <axis = 1> (p, u, w)
        }"""
    cache = tvm.runtime.tensor(np.zeros((2, 3, 4), np.float32))
    feeds = {"p": cache._create_view((1, 3, 4), "float32", relative_byte_offset=48), "w": np.array([1])}
    with pytest.raises(lowering.InputError, match="byte offset"):
        lowering.compile(onnx.parser.parse_model(text), donate=["p"]).run(
            {**feeds, "u": np.ones((1, 1, 4), np.float32)}
        )
    assert not cache.numpy().any()
