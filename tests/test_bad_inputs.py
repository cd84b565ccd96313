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
from error_codes import raises
from onnx import TensorProto, helper

import lowering
from lowering.commands.cli import main
from lowering.errors import LoweringError

FOREIGN = re.compile(
    r"match_cast|heap_data|storage allocation|Check failed|TVM|T\.int64|Traceback|ErrorContext|std::|0x"
)


def text(body: str, opset: int = 24) -> bytes:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {body}').SerializeToString()


def edited(body: str, edit: Callable[[onnx.ModelProto], Any]) -> bytes:
    model = onnx.load_model_from_string(text(body))
    edit(model)
    return model.SerializeToString()


def with_weight(edit: Callable[[onnx.TensorProto], Any]) -> bytes:
    """x + w, and w as float[4] with its data replaced."""

    def add(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
        edit(tensor)

    return edited("m (float[4] x) => (float[4] y) { [adds] y = Add (x, w) }", add)


def external(**entries: object) -> bytes:
    def edit(tensor: onnx.TensorProto) -> None:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))

    return with_weight(edit)


def functions(levels: int) -> bytes:
    """Return a model of functions, each of which calls the previous one twice."""
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("f", 1)]
    all_functions = [helper.make_function("f", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for k in range(1, levels + 1):
        calls = [helper.make_node(f"F{k - 1}", [i], [o], domain="f") for i, o in (("a", "t"), ("t", "b"))]
        all_functions.append(helper.make_function("f", f"F{k}", ["a"], ["b"], calls, opsets))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(f"F{levels}", ["x"], ["y"], domain="f")],
        "g",
        [value("x", TensorProto.FLOAT, [4])],
        [value("y", TensorProto.FLOAT, [4])],
    )
    return helper.make_model(graph, opset_imports=opsets, functions=all_functions, ir_version=10).SerializeToString()


def calls_itself() -> bytes:
    model = onnx.load_model_from_string(functions(1))
    model.functions[1].node[0].op_type = "F1"
    return model.SerializeToString()


def set_dim(size: int) -> Callable[[onnx.ModelProto], Any]:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size

    return edit


def with_constant(edit: Callable[[onnx.NodeProto], Any]) -> bytes:
    """x + a constant, with the Constant node edited."""
    body = "m (float[4] x) => (float[4] y) { [made] c = Constant <value = float {1.0}> () [adds] y = Add (x, c) }"
    return edited(body, lambda m: edit(m.graph.node[0]))


def with_values(inner: onnx.ValueInfoProto) -> bytes:
    """Two nodes, and what the model declares of the value between them."""
    return edited(
        "m (float[4] x) => (float[4] y) { t = Neg (x) y = Neg (t) }", lambda m: m.graph.value_info.append(inner)
    )


RELU = "m (float[4] x) => (float[4] y) { [relu] y = Relu (x) }"
LOOP = """m (int64 n, bool go, float[4] x) => (float[4] y) {
  [loops] y = Loop (n, go, x) <body = b (int64 i, bool c, float[4] a) => (bool d, float[4] e) {
    d = Identity (c) e = CastLike (a, i) }> }"""

