"""`onnx-lowering package --wheel`: a package that pip installs, of models with names of any kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from lowering.commands.cli import main
from lowering.compiling.compiler import compile_to
from lowering.manifest import Manifest, TensorSpec
from lowering.packaging.module import generate_module, make_identifiers
from tests.packaging.test_runtime_wheel import check_record

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
model (float[n, 256] x, int64[m] rows) => (float[m, 256] y, float[n, 256] total) {
  y = Gather (x, rows)
  total = Add (x, x)
}
"""
# Names that are not identifiers, or become equal to another one, or are Python keywords.
RENAMED = {"x": 'past.0/"key"\'\n\\', "rows": "lambda", "y": "count", "total": "past.0/key"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = onnx.parser.parse_model(MODEL)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [RENAMED.get(name, name) for name in names]
    for port in (*model.graph.input, *model.graph.output):
        port.name = RENAMED[port.name]
    folder = tmp_path_factory.mktemp("artifact") / "out"
    compile_to(folder, model)
    return folder


APPLICATION = """
import numpy as np
import odd_names

x = np.arange(512, dtype=np.float32).reshape(2, 256)
outputs: odd_names.Outputs = odd_names.run(x, lambda_=np.array([1, 0, 1]))
assert (outputs.count_ == x[[1, 0, 1]]).all() and (outputs.past_0_key == 2 * x).all()
assert outputs._fields == ("count_", "past_0_key")
"""


@pytest.fixture(scope="module")
def site(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the wheel, alone."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--to", str(folder / "dist"), "--name", "odd-names", "--version", "1.2.0rc1"]
    assert main(["package", "--wheel", str(artifact), *options]) == 0
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name == f"odd_names-1.2.0rc1-py3-none-linux_{os.uname().machine}.whl"
    check_record(wheel)
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(pip, check=True)
    return site


def test_it_is_installed_and_runs(site: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", APPLICATION], check=True, env={**os.environ, "PYTHONPATH": paths})
    metadata = (site / "odd_names-1.2.0rc1.dist-info" / "METADATA").read_text()
    assert "\nRequires-Dist: onnx-lowering-runtime==0.1.*\n" in metadata


@pytest.mark.slow
def test_it_is_typed(site: Path, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(APPLICATION)
    (tmp_path / "wrong.py").write_text(f"{APPLICATION}odd_names.run(x, 'rows')\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull]
    mypy += ["right.py", "wrong.py", site / "odd_names"]
    done = subprocess.run(mypy, env={**os.environ, "MYPYPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True)
    assert re.match(r'wrong\.py:\d+: error: Argument 2 to "run" .*"str"; expected "ndarray', done.stdout), done.stdout
    assert "Found 1 error in 1 file" in done.stdout


def test_identifiers() -> None:
    names = ["x", "x.", "_x_", "x_2", "", "123", "class", "np", "\u00e4", "\u00f6", "index"]
    identifiers = make_identifiers(names)
    assert identifiers == [
        "x", "x_2", "x_3", "x_2_2", "tensor", "tensor_123", "class_", "np_", "tensor_2", "tensor_3", "index_",
    ]  # fmt: skip
    assert len(set(identifiers)) == len(names)


def test_sources_of_models_without_inputs_and_of_every_type(artifact: Path) -> None:
    manifest = Manifest.from_dict(json.loads((artifact / "manifest.json").read_text()))
    types = {"bool": "np.bool_", "bfloat16": "Any", "string": "np.object_", "uint8": "np.uint8", "int4": "Any"}
    outputs = tuple(TensorSpec(f"of {name}", name, "uint8", ("n", 3)) for name in types)
    text = generate_module(replace(manifest, inputs=(), outputs=outputs, donated={}))
    compile(text, "module", "exec")
    for name, hint in types.items():
        assert f"    of_{name}: NDArray[{hint}]\n" in text


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--name", "2nd"], "package.name_invalid"),
        (["--name", "a/../b"], "package.name_invalid"),
        (["--name", "json"], "package.name_reserved"),
        (["--name", "model", "--version", "1.x"], "package.version_invalid"),
        (["--name", "model", "--runtime", "wheels"], "argument.conflicting_options"),
    ],
)
def test_what_is_refused(
    options: list[str], code: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package", "--wheel", str(artifact), "--to", str(tmp_path / "dist"), *options]) == 1
    assert capsys.readouterr().err.startswith(f"error[{code}]: ") and not os.listdir(tmp_path)


def test_a_name_without_a_wheel(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package", str(artifact), "--to", str(tmp_path / "app"), "--name", "model"]) == 1
    assert "[argument.option_requires_other]" in capsys.readouterr().err and not os.listdir(tmp_path)
