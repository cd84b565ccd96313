"""Who compiles sees what it is at: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

import lowering
from lowering.compiling import pipeline
from lowering.compiling.progress import watched

PROTO = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 23]> m (float[N] x, float[N] z) => (float[N] y, float[N] s) '
    "{ y = Cos (x) s = Softmax (z) }"
)


def test_stages_come_in_order_and_all_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path))
    told: list[tuple[str, int, int]] = []
    with watched(lambda *stage: told.append(stage)):
        lowering.compile(PROTO)
    assert list(dict.fromkeys(name for name, *_ in told)) == [
        "reading the model",
        "lowering",
        "compiling kernels",
        "linking",
    ]
    kernels = [(done, of) for name, done, of in told if name == "compiling kernels"]
    assert kernels == [(k + 1, len(kernels)) for k in range(len(kernels))] and len(kernels) >= 2
    told.clear()
    lowering.compile(PROTO)
    assert not told


def test_a_terminal_shows_stages_and_a_file_does_not(tmp_path: Path) -> None:
    onnx.save(PROTO, tmp_path / "m.onnx")
    command = [sys.executable, "-m", "lowering", "compile", "m.onnx", "-o", "out"]
    environment = os.environ | {"ONNX_LOWERING_CACHE": str(tmp_path / "cache"), "TERM": "xterm"}
    outside, inside = pty.openpty()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=inside)
    os.close(inside)
    shown = b""
    try:
        while part := os.read(outside, 4096):
            shown += part
    except OSError:  # what Linux says where the last writer is gone
        pass
    assert process.wait() == 0 and b"lowering" in shown and b"linking" in shown
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert not done.stderr
    y = lowering.load(tmp_path / "out").run({"x": np.zeros(2, np.float32), "z": np.zeros(2, np.float32)})["y"]
    assert y.tolist() == [1, 1]


def test_an_interrupt_in_the_middle_of_a_pass_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM makes a RuntimeError of it where it calls Python, and a pass that fails is a fault of ours."""

    def interrupted(mod: tvm.IRModule, ctx: object) -> tvm.IRModule:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return mod

    monkeypatch.setattr(pipeline, "one_shape", tvm.transform.module_pass(interrupted, opt_level=0))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            lowering.compile(PROTO)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
