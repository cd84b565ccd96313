"""Arrays at any address their elements may have, at the widths of AVX2 and AVX-512."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

import lowering
from lowering.passes.tvm_workarounds.alignment import assume_alignment
from tests.runtime import modules
from tests.support.pass_states import make_state
from tests.support.this_machine import LEVELS

TARGETS = [f"cpu:{level}" for level in LEVELS[1:]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float16"])
def test_every_offset(artifact: Callable[..., Path], target: str, dtype: str) -> None:
    """Static shapes of whole vectors, where code generation makes the most of alignment."""
    module = lowering.load(artifact("addition", dtype, (16, 64), target=target))
    size = np.dtype(dtype).itemsize
    buffer = np.random.default_rng(0).integers(-50, 50, 3 * 1024 + 512).astype(dtype)
    start = -(buffer.__array_interface__["data"][0] // size) % (64 // size)
    for offset in range(start, start + 64 // size):
        x = buffer[offset : offset + 1024].reshape(16, 64)
        y = buffer[offset + 1025 : offset + 2049].reshape(16, 64)
        z = np.zeros(2048, dtype)[offset % 64 :][:1024].reshape(16, 64)
        np.testing.assert_array_equal(module.run({"x": x, "y": y})["z"], x + y)
        module.bind({"x": x, "y": y}, {"z": z})()
        np.testing.assert_array_equal(z, x + y)


@pytest.mark.optimized  # other code was seen not to crash
@pytest.mark.parametrize("target", TARGETS[:1])
def test_without_the_pass_it_crashes(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should TVM stop assuming alignment one day, the pass may go."""
    monkeypatch.setattr(modules, "assume_alignment", lambda state: state)
    folder = modules.addition(tmp_path / "m", "float32", (16, 64), target=target)
    code = f"""
import lowering, numpy as np
x = np.zeros(1026, "f")
x = x[1 - x.__array_interface__["data"][0] // 4 % 2 :][:1024].reshape(16, 64)
lowering.load({os.fspath(folder)!r}).run({{"x": x, "y": x}})
"""
    assert modules.run_python(code) < 0


def test_only_memory_from_outside_is_changed() -> None:
    @T.prim_func(s_tir=True)
    def copy(a: T.handle, b: T.handle) -> None:
        x = T.match_buffer(a, (4, 16), "float16")
        y = T.match_buffer(b, (4, 16), "float32", align=128)
        for i in range(4):
            with T.sblock("row"):
                vi = T.axis.spatial(4, i)
                T.reads(x[vi, 0:16])
                T.writes(y[vi, 0:16])
                row = T.match_buffer(x[vi, 0:16], (16,), "float16", offset_factor=1)
                copied = T.sblock_alloc_buffer((16,), "float32")
                for j in range(16):
                    copied[j] = T.cast(row[j], "float32")
                for j in range(16):
                    y[vi, j] = copied[j]

    before = tvm.IRModule({"copy": copy})
    after = assume_alignment(make_state(before)).module["copy"]
    script = after.script()
    assert [p.data_alignment for p in after.params] == [2, 4]
    assert script.count("align=2") == 2 and script.count("align=4") == 1
    assert [p.data_alignment for p in before["copy"].params] == [64, 128], "the module passed in stays as it was"
