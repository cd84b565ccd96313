"""The commands, as a user types them."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from lowering.commands.cli import main

ATTENTION = """
<ir_version: 10, opset_import: ["" : 24]>
model (float[B, 4, S, 16] q, float[B, 2, T, 16] k, float[B, 2, T, 16] v) => (float[B, 4, S, 16] y) {
  [attend] y = Attention <is_causal = 1> (q, k, v)
}
"""
UNKNOWN = """
<ir_version: 10, opset_import: ["" : 24, "com.example" : 1]>
model (float[N] x) => (float[N] z, float[N] w) {
  [odd] y = com.example.Frobnicate (x)
  z = Relu (y)
  [odder] w = com.example.Frobnicate (z)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(ATTENTION), path)
    return path


def test_compile_then_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = tmp_path / "artifact"
    assert main(["compile", str(model), "--target", "cpu", "-o", str(artifact)]) == 0
    assert "q: float32['B', 4, 'S', 16]" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    options = []
    for name, heads, length in (("q", 4, 5), ("k", 2, 7), ("v", 2, 7)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((2, heads, length, 16)).astype(np.float32))
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    assert main(["run", str(artifact), *options, "--output-dir", str(tmp_path / "out")]) == 0
    y = np.load(tmp_path / "out" / "y.npy")
    feeds = {name: np.load(tmp_path / f"{name}.npy") for name in "qkv"}
    expected = onnx.reference.ReferenceEvaluator(str(model)).run(None, feeds)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("against", ["reference", "onnxruntime"])
