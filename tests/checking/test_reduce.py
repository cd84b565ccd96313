"""`verify --reduce`: of models that fail, the smallest parts that still do, as files and a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.checking import reproducer, trial
from lowering.checking.reduce import reduce_model
from lowering.checking.references import Feeds, inline_weights, load_reference
from lowering.checking.submodels import EvaluatedModel, Submodel
from lowering.commands.cli import main
from lowering.errors import CompilerError
from lowering.graph.loading.model import load_model
from tests.support.error_codes import raises

WIDTH, LAYERS = 8, 6


def network() -> onnx.ModelProto:
    """Layers of seven nodes, of which the fourth has Tanh and the others have Sigmoid."""
    nodes, arrays, rng = [], {}, np.random.default_rng(0)
    for k in range(LAYERS):
        act = "Tanh" if k == 3 else "Sigmoid"
        nodes.append(f"""
            m{k} = MatMul (x{k}, w{k})
            a{k} = Add (m{k}, b{k})
            t{k} = {act} (a{k})
            s{k} = Shape (x{k})
            r{k} = Reshape (t{k}, s{k})
            q{k} = Mul (r{k}, half)
            x{k + 1} = Add (x{k}, q{k})""")
        arrays[f"w{k}"] = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        arrays[f"b{k}"] = rng.standard_normal(WIDTH).astype(np.float32)
    arrays["half"] = np.array(0.5, np.float32)
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        m (float[N, {WIDTH}] x0) => (float[N, {WIDTH}] x{LAYERS}, float[N, {WIDTH}] x2) {{ {"".join(nodes)} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


Fault = Callable[[onnx.GraphProto], None]


def tanh(graph: onnx.GraphProto) -> None:
    """One kind of node is computed wrongly."""
    for node in graph.node:
        node.op_type = "Softsign" if node.op_type == "Tanh" else node.op_type


def fused(graph: onnx.GraphProto) -> None:
    """Subtract the bias of a matmul where Tanh reads the result: each of the two nodes is right without the other."""
    producers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        bias = producers.get(node.input[0]) if node.op_type == "Tanh" else None
        matmul = producers.get(bias.input[0]) if bias is not None and bias.op_type == "Add" else None
        if bias is not None and matmul is not None and matmul.op_type == "MatMul":
            bias.op_type = "Sub"


def crash(graph: onnx.GraphProto) -> None:
    """A pass fails on a matmul whose bias a Tanh reads."""
    before = [node.op_type for node in graph.node]
    fused(graph)
    if [node.op_type for node in graph.node] != before:
        raise CompilerError(
            "compiler.pass_failed", "the compiler failed in its pass 'fuse': a fault of the compiler, not of the model."
        )


def inject(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = trial.compile

    def faulty(model: ir.Model, *options: Any, **more: Any) -> lowering.Model:
        other = ir.to_proto(inline_weights(model))
        fault(other.graph)
        return compiled(other, *options, **more)

    monkeypatch.setattr(trial, "compile", faulty)


@pytest.mark.parametrize("fault, left", [(tanh, ["Tanh"]), (fused, ["MatMul", "Add", "Tanh"])])
def test_a_wrong_answer(
    fault: Fault, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "m.onnx", tmp_path / "new" / "small"
    onnx.save(network(), path, save_as_external_data=fault is fused, size_threshold=0, location="weights")
    with monkeypatch.context() as patch:
        inject(fault, patch)
        assert main(["verify", str(path), "--dim", "N=3", "--reduce", str(folder), "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert not said["ok"] and "first output that differs: x6" in said["verdict"]
        reproducer = said["reproducer"]
        assert reproducer["operators"] == left and reproducer["of"] == 7 * LAYERS and reproducer["fails"]
        command = shlex.split(reproducer["command"])
        assert command[:3] == ["onnx-lowering", "verify", str(folder / "model.onnx")]
        assert main(command[1:]) == 1
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == left
    assert reproducer["command"] in (folder / "README.txt").read_text()
    assert {p.name for p in folder.iterdir()} == {
        "model.onnx",
        "README.txt",
        *(f"{v.name}.npy" for v in model.graph.input),
    }
    assert main(command[1:]) == 0  # without the fault


def other_crash(graph: onnx.GraphProto) -> None:
    """Something that nobody has thought of."""
    try:
        crash(graph)
    except CompilerError:
        raise RuntimeError("an unreachable line") from None


@pytest.mark.parametrize(
    "fault, said", [(crash, "in its pass 'fuse'"), (other_crash, "failed (RuntimeError): a fault")]
)
def test_a_crash(
    fault: Fault, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(network(), tmp_path / "m.onnx")
    inject(fault, monkeypatch)
    assert main(["verify", str(tmp_path / "m.onnx"), "--reduce", str(tmp_path / "small")]) == 1
    error = capsys.readouterr().err
    assert said in error and "3 of 42 nodes still fail (MatMul, Add, Tanh)" in error
    assert main(["verify", str(tmp_path / "small" / "model.onnx")]) == 1


SAMPLES = Path(__file__).parents[1] / "exports" / "samples"

# A branch that reads values of outer nodes, constants, a sequence, and arrays that no .npy file can store.
ODD = """<ir_version: 10, opset_import: ["" : 23]>
    m (float[N, 4] x, bool c, bfloat16[4] small, string[2] labels) => (float[N, 4] y, string[2] same) {
      two = Constant <value_float = 2.0> ()
      w = Mul (two, two)
      a = Mul (x, w)
      b = Neg (x)
      z = If (c) <then_branch = t () => (float[N, 4] u) { u = Add (a, b) },
                  else_branch = e () => (float[N, 4] v) { v = Identity (b) }>
      both = SequenceConstruct (z, a)
      one = Constant <value_int = 1> ()
      d = SequenceAt (both, one)
      wide = Cast <to = 1> (small)
      f = Add (d, wide)
      y = Mul (f, z)
      same = Identity (labels) }"""


def odd() -> tuple[ir.Model, dict[str, Any]]:
    rng = np.random.default_rng(0)
    small = rng.standard_normal(4).astype(ml_dtypes.bfloat16)
    feeds = {"x": rng.standard_normal((3, 4)).astype(np.float32), "c": np.array(True), "small": small}
    return load_model(onnx.parser.parse_model(ODD)), {**feeds, "labels": np.array(["a", "b"], object)}


def sample(name: str) -> tuple[ir.Model, dict[str, Any]]:
    with np.load(min((SAMPLES / name).glob("*.npz"))) as arrays:
        feeds = {key: arrays[key] for key in arrays.files if not key.startswith("=")}
    return load_model(SAMPLES / name / "model.onnx"), feeds


@pytest.mark.parametrize("name", ["odd", "gemma3-past-dynamo18-batch1", "t5-dynamo18"])
def test_parts_are_models_with_the_values_of_the_whole(name: str) -> None:
    """Whatever nodes are chosen: legal ones, whose inputs can be written to files."""
    model, feeds = odd() if name == "odd" else sample(name)
    whole, rng, seen = EvaluatedModel(model, feeds, "reference"), np.random.default_rng(0), 0
    names = [value.name or "" for node in model.graph for value in node.outputs]
    every = model.clone()
    every.graph.outputs[:] = [value for node in every.graph for value in node.outputs]
    values = dict(zip(names, load_reference(every, "reference")(feeds)))
    for _ in range(24):
        count = int(rng.integers(1, len(whole.nodes) + 1))
        submodel = whole.extract_prefix(count)
        if submodel is not None and rng.random() < 0.7:
            indices = [k for k in range(count) if rng.random() < 0.8]
            submodel = whole.extract_submodel(indices, [value.name or "" for value in submodel.model.graph.outputs][:2])
        if submodel is None:
            continue
        seen += 1
        proto = ir.to_proto(submodel.model)
        onnx.checker.check_model(proto)
        assert all(array.dtype.kind in "biufc" for array in submodel.feeds.values())
        results = load_reference(load_model(proto), "reference")(submodel.feeds)
        for value, result in zip(submodel.model.graph.outputs, results):
            np.testing.assert_array_equal(result, values[value.name or ""])
    assert seen > 8


def test_a_needle() -> None:
    """Two nodes of an export are to blame if both are present; few submodels are tried."""
    model, feeds = sample("t5-dynamo18")
    softmax_output = [node.outputs[0].name for node in model.graph if node.op_type == "Softmax"][1]
    softmax = next(node for node in model.graph if node.outputs[0].name == softmax_output)
    before = softmax.inputs[0]
    assert before is not None
    asked = []

    def blamed(candidate: ir.Model, _: Feeds) -> Collection[str]:
        asked.append(candidate)
        outputs = {value.name for node in candidate.graph for value in node.outputs}
        return (
            [value.name or "" for value in candidate.graph.outputs] if {softmax_output, before.name} <= outputs else ()
        )

    reduced = reduce_model(model, feeds, "reference", blamed)
    assert reduced is not None and {v.name for n in reduced.model.graph for v in n.outputs} == {
        softmax_output,
        before.name,
    }
    assert len(asked) < 40 < len(list(model.graph))
    assert reduce_model(model, feeds, "reference", lambda *_: ()) is None


def test_folders_that_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("somebody's")
    onnx.save(network(), tmp_path / "m.onnx")
    for taken in (tmp_path, tmp_path / "notes.txt", tmp_path / "notes.txt" / "small"):
        assert main(["verify", str(tmp_path / "m.onnx"), "--reduce", str(taken)]) == 1
        assert "[argument.folder_not_empty]" in capsys.readouterr().err
    with raises("argument.path_unwritable"):
        reproducer.write_reproducer(Submodel(load_model(network()), {}, (0,)), Path("/proc/small"), [])
    with raises("verify.reduce_with_artifact"):
        lowering.verify(network(), static_cache=8, reduce=tmp_path / "small")


def test_nothing_to_reduce(tmp_path: Path) -> None:
    result = lowering.verify(network(), reduce=tmp_path / "small")
    assert result.first_difference is None and result.reproducer is None and not (tmp_path / "small").exists()
