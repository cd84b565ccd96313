"""Every way to write a growing cache gives the same decoder: steps in place equal the whole run of the plain model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from tests.support.error_codes import raises

HEADS, KV_HEADS, SIZE, WIDTH, VOCABULARY, CAPACITY = 4, 2, 16, 24, 20, 16


@dataclass(frozen=True)
class Case:
    """One attention with its attributes, and which optional inputs it has."""

    operator: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    opset: int = 24


CASES = {
    "GQA": Case("GroupQueryAttention"),
    "GQA, packed": Case("GroupQueryAttention", {}, ("packed",)),
    "GQA, rotary": Case("GroupQueryAttention", {"do_rotary": 1}, ("rotary",)),
    "GQA, positions, pairs": Case(
        "GroupQueryAttention", {"do_rotary": 1, "rotary_interleaved": 1}, ("rotary", "positions")
    ),
    "GQA, window, cap": Case("GroupQueryAttention", {"local_window_size": 3, "softcap": 2.0}, ("rotary",)),
    "GQA, norms": Case("GroupQueryAttention", {"qk_norm_epsilon": 0.1, "k_norm_epsilon": 0.5}, ("norms",)),
    "GQA, bias": Case("GroupQueryAttention", {"scale": 0.3}, ("bias",)),
    "GQA, sinks": Case("GroupQueryAttention", {}, ("sinks",)),
    "GQA, smooth, window": Case("GroupQueryAttention", {"smooth_softmax": 1, "local_window_size": 3}),
    "GQA, opset 21": Case("GroupQueryAttention", {}, (), 21),
    "MHA, causal": Case("MultiHeadAttention", {"unidirectional": 1}),
    "MHA, all": Case("MultiHeadAttention", {"unidirectional": 1}, ("projection", "padding", "bias")),
    "joint": Case("JointAttention", {"unidirectional": 1}, ("padding",)),
    "joint, bias": Case("JointAttention", {"unidirectional": 1, "scale": 0.3}, ("bias",)),
    "Attention": Case("Attention", {"is_causal": 1}),
    "Attention, 4-D": Case("Attention", {"is_causal": 1, "softcap": 2.0}, ("heads",)),
    "Attention, bool mask": Case("Attention", {"is_causal": 1}, ("mask",)),
    "Attention, float mask": Case("Attention", {"is_causal": 1}, ("bias",)),
    "Attention, window": Case("Attention", {"is_causal": 1, "left_window_size": 2}, ("mask",), 25),
    "Attention, computed window": Case("Attention", {}, ("computed window",)),
    "Attention, opset 23": Case("Attention", {"is_causal": 1}, ("one key",), 23),
}


class Builder:
    """Nodes and weights of a model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(5)

    def node(self, operator: str, inputs: list[str], outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = [f"{operator}_{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, array: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def random(self, *shape: int) -> str:
        return self.weight(self.rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0], dtype=np.float32))

    def integers(self, *elements: int) -> str:
        return self.weight(np.array(elements, np.int64))