def test_verify(model: Path, against: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--against", against, "--dim", "S=3", "--dim", "T=9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("y: max abs") and f"all outputs agree with {against}" in out


def test_verify_reports_the_first_difference(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A tolerance of zero: float32 accumulators in another order differ somewhere.
    assert main(["verify", str(model), "--dim", "S=31", "--dim", "T=65", "--rtol", "0", "--atol", "0"]) == 1
    assert "first output that differs: y" in capsys.readouterr().out


def test_check_lists_every_blocked_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "unknown.onnx"
    onnx.save(onnx.parser.parse_model(UNKNOWN), path)
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "com.example.Frobnicate-1 'odd'" in out and "com.example.Frobnicate-1 'odder'" in out
    assert "3 nodes, 2 cannot be lowered, 1 behind them could not be examined" in out
    assert main(["check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["findings"][0]["where"].endswith("'odd'")
    assert report["findings"][0]["code"] == "node.operator_unsupported"


def test_check_of_a_good_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model)]) == 0
    assert "1 nodes, 0 cannot be lowered" in capsys.readouterr().out


def test_check_counts_the_nodes_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not those that are left when x * sigmoid(x) is one."""
    text = '<ir_version: 10, opset_import: ["" : 24]> m (float[n] x) => (float[n] y) { s = Sigmoid(x) y = Mul(x, s) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx")]) == 0
    assert "2 nodes, 0 cannot be lowered" in capsys.readouterr().out


def test_who_stops_reading_is_told_nothing(model: Path) -> None:
    """As `| head` does. What is printed last waits in a buffer, and meets the closed pipe when that is emptied."""
    command = [sys.executable, "-m", "lowering", "check", str(model)]
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as child:
        os.close(writer)
        _, error = child.communicate(timeout=120)
    assert (child.returncode, error) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "missing.onnx", "-o", "out"], "There is no file missing.onnx"),
        (["compile", "MODEL", "-o", "out", "--target", "tpu"], "There is no target 'tpu'"),
        (["compile", "MODEL", "-o", "out", "--target", "cuda:sm_90"], "Did you mean cuda:sm_90a?"),
        (["compile", "MODEL", "-o", "out", "--target", "cpu:arm64"], "Did you mean cpu:aarch64?"),
        (["compile", "MODEL", "-o", "out", "--target", "native"], "Did you mean cpu?"),
        (["compile", "MODEL", "-o", "out", "--target", "GPU"], "Did you mean cuda?"),
        (["compile", "MODEL", "-o", "out", "--target", "cuda:9.0"], "Did you mean cuda:sm_90a?"),
        (["compile", "MODEL", "-o", "out", "--target", "cpu:x86_64_v3"], "Did you mean cpu:x86-64-v3?"),
        (["run", "MODEL"], "is not an artifact: it is a model file: compile it first, by `onnx-lowering compile"),
        (["compile", "MODEL", "-o", "out", "--cc", "no-such-cc"], "'no-such-cc', which is not installed"),
        (["compile", "MODEL", "-o", "out", "--donate", "cache.*"], "matches no input. The inputs are: q, k, v."),
        (["compile", "MODEL", "-o", "out", "--donate", "q"], "input 'q' cannot be donated"),
        (["compile", "MODEL", "-o", "out", "--dim", "S"], "[argument.dim_invalid]"),
        (["compile", "MODEL", "-o", "out", "--dim", "Z=1..8"], "There are: B, S, T."),
        (["compile", "MODEL", "-o", "out", "--threads", "1025"], "threads must be a whole number from 1 to 1024"),
        (["compile", "MODEL", "-o", ".."], "which is not part of an artifact, and would be replaced."),
        (["compile", "MODEL", "-o", "out", "--sign", "MODEL"], "is not a private key of Ed25519."),
        (["run", "nowhere", "--threads", "2000"], "threads must be a whole number from 1 to 1024, not 2000."),
        (["run", "nowhere"], "nowhere"),
        (["compile", ".", "-o", "out"], ". is a folder, not an .onnx file"),
        (["check", "MODEL", "--dim", "S=9..8"], "the range of dimension 'S' is empty: 9 to 8."),
        (["verify", "MODEL", "--dim", "S"], "[argument.dim_invalid]"),
        (["verify", "MODEL", "--dim", "nosuch=3"], "no input has a symbolic dimension 'nosuch'. There are: B, S, T."),
        (["verify", "MODEL", "--input", "x=x.npy"], "there is no input 'x'. The inputs are q, k, v."),
        (["verify", "MODEL", "--input", "q"], "[argument.input_invalid]"),
    ],
)
def test_errors_are_one_plain_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, message
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros(1))
    assert main([str(model) if a == "MODEL" else a for a in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error[") and message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_outputs_never_share_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever they are called: also strings, which need no pickle."""
    names = ["a/b", "a_b", "a%2Fb", "..", "é", "a b", "x\ny"]
    vectors = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in ["in", *names]]
    nodes = [onnx.helper.make_node("Add", ["in", f"c{k}"], [n]) for k, n in enumerate(names)]
    constants = [onnx.numpy_helper.from_array(np.float32(k), f"c{k}") for k in range(len(names))]
    graph = onnx.helper.make_graph(nodes, "g", vectors[:1], vectors[1:], constants)
    text = onnx.helper.make_tensor_value_info("text", onnx.TensorProto.STRING, [2])
    graph.input.append(text)
    graph.node.append(onnx.helper.make_node("Identity", ["text"], ["same"]))
    graph.output.append(onnx.helper.make_tensor_value_info("same", onnx.TensorProto.STRING, [2]))
    opset = onnx.helper.make_opsetid("", 21)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "a")]) == 0
    np.save(tmp_path / "in.npy", np.zeros(2, "f"))
    np.save(tmp_path / "text.npy", np.array(["p", "qq"]))
    options = ["--input", f"in={tmp_path}/in.npy", "--input", f"text={tmp_path}/text.npy"]
    for _ in range(2):
        assert main(["run", str(tmp_path / "a"), *options, "--output-dir", str(tmp_path / "out")]) == 0
    arrays = {path.name: np.load(path).tolist() for path in (tmp_path / "out").iterdir()}
    files = ["a%2Fb.npy", "a_b.npy", "a%252Fb.npy", "...npy", "%C3%A9.npy", "a%20b.npy", "x%0Ay.npy"]
    assert arrays == {**{name: [k, k] for k, name in enumerate(files)}, "same.npy": ["p", "qq"]}
    capsys.readouterr()
    assert main(["run", str(tmp_path / "a"), *options, "--output-dir", str(tmp_path / "in.npy")]) == 1
    assert "in.npy/a%2Fb.npy' cannot be written: " in capsys.readouterr().err


def test_signing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (tmp_path / "key.pub").write_bytes(key.public_key().public_bytes(pem, form))
    signed, unsigned = tmp_path / "signed", tmp_path / "unsigned"
    assert main(["compile", str(model), "-o", str(signed), "--sign", str(tmp_path / "key")]) == 0
    assert main(["compile", str(model), "-o", str(unsigned)]) == 0
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, heads, 3, 16), "f"))
    options = [o for name in "qkv" for o in ("--input", f"{name}={tmp_path}/{name}.npy")]
    verify = ["--verify-key", str(tmp_path / "key.pub")]
    assert main(["run", str(signed), *options, *verify]) == 0
    assert main(["bench", str(signed), *options, *verify, "--seconds", "0"]) == 0
    capsys.readouterr()
    for command in (["run", str(unsigned), *options, *verify], ["bench", str(unsigned), *options, *verify]):
        assert main(command) == 1
        assert "is not signed: it has no manifest.sig" in capsys.readouterr().err
    assert main(["compile", str(model), "-o", str(tmp_path / "no"), "--sign", str(tmp_path / "key.pub")]) == 1
    assert "is not a private key of Ed25519" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_sizes_outside_the_range_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(model), "-o", str(tmp_path / "a"), "--dim", "S=1..4"]) == 0
    options = []
    for name, heads, length in (("q", 4, 5), ("k", 2, 7), ("v", 2, 7)):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, heads, length, 16), np.float32))
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    capsys.readouterr()
    assert main(["run", str(tmp_path / "a"), *options]) == 1
    assert "'S'" in capsys.readouterr().err


