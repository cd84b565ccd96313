"""The artifact loader's target: a manifest of any contents beside a model.so that is as it was.

Every other manifest is given the digests that it asks for, as one who wants to be loaded would do: without them
nothing behind the check of digests would be reached.
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

from ..oracle import foreign_words
from .importer import UnclearError
from .mutate_json import mutated as mutated


@functools.cache
def artifact() -> Path:
    """The folder of a small model with a weight, a symbolic size and a donated input."""
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
    """Raises what must not come of any manifest."""
    folder = artifact()
    if zlib.crc32(data) % 2:
        data = _signed(data)
    (folder / FILE).write_bytes(data)
    try:
        repr(lowering.load(folder))
    except lowering.LoweringError as error:
        # A place in the manifest can be the version of a package, by the package's name.
        words = foreign_words(re.sub(r"manifest\.versions\.\S+", "", str(error)))
        if words:
            raise UnclearError(f"says '{words}': {error}") from error


def _signed(data: bytes) -> bytes:
    """The manifest with its own digest, as far as it is one."""
    try:
        fields = json.loads(data)
        fields["hashes"][FILE] = Manifest.from_dict(fields).digest()
        return json.dumps(fields).encode()
    except Exception:
        return data


def corpus() -> list[bytes]:
    """The manifest as it was written, and in another layout, which leaves it with a wrong digest of its own or none."""
    written = (artifact() / FILE).read_bytes()
    return [written, json.dumps(json.loads(written)).encode()]
