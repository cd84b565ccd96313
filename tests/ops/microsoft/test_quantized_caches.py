"""com.microsoft GroupQueryAttention over quantized caches: equal to onnxruntime, bit for bit where nothing is rotated.
The CPU kernel lacks float8 and scales of two kinds: they are compared with the reference of PagedAttention.
"""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import lowering
from lowering.errors import NodeError

from ..expectations import value_info
from .comparison import import_node, opsets
from .paged_attention_reference import paged_attention, quantize_rows

INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
)  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value")
# Configurations by their seeds, and the number of calls of each.
RUNS = {"CPU": (range(7), 4), "CPU, long": (range(100, 300), 10), "CUDA": ((0, 2), 2),
        "CUDA, long": (range(100, 120), 2)}  # fmt: skip
STORED = {"int8": "int8", "int4": "uint8", "float8_e4m3fn": "float8_e4m3fn"}

Arrays = dict[str, np.ndarray]
Case = dict[str, Any]


def drawn(rng: random.Random) -> Case:
    kv_heads, size = rng.choice([1, 2, 3]), rng.choice([8, 16, 24, 40, 64, 128])
    dtype = rng.choice(["int8", "int4", "int8", "int4", "float8_e4m3fn"])
    kinds = ["PER_TENSOR", "PER_CHANNEL"]
    k_kind = rng.choice(kinds)
    rows = rng.choice([1, 1, 1, 4, 9])
    return {
        "dtype": rng.choice(["float32", "float32", "float16"]),
        "heads": (kv_heads * rng.choice([1, 2, 4]), kv_heads),
        "size": size,
        "codes": dtype,
        "kinds": (k_kind, rng.choice(kinds) if rng.random() < 0.2 else k_kind),
        "scales": rng.choice(["flat", "canonical"]),
        "rows": rows,
        "batch": 1 if rows > 1 and rng.random() < 0.5 else rng.choice([1, 2, 3]),
        "grows": rng.random() < 0.25,
        "packed": rng.random() < 0.3,
        "angles": rng.choice([0, 0, size // 2]) if size % 16 == 0 else 0,  # onnxruntime does not rotate other heads
        "sink": rng.random() < 0.2,
        "softcap": rng.choice([0.0, 0.0, 3.0]),
        "window": rng.choice([-1, -1, 4]),
        "bias": rng.random() < 0.2,
        "symbolic": rng.random() < 0.7,
        "donate": rng.random() < 0.4,
    }


def draw_inputs(case: Case, data: np.random.Generator) -> Arrays:
    (heads, kv_heads), size, rows, batch = case["heads"], case["size"], case["rows"], case["batch"]
    kind = np.dtype(case["dtype"])

    def normal(*shape: int) -> np.ndarray:
        return data.standard_normal(shape).astype(kind)

    # onnxruntime takes batches of several new tokens in first prompts only.
    past = np.zeros(batch, int) if rows > 1 and batch > 1 else data.integers(0, 20, batch)
    if case["grows"]:
        past[:] = past.max()
    projections = [normal(batch, rows, n * size) for n in (heads, kv_heads, kv_heads)]
    inputs = dict(zip(("query", "key", "value"), projections))
    if case["packed"]:
        inputs = {"query": np.concatenate(projections, axis=2)}
    total = int(past.max()) + rows
    length = int(past.max()) if case["grows"] else total + int(data.integers(0, 5))
    width = size // 2 if case["codes"] == "int4" else size
    bits = data.integers(0, 256, (2, batch, kv_heads, length, width)).astype(np.uint8)
    if case["codes"] == "float8_e4m3fn":
        bits = (data.standard_normal(bits.shape) * 30).astype(ml_dtypes.float8_e4m3fn)
    for name, cache in zip(("past_key", "past_value"), bits):
        inputs[name] = cache.view(getattr(ml_dtypes, STORED[case["codes"]], STORED[case["codes"]]))
    inputs |= {"seqlens_k": (past + rows - 1).astype(np.int32), "total_sequence_length": np.array([total], np.int32)}
    step = 0.3 if case["codes"] == "int4" else 0.02
    for name, quant in zip(("k_scale", "v_scale"), case["kinds"]):
        channels = (1, kv_heads, 1, size) if case["scales"] == "canonical" else (kv_heads * size,)
        shape = channels if quant == "PER_CHANNEL" else (1,)
        inputs[name] = (data.uniform(0.5, 1.5, shape) * step).astype(np.float32)
    if case["angles"]:
        angle = data.uniform(-9, 9, (total + 1, case["angles"]))
        inputs |= {"cos_cache": np.cos(angle).astype(kind), "sin_cache": np.sin(angle).astype(kind)}
    if case["sink"]:
        inputs["head_sink"] = normal(heads)
    if case["bias"]:
        inputs["attention_bias"] = normal(1, heads, rows, total)
    return inputs


def make_attributes(case: Case) -> dict[str, Any]:
    node_attributes: dict[str, Any] = {"num_heads": case["heads"][0], "kv_num_heads": case["heads"][1]}
    node_attributes |= {"k_quant_type": case["kinds"][0], "v_quant_type": case["kinds"][1]}
    node_attributes["kv_cache_bit_width"] = 4 if case["codes"] == "int4" else 8
    node_attributes |= {"do_rotary": 1} if case["angles"] else {}
    node_attributes |= {"softcap": case["softcap"]} if case["softcap"] else {}
    return node_attributes | ({"local_window_size": case["window"]} if case["window"] > 0 else {})


def make_model(case: Case, inputs: Arrays, is_shapeless: bool) -> onnx.ModelProto:
    """Return the model; for onnxruntime, without the shapes of results."""
    names = [name if name in inputs else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    named = {"query": "bs", "key": "bs", "value": "bs", "seqlens_k": "b", "cos_cache": "p", "sin_cache": "p"}

    def dims(name: str) -> list[Any]:
        shape: list[Any] = list(inputs[name].shape)
        if case["symbolic"]:
            shape[: len(named.get(name, ""))] = named.get(name, "")
            if name in ("past_key", "past_value"):
                shape[0], shape[2] = "b", "m"
            if name == "attention_bias":
                shape[2:] = ["s", "t"]
        return shape

    stored = inputs["past_key"].dtype.name
    infos = [value_info(n, inputs[n].dtype.name, dims(n)) for n in names if n]
    width = case["heads"][0] * case["size"]
    output = ["b", "s", width] if case["symbolic"] else [case["batch"], case["rows"], width]
    present = ["b", case["heads"][1], "grown", dims("past_key")[3]] if case["grows"] else dims("past_key")
    if case["grows"] and not case["symbolic"]:
        present[0], present[2] = case["batch"], inputs["past_key"].shape[2] + case["rows"]
    shapes = dict(zip(OUTPUTS, (output, present, present)))
    output_infos = [
        value_info(
            n, case["dtype"] if n == "output" else stored, [f"{n}_{k}" for k in range(len(s))] if is_shapeless else s
        )
        for n, s in shapes.items()
    ]
    node = helper.make_node("GroupQueryAttention", names, OUTPUTS, domain="com.microsoft", **make_attributes(case))
    graph = helper.make_graph([node], "g", infos, output_infos)
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


def compute_reference(case: Case, inputs: Arrays) -> list[np.ndarray]:
    """Compute by PagedAttention: a block is a batch's cache."""
    batch, rows, size, kv_heads = case["batch"], case["rows"], case["size"], case["heads"][1]
    flat = {n: inputs[n].reshape(batch * rows, -1) for n in ("query", "key", "value") if n in inputs}
    past = inputs["seqlens_k"] + 1 - rows
    length = inputs["past_key"].shape[2] + (rows if case["grows"] else 0)
    caches = {}
    for new, old in (("key_cache", "past_key"), ("value_cache", "past_value")):
        x = inputs[old].transpose(0, 2, 1, 3)
        caches[new] = np.concatenate([x, np.zeros((batch, length - x.shape[1], *x.shape[2:]), x.dtype)], axis=1)
    tables = {
        "cumulative_sequence_length": np.arange(batch + 1) * rows, "past_seqlens": past,
        "block_table": np.arange(batch)[:, None],
    }  # fmt: skip
    rest = {n: inputs[n] for n in ("cos_cache", "sin_cache", "head_sink", "k_scale", "v_scale") if n in inputs}
    y, *new_caches = paged_attention({**flat, **caches, **tables, **rest}, make_attributes(case))
    presents = [x.transpose(0, 2, 1, 3) for x in new_caches if x is not None]
    assert presents[0].shape == (batch, kv_heads, length, size)
    return [y.reshape(batch, rows, -1), *presents]


def check(number: int, calls: int, target: str = "cpu") -> None:
    case, data = drawn(random.Random(number)), np.random.default_rng(number)
    if target != "cpu":
        case |= {"size": min(case["size"], 16 if case["angles"] else 24)}  # onnxruntime rotates multiples of 16
        case["angles"] = min(case["angles"], case["size"] // 2)
    has_onnxruntime_kernel = case["codes"] != "float8_e4m3fn" and case["kinds"][0] == case["kinds"][1]
    if not has_onnxruntime_kernel:
        case["bias"] = False
        case["codes"] = "int8" if case["codes"] == "int4" else case["codes"]
    compiled, session = None, None
    for _ in range(calls):
        if compiled is None or case["symbolic"]:
            inputs = draw_inputs(case, data)
        label = f"{number}: {case}"
        if compiled is None:
            donate = ["past_key", "past_value"] if case["donate"] and not case["grows"] else []
            compiled = lowering.compile(make_model(case, inputs, False), target, donate=donate)
        if has_onnxruntime_kernel:
            session = session or onnxruntime.InferenceSession(
                make_model(case, inputs, True).SerializeToString(), providers=["CPUExecutionProvider"]
            )
            want = session.run(OUTPUTS, inputs)
        else:
            want = compute_reference(case, inputs)
        got = compiled.run({name: x.copy() for name, x in inputs.items()})
        tolerance = 5e-5 if case["dtype"] == "float32" else 6e-3
        y = got["output"].astype(np.float64)
        np.testing.assert_allclose(y, want[0].astype(np.float64), tolerance, tolerance, err_msg=label)
        for name, expected in zip(OUTPUTS[1:], want[1:]):
            for b, end in enumerate(inputs["seqlens_k"] + 1):
                actual, reference = got[name][b, :, :end], expected[b, :, :end]
                assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape), label
                if name == "present_key" and case["angles"]:  # rotation may round in the other direction
                    assert is_close(case, actual, reference), f"{name} of {label}"
                else:
                    assert actual.tobytes() == reference.tobytes(), f"{name} of {label}"


def is_close(case: Case, actual: np.ndarray, reference: np.ndarray) -> bool:
    """Return whether quantized values differ by one at most."""
    if case["codes"] == "float8_e4m3fn":
        return np.allclose(actual.astype(float), reference.astype(float), 0.13, 2.0**-8)
    if case["codes"] == "int4":
        actual, reference = (np.stack([x & 15, x >> 4]) for x in (actual, reference))
    return bool((abs(actual.astype(int) - reference.astype(int)) <= 1).all())


@pytest.mark.parametrize("number", RUNS["CPU"][0])
def test_equals_onnxruntime_or_the_reference(number: int) -> None:
    check(number, RUNS["CPU"][1])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", RUNS["CPU, long"][0])
def test_equals_onnxruntime_or_the_reference_at_length(number: int) -> None:
    check(number, RUNS["CPU, long"][1])


def test_quantized_values_of_a_long_prompt_equal_onnxruntime_bit_for_bit() -> None:
    """Elements near the midpoint of two quantized values would show a different rounding."""
    case = drawn(random.Random(1)) | {
        "dtype": "float32", "heads": (2, 2), "size": 64, "kinds": ("PER_CHANNEL",) * 2, "rows": 512, "batch": 1,
        "grows": False, "packed": False, "angles": 0, "bias": False, "window": -1, "sink": False,
    }  # fmt: skip
    for dtype in ("int8", "int4"):
        case |= {"codes": dtype}
        inputs = draw_inputs(case, np.random.default_rng(0))
        scale = inputs["k_scale"].reshape(-1)
        steps = np.random.default_rng(1).integers(-140, 140, inputs["key"].shape) + 0.5
        inputs["key"] = (steps * scale).astype(np.float32)
        session = onnxruntime.InferenceSession(make_model(case, inputs, True).SerializeToString())
        want = session.run(["present_key"], inputs)[0]
        got = lowering.compile(make_model(case, inputs, False)).run(inputs)["present_key"]
        end = inputs["seqlens_k"][0] + 1
        assert (got[:, :, :end] != want[:, :, :end]).sum() == 0


def test_the_reference_quantizes_as_the_operator_does() -> None:
    scale = np.array([0.5], np.float32)
    x = np.array([[0.25, 0.75, -0.75, 1000.0, -1000.0]], np.float32)
    assert quantize_rows(x, scale, np.dtype(np.int8)).tolist() == [[0, 2, -2, 127, -128]]


def import_node_with(changes: dict[int, Any], **more: Any) -> Any:
    inputs: dict[int, Any] = {
        0: ("float32", ("b", "s", 64)), 1: ("float32", ("b", "s", 32)), 2: ("float32", ("b", "s", 32)),
        3: ("int8", ("b", 2, "m", 16)), 4: ("int8", ("b", 2, "m", 16)), 5: ("int32", ("b",)), 6: ("int32", (1,)),
        12: ("float32", (1,)), 13: ("float32", (1,)),
    } | changes  # fmt: skip
    base = {"num_heads": 4, "kv_num_heads": 2, "kv_cache_bit_width": 8}
    base |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    return import_node("GroupQueryAttention", [inputs.get(k) for k in range(14)], **(base | more))


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({12: None}, {}, "k_scale is missing"),
        ({12: ("float32", (3,))}, {}, "k_scale has 3 elements, and quantization PER_TENSOR takes 1"),
        ({12: ("float16", (1,))}, {}, "k_scale is float16"),
        ({}, {"v_quant_type": "PER_CHANNEL"}, "v_scale has 1 elements, and quantization PER_CHANNEL takes 32"),
        ({}, {"k_quant_type": "PER_GROUP"}, "k_quant_type is 'PER_GROUP'"),
        ({}, {"kv_cache_bit_width": 4}, "kv_cache_bit_width is 4, for caches of 8 bits"),
        ({4: ("uint8", ("b", 2, "m", 16))}, {}, "the caches are int8 and uint8"),
        ({3: ("float32", ("b", 2, "m", 16)), 4: ("float32", ("b", 2, "m", 16))}, {}, "query is float32, and k_quant"),
        ({3: None, 4: None}, {}, "past_key is missing"),
        (dict.fromkeys((3, 4), ("int32", ("b", 2, "m", 16))), {}, "the caches are int32"),
    ],
)
def test_refusals(changes: dict[int, Any], more: dict[str, Any], message: str) -> None:
    import_node_with({})
    with pytest.raises(NodeError, match=message):
        import_node_with(changes, **more)