def model_of(case: Case) -> onnx.ModelProto:
    """Embeddings, one attention over a growing cache, logits; ids [B, S], mask [B, T], past [B, H, P, D]."""
    b = Builder()
    is_joint = case.operator == "JointAttention"
    kv_heads = HEADS if is_joint or case.operator == "MultiHeadAttention" else KV_HEADS
    x = b.node("Gather", [b.random(VOCABULARY, WIDTH), "ids"])
    if is_joint:
        y, *presents = joint(b, case, x)
    else:
        q, k, v = (b.node("MatMul", [x, b.random(WIDTH, n * SIZE)]) for n in (HEADS, kv_heads, kv_heads))
        write = {"GroupQueryAttention": grouped, "MultiHeadAttention": multi_head, "Attention": standard}[case.operator]
        y, *presents = write(b, case, q, k, v)
    b.nodes.append(helper.make_node("MatMul", [y, b.random(HEADS * SIZE, VOCABULARY)], ["logits"]))
    caches = ("past",) if is_joint else ("past_k", "past_v")
    rename = dict(zip(presents, (name.replace("past", "present") for name in caches)))
    for node in b.nodes:
        for index, name in enumerate(node.output):
            node.output[index] = rename.get(name, name)
    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    inputs = [("ids", ints, ["B", "S"]), ("keep", ints, ["B", "T"])]
    inputs += [("at", ints, ["B", "S"])] if "positions" in case.inputs else []
    front: list[Any] = [2] if is_joint else []
    inputs += [(name, floats, [*front, "B", kv_heads, "P", SIZE]) for name in caches]
    outputs = [("logits", floats, ["B", "S", VOCABULARY])]
    outputs += [(name, floats, [*front, "B", kv_heads, "T", SIZE]) for name in rename.values()]
    values = [[helper.make_tensor_value_info(*value) for value in group] for group in (inputs, outputs)]
    graph = helper.make_graph(b.nodes, "decoder", *values, b.weights)
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def grouped(b: Builder, case: Case, q: str, k: str, v: str) -> Any:
    count = b.node("Sub", [b.node("ReduceSum", ["keep", b.integers(1)], keepdims=0), b.weight(np.int64(1))])
    total = b.node("Gather", [b.node("Shape", ["keep"]), b.weight(np.int64(1))])
    lengths = [b.node("Cast", [value], to=TensorProto.INT32) for value in (count, total)]
    inputs = [q, k, v, "past_k", "past_v", *lengths, *[""] * 9]
    if "packed" in case.inputs:
        inputs[:3] = [b.node("Concat", [q, k, v], axis=-1), "", ""]
    if "rotary" in case.inputs:
        angles = np.arange(64)[:, None] * 0.1 ** np.arange(SIZE // 2)
        inputs[7:9] = [b.weight(np.cos(angles).astype("f4")), b.weight(np.sin(angles).astype("f4"))]
    if "positions" in case.inputs:
        inputs[9] = "at"
    if "bias" in case.inputs:
        inputs[10] = added(b)
    if "sinks" in case.inputs:
        inputs[11] = b.random(HEADS)
    if "norms" in case.inputs:
        inputs[14:16] = [b.random(SIZE), b.random(SIZE)]
    heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    return b.node("GroupQueryAttention", inputs, 3, "com.microsoft", **heads, **case.attributes)


def multi_head(b: Builder, case: Case, q: str, k: str, v: str) -> Any:
    inputs = [q, k, v, "", "", "", "past_k", "past_v"]
    if "projection" in case.inputs:
        inputs[3] = b.random(3 * HEADS * SIZE)
    if "padding" in case.inputs:
        inputs[4] = b.node("Cast", ["keep"], to=TensorProto.INT32)
    if "bias" in case.inputs:
        inputs[5] = added(b)
    return b.node("MultiHeadAttention", inputs, 3, "com.microsoft", num_heads=HEADS, **case.attributes)


def joint(b: Builder, case: Case, x: str) -> Any:
    """Write the form of com.microsoft, which multiplies its weights itself and has one past of keys and values."""
    inputs = [x, b.random(WIDTH, 3 * HEADS * SIZE), b.random(3 * HEADS * SIZE), "", "past", ""]
    if "padding" in case.inputs:
        inputs[3] = b.node("Cast", ["keep"], to=TensorProto.INT32)
    if "bias" in case.inputs:
        inputs[5] = added(b)
    return b.node("Attention", inputs, 2, "com.microsoft", num_heads=HEADS, **case.attributes)


def standard(b: Builder, case: Case, q: str, k: str, v: str) -> Any:
    mask, attributes = "", {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS, **case.attributes}
    if "mask" in case.inputs:
        mask = b.node("Unsqueeze", [b.node("Cast", ["keep"], to=TensorProto.BOOL), b.integers(1, 2)])
    elif "bias" in case.inputs:
        mask = added(b)
    elif "computed window" in case.inputs:
        mask = windowed(b)
    elif "one key" in case.inputs:  # a number for all keys
        mask = b.weight(np.full((1, 1, 1, 1), 0.5, np.float32))
    if "heads" not in case.inputs:
        return b.node("Attention", [q, k, v, mask, "past_k", "past_v"], 3, **attributes)
    attributes = case.attributes
    q, k, v = (
        b.node("Transpose", [b.node("Reshape", [x, b.integers(0, 0, n, SIZE)])], perm=[0, 2, 1, 3])
        for x, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
    )
    y, *presents = b.node("Attention", [q, k, v, mask, "past_k", "past_v"], 3, **attributes)
    return b.node("Reshape", [b.node("Transpose", [y], perm=[0, 2, 1, 3]), b.integers(0, 0, -1)]), *presents


def added(b: Builder) -> str:
    """Return a number for each key [1, 1, S, T]: minus its position, in tenths."""
    keys = b.node("CumSum", ["keep", b.weight(np.int64(1))])
    by_key = b.node("Mul", [b.node("Cast", [keys], to=TensorProto.FLOAT), b.weight(np.float32(-0.1))])
    batch, rows = (b.node("Shape", ["ids"], start=axis, end=axis + 1) for axis in (0, 1))
    shape = b.node("Concat", [batch, b.integers(1), rows, b.node("Shape", ["keep"], start=1)], axis=0)
    return b.node("Expand", [b.node("Unsqueeze", [by_key, b.integers(1, 2)]), shape])


def windowed(b: Builder) -> str:
    """A mask [B, 1, S, T] that is added: tokens, counted without padding, see themselves and three before."""
    keys = b.node("CumSum", ["keep", b.weight(np.int64(1))])
    new = b.node("Sub", [b.node("Shape", ["keep"], start=1), b.node("Shape", ["ids"], start=1)])
    rows = b.node("Slice", [keys, new, b.integers(2**62), b.integers(1)])
    distance = b.node(
        "Sub", [b.node("Unsqueeze", [rows, b.integers(1, 3)]), b.node("Unsqueeze", [keys, b.integers(1, 2)])]
    )
    near = [
        b.node("GreaterOrEqual", [distance, b.weight(np.int64(0))]), b.node("Less", [distance, b.weight(np.int64(4))]),
        b.node("Unsqueeze", [b.node("Cast", ["keep"], to=TensorProto.BOOL), b.integers(1, 2)]),
    ]  # fmt: skip
    seen = b.node("And", [b.node("And", near[:2]), near[2]])
    return b.node("Where", [seen, b.weight(np.float32(0)), b.weight(np.finfo(np.float32).min)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_whole(name: str) -> None:
    model = model_of(CASES[name])
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (2, 9))
    expected = plainly(model, ids)
    decoder = lowering.compile(model, static_cache=CAPACITY).decoder()
    answers = [
        decoder.prefill(ids[:, :4]),
        decoder.prefill(ids[:, 4:6]),
        *(decoder.step(t)[:, None] for t in ids.T[6:]),
    ]
    np.testing.assert_allclose(np.concatenate(answers, axis=1), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert (decoder.length, decoder.capacity) == (9, CAPACITY)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_served_requests_equal_the_whole(name: str) -> None:
    model = model_of(CASES[name])
    served = lowering.compile(model, serve=lowering.Serve(context=CAPACITY, tokens_per_block=4))
    batcher = lowering.Batcher(served, blocks=16, tokens_per_step=5)
    rows = [np.random.default_rng(n).integers(0, VOCABULARY, n) for n in (9, 2, 13)]
    for request, ids in enumerate(rows):
        batcher.add(request, ids)
    while batcher.waiting:
        for request, logits in batcher.step().items():
            assert isinstance(request, int)
            expected = plainly(model, rows[request][None])[0]
            np.testing.assert_allclose(logits, expected[-1], rtol=0, atol=2e-5 * np.abs(expected).max())


def plainly(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    """The logits of the model as it is, for whole sequences."""
    compiled = lowering.compile(model)
    inputs: dict[str, Any] = {"ids": ids, "keep": np.ones_like(ids)}
    for spec in compiled.inputs:
        if spec.name.startswith("past"):
            inputs[spec.name] = np.zeros((*spec.dims[:-4], len(ids), spec.dims[-3], 0, SIZE), np.float32)
        elif spec.name == "at":
            inputs["at"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return compiled.run(inputs)["logits"]


def test_caches_of_keys_and_values_in_one_are_verified() -> None:
    """The model keeps one cache, and the compiled decoder its halves."""
    model = model_of(CASES["joint"])
    for options in ({"static_cache": CAPACITY}, {"serve": lowering.Serve(context=CAPACITY, tokens_per_block=4)}):
        assert lowering.verify(model, against="onnxruntime", **options).first_difference is None


@pytest.mark.parametrize("room", ["room", CAPACITY])
def test_caches_with_room_grow(room: str | int) -> None:
    """GroupQueryAttention whose present has the memory, and the size, of its past."""
    model = model_of(CASES["GQA, rotary"])
    for value in [*model.graph.input, *model.graph.output]:
        dim = value.type.tensor_type.shape.dim[2] if value.name.startswith("p") else None
        if dim is not None and isinstance(room, int):
            dim.dim_value = room
        elif dim is not None:
            dim.dim_param = str(room)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))
    expected = plainly(model_of(CASES["GQA, rotary"]), ids)
    decoder = lowering.compile(model, static_cache=CAPACITY).decoder()
    logits = np.concatenate([decoder.prefill(ids[:, :5]), decoder.prefill(ids[:, 5:])], axis=1)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_masks_of_all_tokens_are_not_served_as_causal() -> None:
    """Every token of a prompt sees the later ones, which a paged cache does not have yet."""
    with raises("serve.mask_unsupported"):
        lowering.compile(model_of(Case("MultiHeadAttention", {}, ("padding",))), serve=lowering.Serve(context=CAPACITY))
    with raises("serve.mask_missing"):
        lowering.compile(model_of(Case("MultiHeadAttention")), serve=lowering.Serve(context=CAPACITY))


def test_a_form_that_stays_says_which_node() -> None:
    model = model_of(Case("GroupQueryAttention", {"qk_output": 1}))
    with raises("model.cache_unsupported"):
        lowering.compile(model, static_cache=CAPACITY)
    with raises("model.cache_unsupported"):
        lowering.compile(model, serve=lowering.Serve(context=CAPACITY))


def test_a_batch_of_one_refuses_two() -> None:
    decoder = lowering.compile(model_of(CASES["GQA, rotary"]), static_cache=CAPACITY, dims={"B": 1}).decoder()
    with raises("input.size_mismatch"):
        decoder.prefill([[1, 2], [3, 4]])
    assert decoder.length == 0 and decoder.prefill([1, 2]).shape == (1, 2, VOCABULARY)


def test_unnamed_sizes_leave_the_usual_names() -> None:
    """Where shapes do not tell which inputs go together."""
    model = model_of(CASES["GQA, positions, pairs"])
    renamed = {"ids": "input_ids", "keep": "attention_mask", "at": "position_ids"}
    for value in model.graph.input:
        value.name = renamed.get(value.name, value.name)
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.ClearField("dim_param")
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    decoder = lowering.compile(model, static_cache=CAPACITY).decoder()
    expected = lowering.compile(model_of(CASES["GQA, positions, pairs"]), static_cache=CAPACITY).decoder()
    np.testing.assert_array_equal(decoder.prefill([[3, 1, 4]]), expected.prefill([[3, 1, 4]]))


def test_inputs_are_found_by_what_they_feed() -> None:
    decoder = lowering.compile(model_of(CASES["GQA, positions, pairs"]), static_cache=CAPACITY).manifest.decoder
    assert decoder is not None
    assert (decoder.ids, decoder.mask, decoder.positions) == ("ids", "keep", "at")


def test_names_override_and_are_checked() -> None:
    model = model_of(CASES["GQA, rotary"])
    with raises("input.name_unknown"):
        lowering.compile(model, serve=lowering.Serve(context=8, ids="tokens"))
    with raises("decoder.ids_unknown"):
        lowering.compile(model, static_cache=8).decoder(ids="tokens")
    with raises("decoder.fixed_missing"):
        lowering.compile(model, static_cache=8).decoder(ids="keep")
