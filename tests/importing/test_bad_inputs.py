"""A table of bad inputs to every command and to the Python interface: each is refused in one sentence that says where.

The sentences must never contain the package's internal words, nor Python's tracebacks.
"""

from __future__ import annotations

import logging
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from lowering.commands.cli import main
from lowering.errors import LoweringError
from tests.cases.bad_model_cases import MODELS, text, with_constant, with_values
from tests.support.error_codes import raises

FOREIGN = re.compile(
    r"match_cast|heap_data|storage allocation|Check failed|TVM|T\.int64|Traceback|ErrorContext|std::|0x"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the cases name: an artifact of x + z with sizes that must be equal, and arrays."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "w.bin").write_bytes(bytes(32))
    model = folder / "good.onnx"
    model.write_bytes(text("m (float[N] x, float[M] z) => (float[N] y) { [adds] y = Add (x, z) }"))
    assert main(["compile", str(model), "-o", str(folder / "good")]) == 0
    for name, array in {
        "x3": np.zeros(3, np.float32),
        "x4": np.zeros(4, np.float32),
        "double": np.zeros(3),
        "matrix": np.zeros((3, 1), np.float32),
    }.items():
        np.save(folder / f"{name}.npy", array)
    good = (folder / "x3.npy").read_bytes()
    np.save(folder / "pickled.npy", np.array([{}], object), allow_pickle=True)
    (folder / "short.npy").write_bytes(good[:-5])
    (folder / "text.npy").write_text("no array")
    (folder / "nothing.npy").write_bytes(b"")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    (folder / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    (folder / "file").write_text("in the way")
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("somebody's")
    return folder


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert not FOREIGN.search(captured.out + captured.err), captured
    return captured.err


@pytest.mark.parametrize("command", ["check", "compile", "verify"])
@pytest.mark.parametrize("case", MODELS)
def test_models(
    case: str,
    command: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    content, expected = MODELS[case]
    path = folder / "bad.onnx"
    path.write_bytes(content)
    options = ["-o", str(folder / "never")] if command == "compile" else []
    assert main([command, str(path), *options]) == 1
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert expected in output and not FOREIGN.search(output), output
    assert command == "check" or captured.err.startswith("error[")
    assert command != "check" or " 0 cannot be lowered" not in output
    assert not (folder / "never").exists()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_text_that_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    """onnx_ir notes it in a log record, which is not for users."""

    def edit(node: onnx.NodeProto) -> None:
        node.attribute[0].CopyFrom(onnx.AttributeProto(name="value_string", s=b"\xff", type=onnx.AttributeProto.STRING))

    with raises("model.text_not_utf8"):
        lowering.check(with_constant(edit))
    assert not capfd.readouterr().err


def test_declarations_that_say_nothing() -> None:
    """Some exporters declare inner values without an element type."""
    inner = helper.make_tensor_value_info("t", TensorProto.UNDEFINED, [4])
    assert lowering.check(with_values(inner)).ok


X3, Z3, Z4 = "--input x=x3.npy", "--input z=x3.npy", "--input z=x4.npy"

COMMANDS = {
    "check gone.onnx": "There is no file gone.onnx",
    "check other": "other is a folder, not an .onnx file",
    "compile gone.onnx -o never": "There is no file gone.onnx",
    "compile good.onnx -o file": "file",
    "compile good.onnx -o other": "other",
    "compile good.onnx -o file/inside": "file",
    "compile good.onnx -o never --target tpu": "There is no target 'tpu'",
    "compile good.onnx -o never --target cuda:sm_1": "sm_1",
    "compile good.onnx -o never --cc no-such-cc": "no-such-cc",
    "compile good.onnx -o never --donate (": "donate.pattern_invalid",
    "compile good.onnx -o never --donate q": "matches no input. The inputs are: x, z.",
    "compile good.onnx -o never --donate x": "input 'x' cannot be donated",
    "compile good.onnx -o never --dim N": "argument.dim_invalid",
    "compile good.onnx -o never --dim N=²..³": "argument.dim_invalid",
    "compile good.onnx -o never --dim N=4..": "argument.dim_invalid",
    "compile good.onnx -o never --dim Q=4": "There are: M, N.",
    "check good.onnx --dim Q=4": "There are: M, N.",
    "compile good.onnx -o never --dim =1..4": "argument.dim_invalid",
    "compile good.onnx -o never --dim N=1..9223372036854775808": "1099511627776",
    "compile good.onnx -o never --dim N=9..2": "the range of dimension 'N' is empty: 9 to 2",
    "compile good.onnx -o never --dim Q=1..2": "There are: M, N.",
    "compile good.onnx -o never --static-cache 64": "cache",
    "run gone": "gone",
    "run file": "file",
    "run other": "other",
    "run good": "input 'x' is missing; the model takes x: float32[N]",
    f"run good {X3}": "input 'z' is missing",
    f"run good {X3} {Z3} --input q=x3.npy": "there is no input 'q'",
    f"run good {X3} {Z4}": "ai.onnx.Add-24 'adds': input 'z' must be [N], as M and N are taken to be equal",
    f"run good --input x=double.npy {Z3}": "input 'x' must be float32, not float64",
    f"run good --input x=matrix.npy {Z3}": "input 'x' must have 1 dimensions",
    f"run good --input x=gone.npy {Z3}": "gone.npy",
    f"run good --input x=other {Z3}": "other",
    f"run good --input x=pickled.npy {Z3}": "pickled.npy",
    f"run good --input x=short.npy {Z3}": "short.npy",
    f"run good --input x=text.npy {Z3}": "text.npy",
    f"run good --input x=nothing.npy {Z3}": "nothing.npy",
    f"run good --input x=huge.npy {Z3}": "huge.npy",
    "run good --input x3.npy": "argument.input_invalid",
    f"run good {X3} {Z3} --output-dir file": "file",
    "bench gone": "gone",
    "bench good": "'N'. Give their sizes, for instance --dim N=8.",
    "bench good --dim M=4": "'N'",
    "bench good --dim N=4 --dim M=4 --dim Q=4": "no input has a symbolic dimension 'Q'",
    "bench good --dim N=4 --dim M=5 --seconds 0.01": "its size along axis 0 is 5, not 4",
    "bench good --dim N=-4": "argument.dim_invalid",
    "bench good --dim N=½": "argument.dim_invalid",
    "bench good --dim N=4 --dim M=4 --input q=x3.npy": "'q'",
    "verify gone.onnx": "There is no file gone.onnx",
    "verify good.onnx --dim N=4 --dim M=5": "its size along axis 0 is 5, not 4",
    "verify good.onnx --dim Q=4": "no input has a symbolic dimension 'Q'. There are: M, N.",
    "verify good.onnx --dim N": "argument.dim_invalid",
    "verify good.onnx --input q=x3.npy": "there is no input 'q'. The inputs are x, z.",
    "verify good.onnx --input x=short.npy": "short.npy",
    "verify good.onnx --artifact good --input x=matrix.npy": "input 'x' must have 1 dimensions",
    "verify good.onnx --artifact good --input x=double.npy": "input 'x' must be float32, not float64",
    f"verify good.onnx --artifact good {X3} {Z4}": "its size along axis 0 is 4, not 3",
    f"verify good.onnx --artifact good {X3} --dim N=2": "its size along axis 0 is 2, not 3",
    "verify good.onnx --artifact gone": "gone",
    "verify good.onnx --artifact other": "'other' is not an artifact",
    "verify good.onnx --artifact good --precision fast": "verify.artifact_with_options",
    "verify good.onnx --artifact good --reduce never": "verify.reduce_with_artifact",
    "verify good.onnx --verify-key key.pub": "argument.option_requires_other",
    "verify good.onnx --static-cache 8": "cache",
    "verify good.onnx --reduce other": "argument.folder_not_empty",
    "verify good": "good is a compiled artifact, not an .onnx file",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(line.split()) == 1
    error = sentence(capsys)
    assert error.startswith(("error[", "error: ")) and COMMANDS[line] in error, error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fly",
        "check",
        "compile good.onnx",
        "compile good.onnx -o never --threads -3",
        "compile good.onnx -o never --threads 0",
        "compile good.onnx -o never --threads two",
        "compile good.onnx -o never --weights int3",
        "compile good.onnx -o never --static-cache -1",
        "run good --threads 0",
        "bench good --seconds nan",
        "bench good --seconds -1",
        "verify good.onnx --rtol -1",
        "verify good.onnx --atol inf",
        "verify good.onnx --seed -1",
        "verify good.onnx --against nobody",
    ],
)
def test_usage(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exit:
        main(line.split())
    assert exit.value.code == 2 and "error: " in sentence(capsys)


X = np.zeros(3, np.float32)

CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compile no file": (lambda _: lowering.compile("gone.onnx"), "There is no file gone.onnx"),
    "compile nothing": (lambda _: lowering.compile(b""), "not a valid ONNX model"),
    "compile a number": (lambda _: lowering.compile(12), "ONNX model"),  # type: ignore[arg-type]
    "compile None": (lambda _: lowering.compile(None), "ONNX model"),  # type: ignore[arg-type]
    "compile a wrong output": (lambda _: lowering.compile(MODELS["another output type"][0]), "declared int64"),
    "compile a function": (lambda _: lowering.compile(len), "torch.onnx.export"),  # type: ignore[arg-type]
    "check nothing": (lambda _: lowering.check(b""), "not a valid ONNX model"),
    "load nothing": (lambda f: lowering.load(f / "gone"), "gone"),
    "load a file": (lambda f: lowering.load(f / "file"), "file"),
    "run nothing": (lambda f: lowering.load(f / "good").run({}), "input 'x' is missing"),
    "run other sizes": (
        lambda f: lowering.load(f / "good").run({"x": X, "z": np.zeros(4, np.float32)}),
        "'adds': input 'z' must be [N], as M and N are taken to be equal",
    ),
    "run a list": (lambda f: lowering.load(f / "good").run({"x": [1.0], "z": X}), "input 'x' is a list"),
    "run arrays without names": (
        lambda f: lowering.load(f / "good").run([X, X]),  # type: ignore[arg-type]
        "the inputs are a list; pass a dict",
    ),
    "bind other sizes": (
        lambda f: lowering.load(f / "good").bind({"x": X, "z": np.zeros(4, np.float32)})(),
        "'adds': input 'z' must be [N], as M and N are taken to be equal",
    ),
    "bind an output that is not there": (
        lambda f: lowering.load(f / "good").bind({"x": X, "z": X}, {"q": X}),
        "there is no output 'q'",
    ),
    "bench nothing": (lambda f: lowering.bench(f / "gone"), "gone"),
    "bench no sizes": (lambda f: lowering.bench(f / "good"), "Give their sizes"),
    "verify nothing": (lambda _: lowering.verify("gone.onnx"), "There is no file gone.onnx"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str, folder: Path) -> None:
    call, expected = CALLS[case]
    with pytest.raises(LoweringError) as caught:
        call(folder)
    assert expected in str(caught.value) and not FOREIGN.search(str(caught.value)), caught.value


def test_checkpoints_of_pytorch_are_recognized(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02")
    with raises("model.format_unknown"):
        lowering.compile(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "begin, message",
    [
        (b"", "it is empty"),
        (b"\x80\x02\x8a\nl\xfc", "it is a pickle, as old PyTorch checkpoints are. Export the module"),
        (
            b'H\0\0\0\0\0\0\0{"a":{"dtype":"F32"',
            "it is a safetensors file, which contains only weights. Export the module",
        ),
        (b"GGUF\3\0\0\0", "it is a GGUF file"),
        (b"\x1c\0\0\0ORTM", "it is in ONNX Runtime's own format"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Fetch the file by `git lfs pull`"),
        (b"\x1f\x8b\x08\0", "it is compressed by gzip"),
        (b"<!DOCTYPE html>", "it is a page of HTML"),
    ],
)
def test_files_of_other_formats_are_named(begin: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(begin)
    for command in (lowering.compile, lowering.check):
        with pytest.raises(lowering.ModelError) as caught:
            command(tmp_path / "model.onnx")
        assert "is not an ONNX model" in str(caught.value) and message in str(caught.value)
