"""The artifact loader's target: a manifest of any contents next to an unchanged model.so.

Every other manifest gets the digests that it asks for, as an attacker would do: without them, no code after the check
of digests would be reached.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import lowering
from lowering.manifest import FILE, Manifest

from ..oracle import find_foreign_terms
from .importer import UnclearError
from .mutate_json import mutated as mutated


@functools.cache
def artifact() -> Path:
    """Compile a small model with a weight, a symbolic size and a donated input; return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "artifact"
    weight = numpy_helper.from_array(np.ones((64, 8), np.float32), "w")
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", d]) for n, d in (("x", 64), ("c", 8))]
    results = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 8]) for n in ("y", "d")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Add", ["c", "y"], ["d"])]
    graph = helper.make_graph(nodes, "fuzz", values, results, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    lowering.compile(model, dims={"n": (1, 99)}).save(folder)
    return folder


def attempt(data: bytes) -> None:
    """Load a manifest; raise what no manifest may cause."""
    folder = artifact()
    if zlib.crc32(data) % 2:
        data = _signed(data)
    (folder / FILE).write_bytes(data)
    try:
        repr(lowering.load(folder))
    except lowering.LoweringError as error:
        # A path in the manifest can be the version of a package, by the package's name.
        terms = find_foreign_terms(re.sub(r"manifest\.versions\.\S+", "", str(error)))
        if terms:
            raise UnclearError(f"says '{terms}': {error}") from error


def _signed(data: bytes) -> bytes:
    """Return the manifest with its own digest, as far as it is one."""
    try:
        fields = json.loads(data)
        fields["hashes"][FILE] = Manifest.from_dict(fields).digest()
        return json.dumps(fields).encode()
    except Exception:
        return data


def corpus() -> list[bytes]:
    """Return the manifest as it was written, and in another layout, whose digest is wrong or missing."""
    written = (artifact() / FILE).read_bytes()
    return [written, json.dumps(json.loads(written)).encode()]
