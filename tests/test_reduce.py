"""`verify --reduce`: of models that fail, the smallest parts that still do, as files and a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.checking import trial
from lowering.commands.cli import main
from lowering.errors import CompilerError

WIDTH, LAYERS = 8, 6


def network(dtype: Any = np.float32) -> onnx.ModelProto:
    """Layers of seven nodes: a product, a bias, an activation, sizes and a reshape, and a sum around them.

    Only the fourth has Tanh; the others have Sigmoid.
    """
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
        arrays[f"w{k}"] = rng.standard_normal((WIDTH, WIDTH)).astype(dtype)
        arrays[f"b{k}"] = rng.standard_normal(WIDTH).astype(dtype)
    arrays["half"] = np.array(0.5, dtype)
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
    """The bias of a product is subtracted where Tanh reads the sum: neither is wrong alone."""
    made = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        bias = made.get(node.input[0]) if node.op_type == "Tanh" else None
        product = made.get(bias.input[0]) if bias is not None and bias.op_type == "Add" else None
        if bias is not None and product is not None and product.op_type == "MatMul":
            bias.op_type = "Sub"


def crash(graph: onnx.GraphProto) -> None:
    """A pass fails on a product whose bias a Tanh reads."""
    before = [node.op_type for node in graph.node]
    fused(graph)
    if [node.op_type for node in graph.node] != before:
        raise CompilerError("the compiler failed in its pass 'fuse': a fault of ours, not of the model.")


def inject(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = trial.compile

    def faulty(model: ir.Model, *options: Any, **more: Any) -> lowering.Model:
        other = ir.to_proto(model)
        fault(other.graph)
        return compiled(other, *options, **more)

    monkeypatch.setattr(trial, "compile", faulty)


@pytest.mark.parametrize("fault, left", [(tanh, ["Tanh"]), (fused, ["MatMul", "Add", "Tanh"])])
def test_a_wrong_answer(
    fault: Fault, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "m.onnx", tmp_path / "new" / "small"
    onnx.save(network(), path)
    with monkeypatch.context() as patch:
        inject(fault, patch)
        assert main(["verify", str(path), "--dim", "N=3", "--reduce", str(folder), "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert not said["ok"] and "first output that differs: x6" in said["verdict"]
        found = said["reproducer"]
        assert found["operators"] == left and found["of"] == 7 * LAYERS and found["fails"]
        command = shlex.split(found["command"])
        assert command[:3] == ["onnx-lowering", "verify", str(folder / "model.onnx")]
        assert main(command[1:]) == 1
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == left
    assert found["command"] in (folder / "README.txt").read_text()
    assert {p.name for p in folder.iterdir()} == {
        "model.onnx",
        "README.txt",
        *(f"{v.name}.npy" for v in model.graph.input),
    }
    assert main(command[1:]) == 0  # without the fault


def test_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(), tmp_path / "m.onnx")
    inject(crash, monkeypatch)
    assert main(["verify", str(tmp_path / "m.onnx"), "--reduce", str(tmp_path / "small")]) == 1
    error = capsys.readouterr().err
    assert "in its pass 'fuse'" in error and "3 of 42 nodes still fail (MatMul, Add, Tanh)" in error
    assert main(["verify", str(tmp_path / "small" / "model.onnx")]) == 1