# The contents of the file, and a part of the sentence.
MODELS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not an ONNX model: it is empty"),
    "text": (b"This is no model.", "ONNX model"),
    "cut off": (text(RELU)[:40], "ONNX model"),
    "no operator sets": (edited(RELU, lambda m: m.ClearField("opset_import")), "opset_import"),
    "unknown operator": (
        edited(
            RELU, lambda m: (m.opset_import.add(domain="far", version=1), setattr(m.graph.node[0], "domain", "far"))
        ),
        "far.Relu-1 'relu': no lowering is registered",
    ),
    "an input without a shape": (
        edited(
            "m (float[A] x, float[A] z) => (float[A] y) { y = Add (x, z) }",
            lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"),
        ),
        "model.input_shape_missing",
    ),
    "a sequence": (text("m (seq(float[4]) x) => (float[4] y) { y = ConcatFromSequence <axis = 0> (x) }"), "'x'"),
    "size 2^62": (edited(RELU, set_dim(2**62)), "'x' has size 4611686018427387904 along axis 0"),
    "a negative size": (edited(RELU, set_dim(-2)), "'x'"),
    "too many elements": (
        text("m (float[1048576, 1048576, 2] x) => (float[A, B, C] y) { y = Relu (x) }"),
        "'x' has 219",
    ),
    "another output type": (text("m (float[N] x) => (int64[N] y) { y = Relu (x) }"), "y'"),
    "surplus bytes": (with_weight(lambda t: setattr(t, "raw_data", b"\0" * 20)), "'w'"),
    "missing bytes": (
        with_weight(lambda t: setattr(t, "raw_data", b"\0" * 12)),
        "tensor name: w) raw_data size (12 bytes)",
    ),
    "missing elements": (with_weight(lambda t: t.float_data.extend([1.0] * 3)), "w"),
    "an initializer of no element type": (with_weight(lambda t: t.ClearField("data_type")), "data_type"),
    "an initializer of an unknown type": (with_weight(lambda t: setattr(t, "data_type", 77)), "w"),
    "surplus elements": (with_weight(lambda t: t.float_data.extend([1.0] * 7)), "initializer 'w' is FLOAT[4]"),
    "an input of no element type": (
        edited(RELU, lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 0)),
        "'x' has no element type",
    ),
    "an inner size of 2^63 - 1": (
        with_values(helper.make_tensor_value_info("t", TensorProto.FLOAT, [2**63 - 1])),
        "'t' has size 9223372036854775807 along axis 0",
    ),
    "a constant of nothing": (
        with_constant(lambda n: n.ClearField("attribute")),
        "Constant 'made' must have one attribute, its value, but has none",
    ),
    "a constant of two values": (
        with_constant(lambda n: n.attribute.add(name="value_int", i=3, type=onnx.AttributeProto.INT)),
        "Constant 'made' must have one attribute, its value, but has value, value_int",
    ),
    "surplus elements of an attribute": (
        with_constant(lambda n: n.attribute[0].t.float_data.extend([1.0] * 6)),
        "attribute 'value' of Constant 'made' is FLOAT[]",
    ),
    "missing elements of an attribute": (with_constant(lambda n: n.attribute[0].t.dims.append(7)), "Name: made"),
    "an attribute of no element type": (
        with_constant(lambda n: n.attribute[0].t.ClearField("data_type")),
        "Name: made",
    ),
    "an attribute of no value": (with_constant(lambda n: n.attribute[0].ClearField("t")), "Name: made"),
    "an attribute of no function": (
        with_constant(lambda n: setattr(n.attribute[0], "ref_attr_name", "q")),
        "model.attribute_reference_invalid",
    ),
    "no file of weights": (external(location="gone.bin", length=16), "gone.bin"),
    "an offset behind the end": (external(location="w.bin", offset=64, length=16), "bytes 64 to 80 of"),
    "another length": (external(location="w.bin", length=12), "takes 16 bytes; its data has 12"),
    "sizes that do not fit": (
        text("m (float[3] x, float[4] z) => (float[N] y) { [adds] y = Add (x, z) }"),
        "ai.onnx.Add-24 'adds': shapes (3,) and (4,) do not broadcast",
    ),
    "a concatenation of other ranks": (
        text("m (float[3, 4] x, float[4] z) => (float[A, B] y) { [joins] y = Concat <axis = 1> (x, z) }"),
        "ai.onnx.Concat-24 'joins'",
    ),
    "a matmul that does not fit": (
        text("m (float[3, 4] x, float[5, 6] z) => (float[3, 6] y) { [matmul] y = MatMul (x, z) }"),
        "ai.onnx.MatMul-24 'matmul'",
    ),
    "Reshape to negative sizes": (
        text("m (float[12] x) => (float[A, B] y) <int64[2] s = {-2, -6}> { [reshapes] y = Reshape (x, s) }"),
        "ai.onnx.Reshape-24 'reshapes'",
    ),
    "a Transpose of other axes": (
        text("m (float[3, 4] x) => (float[A, B] y) { [turns] y = Transpose <perm = [0, 5]> (x) }"),
        "ai.onnx.Transpose-24 'turns'",
    ),
    "a loop": (text(LOOP), "ai.onnx.Loop-24 'loops': carried value 0 is float32 of rank 1, and int64 of rank 1 after"),
    "a bomb of functions": (functions(14), "function 'f.F14', which expands to 16,384"),
    "a larger bomb": (functions(60), "function 'f.F33' nests calls and bodies 33 deep"),
    "a function that calls itself": (calls_itself(), "F1"),
}


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
