"""com.microsoft DecoderMaskedMultiHeadAttention and MultiHeadAttention over caches with room, with and without beams.

In float32 they equal onnxruntime, in all types a float64 reference. Only the reference counts in two cases: where each
beam has its own attention_bias, onnxruntime reads another row than its documentation says; it rejects a packed query.
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
from tests.support.error_codes import raises

from ..expectations import value_info
from .comparison import import_node, opsets

INPUTS = {
    "DecoderMaskedMultiHeadAttention": (
        "query", "key", "value", "mask", "attention_bias", "past_key", "past_value", "past_sequence_length",
        "beam_width", "cache_indirection", "bias",
    ),
    "MultiHeadAttention": (
        "query", "key", "value", "bias", "mask", "attention_bias", "past_key", "past_value", "past_sequence_length",
        "cache_indirection",
    ),
}  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value", "qk")
# Configurations by their seeds, and the number of calls of each.
RUNS = {"CPU": (range(8), 4), "CPU, long": (range(100, 500), 10), "CUDA": ((0, 3), 2),
        "CUDA, long": (range(100, 120), 2)}  # fmt: skip

Arrays = dict[str, np.ndarray]


def drawn(rng: random.Random) -> dict[str, Any]:
    operator = rng.choice(list(INPUTS))
    decoder = operator.startswith("Decoder")
    form = rng.choice(["shared", "shared", "beams", "beams", *(["cross", "grown", "packed"] if decoder else [])])
    return {
        "operator": operator,
        "dtype": rng.choice(["float32", "float32", "float16", *([] if decoder else ["bfloat16"])]),
        "form": form,
        "heads": rng.choice([1, 2, 3]),
        "size": rng.choice([3, 8, 16, 40]),
        "beams": rng.choice([1, 2, 3]) if form == "beams" else 1,
        "rows": 1 if decoder or rng.random() < 0.7 else rng.choice([2, 5]),
        "mask": rng.random() < 0.4,
        "filter": rng.choice([None, -3.0]),
        "attention_bias": rng.choice([None, None, (1, 1), ("b", 1), ("b", "h")]),
        "bias": rng.random() < 0.3,
        "qk": rng.random() < 0.4,
        "scale": rng.choice([None, 0.3]),
        "causal": 0 if decoder else rng.randrange(2),
        "symbolic": rng.random() < 0.7,
        "donate": rng.random() < 0.4,
        "width": rng.random() < 0.5,
    }


def arrays(case: dict[str, Any], data: np.random.Generator) -> Arrays:
    heads, size, beams, rows, form = (case[name] for name in ("heads", "size", "beams", "rows", "form"))
    kind = np.dtype(getattr(ml_dtypes, case["dtype"], case["dtype"]))
    batch, past = int(data.integers(1, 4)) * beams, int(data.integers(0, 20))
    room = past + rows + int(data.integers(0, 6))
    total = past + rows

    def normal(*shape: int) -> np.ndarray:
        return data.standard_normal(shape).astype(kind)

    width = heads * size
    inputs = {"query": normal(batch, rows, width * (3 if form == "packed" else 1))}
    if form == "cross":
        total = past + 1
        inputs |= {name: normal(batch, heads, total, size) for name in ("key", "value")}
    else:
        if form != "packed":
            inputs |= {name: normal(batch, rows, width) for name in ("key", "value")}
        length = past if form == "grown" else room
        inputs |= {name: normal(batch, heads, length, size) for name in ("past_key", "past_value")}
        if form != "grown":
            inputs["past_sequence_length"] = np.array([past], np.int32)
            for name in ("past_key", "past_value"):
                inputs[name][:, :, past:] = np.nan  # masked slots
    if form == "beams":
        table = data.integers(0, beams, (batch // beams, beams, room))
        table[:, :, past:] = data.choice([-(2**31), 2**31 - 1], table[:, :, past:].shape)
        inputs["cache_indirection"] = table.astype(np.int32)
        if case["width"] and case["operator"].startswith("Decoder"):
            inputs["beam_width"] = np.array([beams], np.int32)
    if case["mask"]:
        inputs["mask"] = (data.random((batch, total)) < 0.7).astype(np.int32)
    if case["attention_bias"] is not None:
        front = [{"b": batch, "h": heads, 1: 1}[d] for d in case["attention_bias"]]
        inputs["attention_bias"] = normal(*front, rows, total)
    if case["bias"]:
        inputs["bias"] = normal(3 * width)
    return inputs


def attributes(case: dict[str, Any]) -> dict[str, Any]:
    node_attributes = {"num_heads": case["heads"]}
    node_attributes |= {"scale": case["scale"]} if case["scale"] else {}
    node_attributes |= {"mask_filter_value": case["filter"]} if case["filter"] else {}
    if case["operator"].startswith("Decoder"):
        node_attributes |= {"output_qk": 1} if case["qk"] else {}
        node_attributes |= {"past_present_share_buffer": 1} if case["form"] in ("shared", "beams", "packed") else {}
    elif case["causal"]:
        node_attributes["unidirectional"] = 1
    return node_attributes


def reference(case: dict[str, Any], inputs: Arrays) -> Arrays:
    heads, size, beams, rows, form = (case[name] for name in ("heads", "size", "beams", "rows", "form"))
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    projections = (
        np.split(wide["query"], 3, 2) if form == "packed" else [wide[n] for n in ("query", "key", "value") if n in wide]
    )
    biases = np.split(wide.get("bias", np.zeros(3 * heads * size)), 3)
    batch = inputs["query"].shape[0]

    def split(x: np.ndarray, n: int) -> np.ndarray:
        x = (x + biases[n]).astype(inputs["query"].dtype).astype(np.float64)
        return x.reshape(batch, rows, heads, size).swapaxes(1, 2)

    q, past, presents = split(projections[0], 0), 0, {}
    if form == "cross":
        keys, values = wide["key"], wide["value"]
    else:
        new = [split(projections[n], n) for n in (1, 2)]
        caches = [wide["past_key"].copy(), wide["past_value"].copy()]
        past = caches[0].shape[2] if form == "grown" else int(inputs["past_sequence_length"][0])
        if form == "grown":
            caches = [np.concatenate([c, x], axis=2) for c, x in zip(caches, new)]
        for c, x in zip(caches, new):
            c[:, :, past : past + rows] = x
        presents |= dict(zip(("present_key", "present_value"), caches))
        keys, values = (c[:, :, : past + rows].copy() for c in caches)
        if form == "beams":
            for b in range(batch):
                for t in range(past):
                    source = b // beams * beams + int(inputs["cache_indirection"][b // beams, b % beams, t])
                    keys[b, :, t], values[b, :, t] = (c[source, :, t] for c in caches)
    s = q @ keys.swapaxes(2, 3) * (case["scale"] or size**-0.5)
    if "attention_bias" in wide:
        s = s + wide["attention_bias"]
    if "mask" in wide:
        s = s + np.where(wide["mask"] > 0, 0, case["filter"] or -10000.0)[:, None, None]
    if case["causal"]:
        s = np.where(np.arange(s.shape[3]) > past + np.arange(rows)[:, None], -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ values
    return presents | {"output": y.swapaxes(1, 2).reshape(batch, rows, -1), "qk": s}


def model(case: dict[str, Any], inputs: Arrays, dims: Any) -> onnx.ModelProto:
    names = [name if name in inputs else "" for name in INPUTS[case["operator"]]]
    while not names[-1]:
        names.pop()
    outputs = ["output", *(["present_key", "present_value"] if case["form"] != "cross" else ["", ""])]
    outputs += ["qk"] if case["qk"] else []
    while not outputs[-1]:
        outputs.pop()
    node = helper.make_node(case["operator"], names, outputs, domain="com.microsoft", **attributes(case))
    infos = [value_info(n, inputs[n].dtype.name, dims(n)) for n in names if n]
    output_infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(inputs["query"].dtype), dims(n))
        for n in outputs if n
    ]  # fmt: skip
    graph = helper.make_graph([node], "g", infos, output_infos)
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


def declare_dims(case: dict[str, Any], inputs: Arrays) -> Any:
    """Return the declared shapes: caches with room have one shape before and after the call."""
    beams = case["beams"]
    free = {"query": (0, 1), "key": (0, 1), "value": (0, 1), "mask": (0, 1), "past_key": (0, 2), "past_value": (0, 2),
            "present_key": (0, 2), "present_value": (0, 2), "cache_indirection": (0, 2), "output": (0, 1),
            "qk": (0, 2, 3)}  # fmt: skip

    def dims(name: str) -> Any:
        old = name.replace("present", "past") if case["form"] != "grown" else name
        if old not in inputs:
            return {"output": ["b", "s", "e"], "qk": ["b", case["heads"], "s", "t"]}.get(
                name, [f"{name}_{k}" for k in range(4)]
            )
        shape: list[Any] = list(inputs[old].shape)
        if not case["symbolic"]:
            return shape
        for axis in free.get(name, ()):
            shape[axis] = f"{name}_{axis}" if axis or beams > 1 else "b"
        if old in ("past_key", "past_value"):
            shape[0], shape[2] = "b", "room"
        if name == "attention_bias":
            shape[0] = "b" if case["attention_bias"][0] == "b" else 1
            shape[2:] = ["bias_rows", "bias_keys"]
        if case["form"] == "cross" and name in ("key", "value"):
            shape[1:3] = [case["heads"], f"{name}_2"]
        return shape

    return dims


def check(number: int, calls: int, target: str = "cpu") -> None:
    case, data = drawn(random.Random(number)), np.random.default_rng(number)
    compiled, session = None, None
    for _ in range(calls):
        if compiled is None or case["symbolic"]:
            inputs = arrays(case, data)
        if compiled is None:
            donate = case["donate"] and case["form"] in ("shared", "beams", "packed")
            names = ["past_key", "past_value"] if donate else []
            compiled = lowering.compile(model(case, inputs, declare_dims(case, inputs)), target, donate=names)
        want = reference(case, inputs)
        onnxruntime_results: Arrays = {}
        rows = "attention_bias" in inputs and inputs["attention_bias"].shape[0] > 1 and case["form"] == "beams"
        wide = "attention_bias" in inputs and case["form"] == "cross" and case["operator"].startswith("Decoder")
        asked = not (rows or wide or case["rows"] > 1 or case["form"] in ("grown", "packed"))
        if asked and case["dtype"] == "float32":
            if session is None:
                shapes = {name: [None] * x.ndim for name, x in inputs.items()}
                shapeless = model(case, inputs, shapes.get)
                session = onnxruntime.InferenceSession(
                    shapeless.SerializeToString(), providers=["CPUExecutionProvider"]
                )
            feeds = {n: np.nan_to_num(x) if x.dtype.kind == "f" else x for n, x in inputs.items()}
            if "cache_indirection" in feeds:
                feeds["cache_indirection"] = feeds["cache_indirection"].clip(0, case["beams"] - 1)
            onnxruntime_results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))
        arguments = {name: x.copy() for name, x in inputs.items()}
        got = compiled.run(arguments)
        tolerance = {"float32": 3e-5, "float16": 6e-3, "bfloat16": 5e-2}[case["dtype"]]
        if case["filter"] is None and not inputs.get("mask", np.ones(1)).any(-1).all():
            tolerance = max(tolerance, 2e-3)  # all scores of a row are near -10000
        for name, x in got.items():
            label = f"{name} of {number}: {case}"
            np.testing.assert_allclose(x.astype(np.float64), want[name], tolerance, tolerance, err_msg=label)
            if name in onnxruntime_results:
                assert x.shape == onnxruntime_results[name].shape, label
                y = np.nan_to_num(x) if name.startswith("present") else x
                tolerance_ = 2e-3 if name == "qk" else tolerance  # masked scores are near -10000
                np.testing.assert_allclose(y, onnxruntime_results[name], tolerance_, tolerance_, err_msg=label)


@pytest.mark.parametrize("number", RUNS["CPU"][0])
def test_equals_onnxruntime_and_the_reference(number: int) -> None:
    check(number, RUNS["CPU"][1])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", RUNS["CPU, long"][0])
def test_equals_onnxruntime_and_the_reference_at_length(number: int) -> None:
    check(number, RUNS["CPU, long"][1])


def import_decoder(**changes: Any) -> Any:
    shapes = {
        "query": ("float32", ("b", 1, 16)), "key": ("float32", ("b", 1, 16)), "value": ("float32", ("b", 1, 16)),
        "mask": None, "attention_bias": None, "past_key": ("float32", ("b", 2, "m", 8)),
        "past_value": ("float32", ("b", 2, "m", 8)), "past_sequence_length": ("int32", (1,)),
    }  # fmt: skip
    names = INPUTS["DecoderMaskedMultiHeadAttention"]
    shapes |= {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    input_types = [shapes.get(name) for name in names]
    while input_types[-1] is None:
        input_types.pop()
    return import_node(
        "DecoderMaskedMultiHeadAttention", input_types, 1, **({"num_heads": 2, "past_present_share_buffer": 1} | rest)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": ("float32", ("b", 2, 16))}, "dimension 1 of input 'x0' is 2, and must be 1"),
        ({"past_sequence_length": None}, "past_sequence_length is missing"),
        ({"past_sequence_length": ("float32", (1,))}, "past_sequence_length is float32"),
        ({"past_value": None}, "one of past_key and past_value"),
        ({"cache_indirection": ("int32", ("r", "w", "m"))}, "the number of beams"),
        ({"cache_indirection": ("int32", ("r", 2))}, "cache_indirection is int32 of rank 2"),
        ({"num_heads": 3}, "3 heads do not divide"),
        ({"past_present_share_buffer": 0, "cache_indirection": ("int32", ("r", 2, "m"))}, "cache_indirection is given"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeError, match=message):
        import_decoder(**changes)
    import_decoder()


def test_a_batch_size_that_only_caches_declare() -> None:
    """The query declares the batch by a name, the caches by a number, with and without room."""
    caches = dict.fromkeys(("past_key", "past_value"), ("float32", (3, 2, 9, 8)))
    grown = {"past_present_share_buffer": 0, "past_sequence_length": None}
    for more in ({}, grown):
        import_decoder(**caches, **more, attention_bias=("float32", ("b", 1, 1, "t")))


def test_a_cache_without_room_is_an_error() -> None:
    case = drawn(random.Random(0)) | {"operator": "MultiHeadAttention", "form": "shared", "rows": 1, "beams": 1,
        "symbolic": True, "mask": False, "attention_bias": None, "dtype": "float32", "qk": False}  # fmt: skip
    inputs = arrays(case, np.random.default_rng(0))
    compiled = lowering.compile(model(case, inputs, declare_dims(case, inputs)))
    for past in (inputs["past_key"].shape[2], -1, 2**31 - 1):
        with raises("node.cache_too_small", "run.negative_size"):
            compiled.run(inputs | {"past_sequence_length": np.array([past], np.int32)})
