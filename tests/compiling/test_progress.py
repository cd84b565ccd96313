"""Compilation shows its progress: on a terminal, and nowhere else."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

import lowering
from lowering.compiling import compilation, pipeline
from lowering.compiling.progress import watch_progress
from lowering.passes.compile_state import lift

PROTO = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 23]> m (float[N] x, float[N] z) => (float[N] y, float[N] s) '
    "{ y = Cos (x) s = Softmax (z) }"
)


def test_stages_come_in_order_and_all_kernels_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path))
    told: list[tuple[str, int, int]] = []
    with watch_progress(lambda *stage: told.append(stage)):
        lowering.compile(PROTO)
    assert list(dict.fromkeys(name for name, *_ in told)) == [
        "reading the model",
        "fusing",
        "importing",
        "lowering",
        "compiling kernels",
        "generating code",
        "linking",
        "writing",
    ]
    kernels = [(done, total) for name, done, total in told if name == "compiling kernels"]
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
        while chunk := os.read(outside, 4096):
            shown += chunk
    except OSError:  # what Linux says where the last writer is gone
        pass
    assert process.wait() == 0 and b"lowering" in shown and b"linking" in shown
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "/?" not in plain  # no count of what nobody counts
    counted = re.search(r"compiling kernels [^\r\n]*?(\d+)/(\d+)", plain)
    assert counted is not None and int(counted[1]) <= int(counted[2])
    assert not re.search(r"(linking|writing|importing) [^\r\n]*\d/\d", plain)  # a count is of its own stage
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert not done.stderr
    y = lowering.load(tmp_path / "out").run({"x": np.zeros(2, np.float32), "z": np.zeros(2, np.float32)})["y"]
    assert y.tolist() == [1, 1]


def test_the_log_has_stages_rules_and_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For whoever uses the library: kernels are compiled once, and found again."""
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path))
    swish = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 24]> m (float[N] x) => (float[N] y) { s = Sigmoid(x) y = Mul(x, s) }'
    )
    for compiled in ("2 kernels compiled, 0", "0 kernels compiled, 2"):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "lowering"):
            lowering.compile(swish)
        said = [record.getMessage() for record in caplog.records]
        levels = {record.getMessage().partition(":")[0]: record.levelname for record in caplog.records}
        assert levels["fusing"] == levels["linking"] == levels["FuseSwish"] == "INFO"
        assert "FuseSwish: 1 times" in said and any(text.startswith(f"{compiled} from the cache: ") for text in said)
        assert "pass fuse_ops" in levels and any(n.startswith("kernel ") for n in levels) == ("2 k" in compiled)
    caplog.clear()
    lowering.compile(swish)
    assert not caplog.records


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_logs_on_stderr(tmp_path: Path, terminal: bool) -> None:
    """Whole lines, above the bar of a terminal, and nothing among the JSON on stdout."""
    onnx.save(PROTO, tmp_path / "m.onnx")
    command = [sys.executable, "-m", "lowering", "compile", "m.onnx", "-o", "out", "-v", "--json"]
    environment = os.environ | {"ONNX_LOWERING_CACHE": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "200"}
    outside, inside = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=inside)
    os.close(inside)
    shown = b""
    with suppress(OSError):  # what Linux says where the last writer of a terminal is gone
        while chunk := os.read(outside, 4096):
            shown += chunk
    document, _ = process.communicate()
    assert process.returncode == 0 and json.loads(document)["output"] == "out"
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).replace(b"\r", b"\n").decode()
    for line in (r"reading the model: \d+\.\d\d s", r"\d+ kernels compiled, 0 from the cache: .* s", "writing: .* s"):
        assert re.search(rf"^{line}$", plain, re.M), plain
    assert ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in plain) == terminal


def test_an_interrupt_in_the_middle_of_a_pass_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM makes a RuntimeError of it where it calls Python, and a pass that fails is a fault of ours."""

    def interrupted(mod: tvm.IRModule, ctx: object) -> tvm.IRModule:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return mod

    entry = pipeline.Pass("interrupted", lift(tvm.transform.module_pass(interrupted, opt_level=0)))
    monkeypatch.setattr(compilation, "PASSES", (*pipeline.PASSES[:20], entry, *pipeline.PASSES[20:]))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            lowering.compile(PROTO)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