def test_dump_dir_shows_every_pass(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    assert main(["compile", str(model), "-o", str(tmp_path / "a"), "--dump-dir", str(folder)]) == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "01_canonicalize.py" and any(n.endswith("_schedule.py") for n in names)
    assert {"given.onnx", "fused.onnx", "artifact.json"} <= set(names)


def test_another_dump_into_a_folder_removes_nothing_else(model: Path, tmp_path: Path) -> None:
    """Only scripts of modules, which may have been more than there are now."""
    folder = tmp_path / "dump"
    folder.mkdir()
    files = {"model.onnx": "mine", "99_mine.py": "import this\n", "manifest.json": "{}"}
    for name, text in files.items():
        (folder / name).write_text(text)
    old = folder / "99_schedule.py"
    old.write_text("# from tvm.script import ir as I\n")
    assert main(["compile", str(model), "-o", str(tmp_path / "a"), "--dump-dir", str(folder)]) == 0
    assert not old.exists() and {name: (folder / name).read_text() for name in files} == files


def test_an_interrupted_compile_leaves_nothing_half_written(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Tanh", [f"v{k}"], [f"v{k + 1}"]) for k in range(1000)]
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N"]) for n in ("v0", "v1000")]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "long.onnx")
    command = [sys.executable, "-m", "lowering", "compile", "long.onnx", "-o", "out", "--dump-dir", "dump"]
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heeded) as child:
        deadline = time.monotonic() + 120
        while not (tmp_path / "dump" / "fused.onnx").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=120)
    assert child.returncode == 130
    assert error.splitlines()[-1] == "compile was interrupted" and "Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "long.onnx"]


def test_names_that_the_locale_cannot_write(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(UNKNOWN.replace("odder", "odd")), tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.node[0].name = "größe"
    onnx.save(model, tmp_path / "m.onnx")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "lowering", "check", "m.onnx"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and r"'gr\xf6\xdfe'" in done.stdout and not done.stderr


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 2 KiB: as on a full disk, a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_room(file: BinaryIO, array: np.ndarray, allow_pickle: bool) -> None:
    """np.save onto a disk that is full after the header."""
    file.write(b"\x93NUMPY")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_outputs_that_do_not_fit_on_the_disk(
    model: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["compile", str(model), "-o", str(tmp_path / "artifact")]) == 0
    inputs = []
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, heads, 64, 16), np.float32))
        inputs += ["--input", f"{name}={tmp_path / name}.npy"]
    capsys.readouterr()
    with monkeypatch.context() as patches:
        patches.setattr(np, "save", no_room)
        assert main(["run", str(tmp_path / "artifact"), *inputs, "--output-dir", str(tmp_path / "out")]) == 1
    assert re.fullmatch(rf"error\[[a-z_.]+\]: '{tmp_path}/out/y.npy' cannot be written: .*\n", capsys.readouterr().err)
    assert not list((tmp_path / "out").iterdir())
    request.getfixturevalue("small_files")
    assert main(["run", str(tmp_path / "artifact"), *inputs]) == 1
    assert "model.so' cannot be loaded as a compiled model: [Errno 27] File too large" in capsys.readouterr().err
    assert main(["compile", str(model), "-o", str(tmp_path / "again")]) == 1
    assert "File too large" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_outputs_of_any_name_become_files_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a%2Fb", "line\nbreak", "größe"]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", f"c{k}"], [name], name=name) for k, name in enumerate(names)],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [1])],
        [value(name, onnx.TensorProto.FLOAT, [1]) for name in names],
        [onnx.numpy_helper.from_array(np.array([k], np.float32), f"c{k}") for k in range(len(names))],
    )
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, ir_version=10), path)
    assert main(["compile", str(path), "-o", str(tmp_path / "out")]) == 0
    np.save(tmp_path / "x.npy", np.zeros(1, np.float32))
    folder = tmp_path / "arrays"
    assert main(["run", str(tmp_path / "out"), "--input", f"x={tmp_path}/x.npy", "--output-dir", str(folder)]) == 0
    values = {urllib.parse.unquote(p.stem): float(np.load(p)[0]) for p in folder.iterdir()}
    assert values == {name: k for k, name in enumerate(names)}


def test_verbose_prints_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-v", "missing.onnx"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("Traceback")
        and error.splitlines()[-1] == "error[model.file_missing]: There is no file missing.onnx."
    )
