"""Caches that nodes write to: layers share one, arrays are updated in place, constants are refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from tests.serving.cache_attention import cache_attention_reference as reference
from tests.support.error_codes import raises

DOMAIN = "opmx.dynamic_batching"
HEADS, SIZE, LAYERS = 2, 8, 2
INPUTS = {
    "query": (TensorProto.FLOAT, ["N", HEADS, SIZE]),
    "current_key": (TensorProto.FLOAT, ["N", HEADS, SIZE]),
    "current_value": (TensorProto.FLOAT, ["N", HEADS, SIZE]),
    "seqstarts": (TensorProto.INT64, ["B+1"]),
    "kvstarts": (TensorProto.INT64, ["B+1"]),
    "cachestarts": (TensorProto.INT64, ["B"]),
    "start_pos": (TensorProto.INT64, ["B"]),
    "decoding_batches": (TensorProto.INT64, [1]),
    "max_seqlen": (TensorProto.INT64, [1]),
    "max_kvlen": (TensorProto.INT64, [1]),
    "cache": (TensorProto.INT8, ["M", LAYERS, 2, HEADS, SIZE]),
    "scale": (TensorProto.FLOAT, ["M", LAYERS, 2, HEADS, 1]),
}


def make_attributes(layer: int) -> dict[str, int]:
    return {"num_heads": HEADS, "head_dim": SIZE, "num_layer": LAYERS, "layer_idx": layer, "quant_bit": 8}


def make_model(functional: bool, constant: bool = False) -> onnx.ModelProto:
    """Return two layers; the output of the first is the query of the second."""
    names, caches = list(INPUTS), ["cache", "scale"]
    nodes, query = [], "query"
    for layer in range(LAYERS):
        output_names = [f"y{layer}", *([f"cache{layer}", f"scale{layer}"] if functional else [])]
        input_names = [query, *names[1:10], *caches]
        nodes.append(
            helper.make_node(
                "MultiHeadCacheAttention",
                input_names,
                output_names,
                f"layer{layer}",
                domain=DOMAIN,
                **make_attributes(layer),
            )
        )
        query, caches = output_names[0], output_names[1:] or caches
    outputs = {"y1": INPUTS["query"]} | ({"cache1": INPUTS["cache"], "scale1": INPUTS["scale"]} if functional else {})
    infos = [
        [
            helper.make_tensor_value_info(name, *kind)
            for name, kind in values.items()
            if not (constant and name == "cache")
        ]
        for values in (INPUTS, outputs)
    ]
    weights = [numpy_helper.from_array(np.zeros((9, LAYERS, 2, HEADS, SIZE), np.int8), "cache")] if constant else []
    graph = helper.make_graph(nodes, "layers", *infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)])


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = {name: rng.standard_normal((4, HEADS, SIZE)).astype(np.float32) for name in list(INPUTS)[:3]}
    ints = {"seqstarts": [0, 3, 4], "kvstarts": [0, 3, 8], "cachestarts": [6, 0], "start_pos": [0, 4],
            "decoding_batches": [0], "max_seqlen": [3], "max_kvlen": [5]}  # fmt: skip
    cache = rng.integers(-127, 128, (9, LAYERS, 2, HEADS, SIZE)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (9, LAYERS, 2, HEADS, 1)).astype(np.float32)
    return {**rows, **{name: np.array(x) for name, x in ints.items()}, "cache": cache, "scale": scale}


def compute_expected(feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    query, cache, scale = feeds["query"], feeds["cache"], feeds["scale"]
    for layer in range(LAYERS):
        inputs = {**feeds, "query": query, "cache": cache, "scale": scale}
        query, cache, scale = reference.multi_head_cache_attention(**inputs, attn_mask=None, **make_attributes(layer))
    return query, cache, scale


@pytest.mark.parametrize(
    ("functional", "donate"), [(False, ()), (True, ("cache", "scale")), (True, ("cache",)), (True, ())]
)
def test_layers_share_a_cache(functional: bool, donate: tuple[str, ...]) -> None:
    compiled, feeds = lowering.compile(make_model(functional), donate=donate), make_arrays()
    y, cache, scale = compute_expected({name: array.copy() for name, array in feeds.items()})
    before = {name: feeds[name].copy() for name in ("cache", "scale")}
    results = compiled.run(feeds)
    np.testing.assert_allclose(results["y1"], y, 1e-5, 1e-5)
    names = {"cache": "cache1", "scale": "scale1"} if functional else {n: f"{n}_updated" for n in before}
    for name, expected in (("cache", cache), ("scale", scale)):
        np.testing.assert_array_equal(results[names[name]], expected)
        in_place = not functional or name in donate
        assert (results[names[name]] is feeds[name]) == in_place
        if not in_place:
            np.testing.assert_array_equal(feeds[name], before[name])


def test_a_constant_is_not_a_cache() -> None:
    with raises("model.constant_written"):
        lowering.compile(make_model(functional=False, constant=True))
