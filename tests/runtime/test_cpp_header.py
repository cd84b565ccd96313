"""model.h contains names that others chose, and is C++ whatever they are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from tvm_ffi import libinfo

import lowering
from lowering.compiling.cpp_header import model_header
from lowering.manifest import Manifest
from tests.runtime import modules

NAMES = [
    "a\nb", "\n#error from a name", "x\r\n#include </etc/passwd>", 'quo"te', '");}; int evil; ({("', "back\\slash",
    "ends\\", "\\\n", "tri??/graph", "??/", "??<%:??)", "*/ comment /*", "// comment", "nul\x00after", "\x00",
    "\x1b[31mred", "\x7f\x01\x02", "tab\t", "\x0b\x0c", "é", "日本語", "😀", "\u202egnp.exe", "\u2066\u2069",
    "\u2028line", "\x85", "[/red]", "[bold]", "class", "namespace", "0123", "x\x0012", "R\"(raw)\"", "%s%n{}{0}",
    "'", "a" * 5000, "\ufeff", "\\x41\\u0041\\101",
]  # fmt: skip

MAIN = r"""
#include "model.h"
#include <cstdio>
void print(const std::string& text) {
  for (unsigned char c : text) std::printf("%02x", c);
  std::puts("");
}
int main() {
  for (const auto& spec : model::spec.inputs) print(spec.name), print(spec.dims.at(0).name);
  for (const auto& spec : model::spec.outputs) print(spec.name), print(spec.dims.at(1).name);
  for (const auto& range : model::spec.ranges) print(range.first);
}
"""


def test_ugly_names(tmp_path: Path) -> None:
    """Inputs, outputs, dimensions, ranges, and features: every name arrives in C++ byte by byte."""
    assert len(set(NAMES)) >= 30
    manifest = Manifest(
        inputs=tuple(modules.spec(name, "float32", name, 3) for name in NAMES),
        outputs=tuple(modules.spec(name, "float32", 3, name) for name in NAMES),
        donated={},
        weights=(),
        target="cpu",
        cpu_features=tuple(NAMES),
        ranges=dict.fromkeys(NAMES, (1, 2)),
    )
    header = model_header(manifest, {"model.so": b"code"})
    assert header.isascii() and header.isprintable() == ("\n" not in header)
    assert all(32 <= ord(c) < 127 or c == "\n" for c in header)
    (tmp_path / "model.h").write_text(header)
    (tmp_path / "host.hpp").write_text((modules.ROOT / "lowering" / "runtime" / "native" / "host.hpp").read_text())
    (tmp_path / "main.cc").write_text(MAIN)
    options = ["-std=c++17", "-trigraphs", "-Wall", "-Wextra", "-Wcomment", "-Werror", "-Wno-unused-parameter"]
    system = [o for p in (libinfo.find_include_path(), libinfo.find_dlpack_include_path()) for o in ("-isystem", p)]
    ffi = Path(libinfo.find_libtvm_ffi()).parent
    command = ["g++", *options, *system, "main.cc", "-o", "main", "-L", ffi, "-ltvm_ffi", f"-Wl,-rpath,{ffi}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.split("\n")
    twice = [name.encode().hex() for name in NAMES for _ in range(2)]
    ranges = sorted(name.encode() for name in NAMES)
    assert printed == [*twice, *twice, *(name.hex() for name in ranges), ""]


def test_a_model_with_ugly_names(tmp_path: Path) -> None:
    """Compiled, saved where the locale knows ASCII alone, loaded, and run."""
    names, size = NAMES[::2], NAMES[1]
    inputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [size]) for n in names]
    outputs = [onnx.helper.make_tensor_value_info(n + "!", onnx.TensorProto.FLOAT, [size]) for n in names]
    nodes = [onnx.helper.make_node("Neg", [n], [n + "!"], name=n) for n in names]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs)
    opset = onnx.helper.make_opsetid("", 21)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    command = ["onnx-lowering", "compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out")]
    code = f"from lowering.commands.cli import main; raise SystemExit(main({command[1:]!r}))"
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    subprocess.run(
        [os.sys.executable, "-c", code], cwd=modules.ROOT, env={**os.environ, **ascii_locale}, check=True, timeout=120
    )
    module = lowering.load(tmp_path / "out")
    results = module.run({name: np.full(2, k, "f") for k, name in enumerate(names)})
    assert "of limit" in str(lowering.bench(module, {t.dims[0]: 2 for t in module.inputs}, seconds=0))
    assert [results[name + "!"].tolist() for name in names] == [[-k, -k] for k in range(len(names))]


def test_digests_of_the_header(artifact: Callable[..., Path]) -> None:
    assert {"model.h", "host.hpp"} <= set(lowering.load(artifact("dense")).manifest.hashes)
