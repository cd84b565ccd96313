"""Horizontal fusion of small kernels: which kernels share a launch, which must not, and that results stay the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.manifest import CallSpec
from lowering.passes.aliases import Accesses
from tests import cuda_emulation as emulated
from tests.cuda.models.steps import work
from tests.cuda_emulation import device
from tests.support.pass_states import leave_out

TARGET = "cuda:sm_90a"

CACHES = "float[B, 2, 16, 8] k, float[B, 2, 16, 8] v, float[B, 2, L, 8] new, int64[B] at"
# Inputs, outputs and nodes; and the number of kernels of each launch.
MODELS = {
    "what is independent is one launch": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] next_v, float[B, 2, L, 8] y",
        "next_k = TensorScatter (k, new, at) next_v = TensorScatter (v, new, at) y = Neg (new)",
        [3],
    ),
    "a result waits for what it is made of": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] next_v, float[B, 2, L, 8] y",
        "next_k = TensorScatter (k, new, at) y = Exp (new) next_v = TensorScatter (v, y, at)",
        [2, 1],
    ),
    "a cache is read before it is written": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] y",
        "y = Add (k, v) next_k = TensorScatter (k, new, at)",
        [1, 1],
    ),
    "and its new contents after it": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] y",
        "next_k = TensorScatter (k, new, at) y = Add (next_k, v)",
        [1, 1],
    ),
    "updates of one cache follow each other": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] next_v",
        "one = Constant <value_int = 1> () later = Add (at, one) first = TensorScatter (k, new, at) "
        "twice = Add (new, new) next_k = TensorScatter (first, twice, later) next_v = TensorScatter (v, twice, later)",
        [3, 2],
    ),
    "rows are computed on their way to a cache": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] next_v",
        'y = Exp (new) next_k = TensorScatter <mode = "circular"> (k, y, at) y2 = Neg (new) '
        "next_v = TensorScatter (v, y2)",
        [2],
    ),
    "also where they are reshaped, and their number is a size": (
        "float[1, 16, 8] k, float[L, 2, 8] new, int64[1] at",
        "float[1, 16, 8] next_k",
        "shape = Constant <value_ints = [1, -1, 8]> () y = Exp (new) rows = Reshape (y, shape) "
        "next_k = TensorScatter (k, rows, at)",
        [1],
    ),
    "or a number": (
        "float[B, 16, 8] k, float[B, 16] new, int64[B] at",
        "float[B, 16, 8] next_k",
        "shape = Constant <value_ints = [-1, 2, 8]> () y = Exp (new) rows = Reshape (y, shape) "
        "next_k = TensorScatter (k, rows, at)",
        [1],
    ),
    "but not where somebody else reads them": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, L, 8] y",
        "y = Exp (new) next_k = TensorScatter (k, y, at)",
        [1, 1],
    ),
    "nor where they are made of the cache": (
        CACHES,
        "float[B, 2, 16, 8] next_k",
        'y = Exp (k) next_k = TensorScatter <mode = "circular"> (k, y, at)',
        [1, 1],
    ),
    "nor where that is written in between": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] next_v",
        'y = Exp (v) next_v = TensorScatter (v, new, at) next_k = TensorScatter <mode = "circular"> (k, y, at)',
        [1, 2],
    ),
    "norms of rows that may be none": (
        "float[N, 64] a, float[M, 64] b, float[64] scale",
        "float[N, 64] x, float[M, 64] y",
        "x = RMSNormalization (a, scale) y = RMSNormalization (b, scale)",
        [2],
    ),
}
SIZES = [{"B": 2, "L": 3, "N": 5, "M": 2}, {"B": 1, "L": 1, "N": 0, "M": 3}, {"B": 0, "L": 0, "N": 0, "M": 0}]


def measured(name: str, target: str = TARGET) -> tuple[list[int], list[int], float]:
    """Return the number of kernels of each launch, launches of a call at each of SIZES, and the error against ONNX."""
    inputs, outputs, nodes, _ = MODELS[name]
    text = f'<ir_version: 12, opset_import: ["" : 24]> model ({inputs}) => ({outputs}) {{ {nodes} }}'
    proto, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    model = lowering.compile(proto, target, donate=[cache for cache in "kv" if f"next_{cache}" in outputs])
    counts, worst = [], 0.0
    for sizes in SIZES:
        shapes = {spec.name: [sizes.get(d, d) for d in spec.dims] for spec in model.inputs}
        feeds = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
        if "at" in feeds:
            feeds["at"] = np.arange(len(feeds["at"])) * 5
        right = ReferenceEvaluator(proto).run(None, feeds)
        device.take_calls()
        results = model.run(feeds)
        counts.append(work(device.take_calls())["cuLaunchKernelEx"])
        for spec, expected in zip(model.outputs, right, strict=True):
            np.testing.assert_array_equal(results[spec.name].shape, expected.shape)
            worst = max(worst, float(np.abs(results[spec.name] - expected).max(initial=0.0)))
    return [kernel.kernel.count("_and_") + 1 for kernel in model.manifest.calls], counts, worst


@pytest.mark.parametrize("name", MODELS)
def test_launches(name: str) -> None:
    joined_kernels, counts, worst = emulated.run(measured, name, arch="sm_90a", timeout=500)
    assert joined_kernels == MODELS[name][-1]
    assert not emulated.counts() or counts[0] == len(joined_kernels)
    assert worst < 1e-5


def joined_all_the_same(name: str) -> str:
    with mock.patch.object(Accesses, "has_conflict_with", lambda *_: False):
        try:
            measured(name, "cuda:sm_80")  # its kernels declare by restricted pointers which arrays do not alias
        except lowering.InputError as error:
            return str(error.__cause__)
    return ""


@pytest.mark.no_gpu
def test_kernels_that_depend_on_each_other_are_noticed_in_one_launch() -> None:
    name = "a cache is read before it is written"
    assert "LAUNCH_FAILED" in emulated.run(joined_all_the_same, name, arch="sm_80", timeout=500)


def too_many_rows() -> tuple[int, str]:
    text = f'<ir_version: 12, opset_import: ["" : 24]> model ({CACHES}) => (float[B, 2, 16, 8] next_k)'
    proto = onnx.parser.parse_model(text + "{ y = Exp (new) next_k = TensorScatter (k, y, at) }")
    model = lowering.compile(proto, TARGET, donate=["k"])
    cache = np.zeros((1, 2, 16, 8), "float32")
    try:
        model.run(
            {"k": cache, "v": cache.copy(), "new": np.zeros((1, 2, 17, 8), "float32"), "at": np.zeros(1, "int64")}
        )
    except lowering.InputError as error:
        return len(model.manifest.calls), str(error)
    return 0, ""


def test_rows_that_are_stored_at_once_are_checked() -> None:
    calls, message = emulated.run(too_many_rows, arch="sm_90a", timeout=500)
    assert calls == 1 and "has 17 rows, for a cache of 16" in message


LAYER = """
<ir_version: 12, opset_import: ["" : 24]>
layer (float[B, 4, 1, 32] q, float[B, 2, 1, 32] new_k, float[B, 2, 1, 32] new_v, float[B, 1, 16] cos,
       float[B, 1, 16] sin, float[B, 2, C, 32] k, float[B, 2, C, 32] v, int64[B] at)
      => (float[B, 4, 1, 32] y, float[B, 2, C, 32] next_k, float[B, 2, C, 32] next_v) {
  one = Constant <value_int = 1> ()
  valid = Add (at, one)
  q1 = RotaryEmbedding (q, cos, sin)
  k1 = RotaryEmbedding (new_k, cos, sin)
  next_k = TensorScatter (k, k1, at)
  next_v = TensorScatter (v, new_v, at)
  y = Attention (q1, next_k, next_v, , , , valid)
}"""


def decoding(is_joined: bool) -> tuple[list[CallSpec], int, dict[str, np.ndarray]]:
    """Run the part of a decoder layer between its matmuls, for one token of two sequences each.

    Return the calls of kernels, the number of their launches, and the results.
    """
    with leave_out(*(() if is_joined else ("fuse_launches", "fuse_cache_writes"))):
        model = lowering.compile(onnx.parser.parse_model(LAYER), TARGET, donate=["k", "v"])
    rng, sizes = np.random.default_rng(0), {"B": 2, "C": 600}
    shapes = {spec.name: [sizes.get(d, d) for d in spec.dims] for spec in model.inputs}
    feeds = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    device.take_calls()
    results = model.run({**feeds, "at": np.array([3, 599])})
    return list(model.manifest.calls), work(device.take_calls())["cuLaunchKernelEx"], results


def test_a_layer_computes_the_same_in_fewer_launches() -> None:
    """One launch for both rotary embeddings, both cache updates and a residual, in any order of blocks; two for the
    attention."""
    calls, launches, results = emulated.run(decoding, True, arch="sm_90a", order="descending", timeout=500)
    before, more, right = emulated.run(decoding, False, arch="sm_90a", timeout=500)
    assert (len(calls), len(before)) == (2, 6)
    assert not emulated.counts() or (launches, more) == (3, 7)
    operators = sorted(node.split()[0] for node in calls[0].nodes)
    assert operators == ["Add", "RotaryEmbedding", "RotaryEmbedding", "TensorScatter", "TensorScatter"]
    for name in right:
        np.testing.assert_array_equal(results[name], right[name])
