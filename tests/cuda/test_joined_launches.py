"""Small kernels in one launch: which are joined, that none is that must not, and that results are what they were."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import cuda_emulation as emulated
import numpy as np
import onnx
import pytest
from cuda_emulation import device
from onnx.reference import ReferenceEvaluator
from steps import work

import lowering
from lowering.passes import join_launches

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
TARGET = "cuda:sm_90a"

CACHES = "float[B, 2, 16, 8] k, float[B, 2, 16, 8] v, float[B, 2, L, 8] new, int64[B] at"
# Inputs, outputs and nodes; and how many kernels each launch is.
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
    "what a cache held is read before it is written": (
        CACHES,
        "float[B, 2, 16, 8] next_k, float[B, 2, 16, 8] y",
        "y = Add (k, v) next_k = TensorScatter (k, new, at)",
        [1, 1],
    ),
    "and what it holds behind it": (
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
    "norms of rows that may be none": (
        "float[N, 64] a, float[M, 64] b, float[64] scale",
        "float[N, 64] x, float[M, 64] y",
        "x = RMSNormalization (a, scale) y = RMSNormalization (b, scale)",
        [2],
    ),
}
SIZES = [{"B": 2, "L": 3, "N": 5, "M": 2}, {"B": 1, "L": 1, "N": 0, "M": 3}, {"B": 0, "L": 0, "N": 0, "M": 0}]


def measured(name: str) -> tuple[list[int], list[int], float]:
    """How many kernels each launch of a model is, how many launches a call has at each of SIZES, and how far results
    are from ONNX's own."""
    inputs, outputs, nodes, _ = MODELS[name]
    text = f'<ir_version: 12, opset_import: ["" : 24]> model ({inputs}) => ({outputs}) {{ {nodes} }}'
    proto, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    model = lowering.compile(proto, TARGET, donate=[cache for cache in "kv" if f"next_{cache}" in outputs])
    counts, worst = [], 0.0
    for sizes in SIZES:
        shapes = {spec.name: [sizes.get(d, d) for d in spec.dims] for spec in model.inputs}
        given = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
        if "at" in given:
            given["at"] = np.arange(len(given["at"])) * 5
        right = ReferenceEvaluator(proto).run(None, given)
        device.take_calls()
        results = model.run(given)
        counts.append(work(device.take_calls())["cuLaunchKernelEx"])
        for spec, expected in zip(model.outputs, right, strict=True):
            np.testing.assert_array_equal(results[spec.name].shape, expected.shape)
            worst = max(worst, float(np.abs(results[spec.name] - expected).max(initial=0.0)))
    return [kernel.kernel.count("_and_") + 1 for kernel in model.manifest.calls], counts, worst


@pytest.mark.parametrize("name", MODELS)
def test_launches(name: str) -> None:
    joined_kernels, counts, worst = emulated.run(measured, name, arch="sm_90a", timeout=500)
    assert joined_kernels == MODELS[name][-1]
    assert counts[0] == len(joined_kernels)
    assert worst < 1e-5


def joined_all_the_same(name: str) -> str:
    with mock.patch.object(join_launches._Group, "meets", lambda *_: False):
        try:
            measured(name)
        except lowering.InputError as error:
            return str(error.__cause__)
    return ""


def test_kernels_that_depend_on_each_other_are_noticed_in_one_launch() -> None:
    name = "what a cache held is read before it is written"
    assert "LAUNCH_FAILED" in emulated.run(joined_all_the_same, name, arch="sm_90a", timeout=500)


def decoding(is_joined: bool) -> tuple[list[int], list[np.ndarray], list[set[str]]]:
    """Of a Llama of two layers with static caches: launches of each step of a token; logits; and of every launch that
    is several kernels the operators."""
    proto = onnx.load(SAMPLES / "llama-past-dynamo23" / "model.onnx")
    apart = mock.patch(
        "lowering.compiling.pipeline.join_launches", lambda mod, kernels, calls, _: (mod, kernels, calls)
    )
    with nullcontext() if is_joined else apart:
        model = lowering.compile(proto, TARGET, static_cache=16)
    ids, decoder, counts = np.random.default_rng(0).integers(0, 30, (2, 7)), model.decoder(), []
    logits = [decoder.prefill(ids[:, :4])]
    for column in (4, 5, 6):
        device.take_calls()
        logits.append(decoder.step(ids[:, column]))
        counts.append(work(device.take_calls())["cuLaunchKernelEx"])
    several = {kernel.name for kernel in model.manifest.kernels if kernel.schedule == join_launches.RULE}
    calls = [call for call in model.manifest.calls if call.kernel in several]
    return counts, logits, [{node.split()[0] for node in call.nodes} for call in calls]


def test_a_decoder_computes_the_same_in_fewer_launches() -> None:
    """One for both rotary embeddings of a layer, and one for both of its caches."""
    counts, logits, nodes = emulated.run(decoding, True, arch="sm_90a", timeout=500)
    before, right, none = emulated.run(decoding, False, arch="sm_90a", timeout=500)
    assert (counts, before, none) == ([35] * 3, [48] * 3, [])
    assert nodes.count({"RotaryEmbedding"}) == nodes.count({"TensorScatter"}) == 1
    for ours, theirs in zip(logits, right, strict=True):
        np.testing.assert_array_equal(ours, theirs)
