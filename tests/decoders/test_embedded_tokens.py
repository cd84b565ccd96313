"""Decoders that take embeddings in place of token ids, as those of models of images do: in place, served, refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from lowering.errors import InputError
from lowering.graph.caches.roles import InputRoles, find_roles
from tests.support.error_codes import raises

HEADS, SIZE, WIDTH, VOCABULARY, CAPACITY = 2, 4, 6, 10, 24


def model_of(axes: int = 1, second: bool = False) -> onnx.ModelProto:
    """One attention over a growing cache, whose angles are rows of a table by position.

    embeddings [B, S, 6], mask [B, T], positions [B, S] or, of several axes, [axes, B, S], which are added up; second:
    an input of other embeddings, which are added to the first, times a factor that is an input, too.
    """
    rng = np.random.default_rng(2)
    angles = np.arange(4 * CAPACITY)[:, None] * 0.3 ** np.arange(SIZE // 2)
    weights = {
        "wq": rng.standard_normal((WIDTH, HEADS * SIZE)), "wk": rng.standard_normal((WIDTH, HEADS * SIZE)),
        "wv": rng.standard_normal((WIDTH, HEADS * SIZE)), "wo": rng.standard_normal((HEADS * SIZE, VOCABULARY)),
        "cos": np.cos(angles), "sin": np.sin(angles),
    }  # fmt: skip
    position_dims = ["B", "S"] if axes == 1 else [axes, "B", "S"]
    node = helper.make_node
    nodes = [
        *([node("Mul", ["hidden", "factor"], ["part"])] if second else []),
        node("Add", ["embeddings", "part"], ["x"]) if second else node("Identity", ["embeddings"], ["x"]),
        node("Identity", ["at"], ["index"]) if axes == 1 else node("ReduceSum", ["at", "first"], ["index"], keepdims=0),
        *(node("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"),
        *(node("Gather", [table, "index"], [f"{table}_rows"]) for table in ("cos", "sin")),
        *(
            node("RotaryEmbedding", [name, "cos_rows", "sin_rows"], [f"{name}_turned"], num_heads=HEADS)
            for name in "qk"
        ),
        node("Cast", ["keep"], ["is_visible"], to=TensorProto.BOOL),
        node("Unsqueeze", ["is_visible", "middle"], ["mask"]),
        node(
            "Attention", ["q_turned", "k_turned", "v", "mask", "past_k", "past_v"], ["y", "present_k", "present_v"],
            is_causal=1, q_num_heads=HEADS, kv_num_heads=HEADS,
        ),
        node("MatMul", ["y", "wo"], ["logits"]),
    ]  # fmt: skip
    floats, ints = TensorProto.FLOAT, TensorProto.INT64
    value = helper.make_tensor_value_info
    inputs = [value("embeddings", floats, ["B", "S", WIDTH])]
    inputs += [value("hidden", floats, ["B", "S", WIDTH]), value("factor", floats, [])] if second else []
    inputs += [value("keep", ints, ["B", "T"]), value("at", ints, position_dims)]
    inputs += [value(name, floats, ["B", HEADS, "P", SIZE]) for name in ("past_k", "past_v")]
    outputs = [value("logits", floats, ["B", "S", VOCABULARY])]
    outputs += [value(name, floats, ["B", HEADS, "T", SIZE]) for name in ("present_k", "present_v")]
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    tensors += [numpy_helper.from_array(np.array(a, np.int64), n) for n, a in {"first": [0], "middle": [1, 2]}.items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def whole(model: onnx.ModelProto, embeddings: np.ndarray, axes: int) -> np.ndarray:
    batch, count = embeddings.shape[:2]
    past = np.zeros((batch, HEADS, 0, SIZE), np.float32)
    at = np.broadcast_to(np.arange(count), (batch, count) if axes == 1 else (axes, batch, count))
    inputs: dict[str, Any] = {"embeddings": embeddings, "keep": np.ones((batch, count), np.int64), "at": at}
    return lowering.compile(model).run({**inputs, "past_k": past, "past_v": past})["logits"]


def embedded(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("axes", [1, 3])
def test_embeddings_in_place_and_served(axes: int) -> None:
    model = model_of(axes)
    tokens = embedded(0, 2, 9)
    expected = whole(model, tokens, axes)
    bar = 1e-5 * np.abs(expected).max()
    decoder = lowering.compile(model, static_cache=CAPACITY).decoder()
    answers = [decoder.prefill(tokens[:, :5]), *(decoder.step(tokens[:, k])[:, None] for k in range(5, 9))]
    np.testing.assert_allclose(np.concatenate(answers, axis=1), expected, rtol=0, atol=bar)
    served = lowering.compile(model, serve=lowering.Serve(context=CAPACITY, tokens_per_block=4))
    batcher = lowering.Batcher(served, blocks=7, tokens_per_step=5)
    for request in (0, 1):
        batcher.add(request, tokens[request, :7])
    while batcher.waiting:
        for request, logits in batcher.step().items():
            count = len(batcher.tokens(request))
            np.testing.assert_allclose(logits, expected[request, count - 1], rtol=0, atol=bar)
            if count < 9:
                batcher.extend(request, tokens[request, count])


def test_equal_embeddings_share_no_blocks() -> None:
    served = lowering.compile(model_of(), serve=lowering.Serve(context=CAPACITY, tokens_per_block=4))
    batcher = lowering.Batcher(served, blocks=8)
    for request in "ab":
        batcher.add(request, embedded(0, 9))
        batcher.step()
    assert (batcher.usage().used, batcher.usage().shared) == (6, 0)


@pytest.mark.parametrize(("other", "ids"), [("Cast", "tokens"), ("", "embeddings"), ("Equal", "embeddings")])
def test_ids_next_to_embeddings(other: str, ids: str) -> None:
    """An input that picks rows of a table of another size than the vocabulary is a position, unless another input can
    be one. An input that is only compared, as with the id of an image, cannot."""
    node, value = helper.make_node, helper.make_tensor_value_info
    nodes = [node("Gather", ["table", "tokens"], ["rows"]), node("Add", ["rows", "embeddings"], ["x"])]
    if other:
        attributes = {"to": TensorProto.FLOAT} if other == "Cast" else {}
        nodes.append(node(other, ["at"] if other == "Cast" else ["at", "image"], ["angle"], **attributes))
    nodes += [node("MatMul", ["x", "out"], ["logits"])]
    inputs = [value("embeddings", TensorProto.FLOAT, ["B", "S", WIDTH]), value("tokens", TensorProto.INT64, ["B", "S"])]
    inputs += [value("at", TensorProto.INT64, ["B", "S"])] if other else []
    outputs = [value("logits", TensorProto.FLOAT, ["B", "S", VOCABULARY])]
    tables = {"table": (VOCABULARY + 3, WIDTH), "out": (WIDTH, VOCABULARY)}
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in tables.items()]
    tensors.append(numpy_helper.from_array(np.int64(3), "image"))
    model = ir.from_proto(helper.make_model(helper.make_graph(nodes, "roles", inputs, outputs, tensors)))
    roles = find_roles(model, InputRoles(""), [])
    assert (roles.ids, roles.positions) == (ids, "at" if other == "Cast" else "tokens")


def test_what_is_no_embedding_is_refused() -> None:
    served = lowering.compile(model_of(), serve=lowering.Serve(context=CAPACITY))
    batcher = lowering.Batcher(served, blocks=8)
    for prompt in ([1, 2], embedded(0, 3)[:, :5], "ab"):
        with raises("batcher.token_shape_mismatch"):
            batcher.add("a", prompt)
    batcher.add("a", embedded(0, 3))
    with raises("batcher.token_shape_mismatch"):
        batcher.extend("a", 3)
    for prompt in (np.ma.masked_array(embedded(0, 3), mask=True), [[1.0], [1.0, 2.0]]):
        with raises("batcher.token_shape_mismatch"):
            batcher.add("b", prompt)
    with raises("batcher.token_value_too_large"):
        batcher.add("b", np.full((1, WIDTH), 1e300))
    with raises("batcher.prompt_length_out_of_range"):
        batcher.add("b", np.zeros((0, WIDTH)))


def test_tokens_of_several_inputs() -> None:
    """A draft model reads the embedding of a token and the hidden state of another model, and a factor of both."""
    model = model_of(second=True)
    x, hidden = embedded(0, 2, 9), embedded(1, 2, 9)
    factor = np.float32(0.5)
    expected = whole(model_of(), x + factor * hidden, axes=1)
    bar = 1e-5 * np.abs(expected).max()

    def select_tokens(rows: Any, index: Any) -> dict[str, np.ndarray]:
        return {"embeddings": x[rows, index], "hidden": hidden[rows, index]}

    everything = slice(None)
    compiled = lowering.compile(model, static_cache=CAPACITY)
    assert compiled.setup is None
    decoder = compiled.decoder(fixed={"factor": factor})
    answers = [decoder.prefill(select_tokens(everything, slice(5)))]
    answers += [decoder.step(select_tokens(everything, k))[:, None] for k in range(5, 9)]
    np.testing.assert_allclose(np.concatenate(answers, axis=1), expected, rtol=0, atol=bar)
    served = lowering.compile(model, serve=lowering.Serve(context=CAPACITY, tokens_per_block=4))
    batcher = lowering.Batcher(served, blocks=7, tokens_per_step=5, fixed={"factor": factor})
    for request in (0, 1):
        batcher.add(request, select_tokens(request, slice(7)))
    while batcher.waiting:
        for request, logits in batcher.step().items():
            count = len(batcher.tokens(request))
            np.testing.assert_allclose(logits, expected[request, count - 1], rtol=0, atol=bar)
            if count < 9:
                batcher.extend(request, select_tokens(request, count))


def test_what_is_no_token_of_several_inputs_is_refused() -> None:
    model = model_of(second=True)
    x = embedded(0, 3)
    decoder = lowering.compile(model, static_cache=CAPACITY).decoder(fixed={"factor": 1.0})
    for tokens, said in (
        (x[None], "each token has a value of embeddings, hidden: pass a mapping"),
        ({"embeddings": x[None]}, "the mapping has embeddings"),
        ({"embeddings": x[None], "hidden": x[None, :2]}, r"not 'embeddings' \[1, 3\], 'hidden' \[1, 2\]"),
        ({"embeddings": x[None], "hidden": x}, r"'hidden' must be \[batch, tokens, width\]"),
    ):
        with pytest.raises(InputError, match=said):
            decoder.prefill(tokens)
    served = lowering.compile(model, serve=lowering.Serve(context=CAPACITY))
    for fixed, said in (
        (None, "must contain factor, not none"), ({"scale": 1.0}, "factor, not scale"), ([1.0], "factor, not list"),
        ({"factor": [1.0, 2.0]}, r"'factor' as float64\[2\], and the model takes factor: float32\[\]"),
        ({"factor": "much"}, "'factor' as str"), ({"factor": 1e300}, "which float32 cannot represent"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            lowering.Batcher(served, blocks=8, fixed=fixed)
    batcher = lowering.Batcher(served, blocks=8, fixed={"factor": 1.0})
    for prompt, said in (
        (x, "must be a mapping of embeddings, hidden, not ndarray"),
        ({"embeddings": x}, r"not a mapping of \['embeddings'\]"),
        ({"embeddings": x, "hidden": x[:2]}, "3 of 'embeddings', 2 of 'hidden': give each token"),
        ({"embeddings": x, "hidden": x[:, :4]}, r"'hidden' of request 'a' must be \[tokens, 6\], not float32\[3, 4\]"),
    ):
        with pytest.raises(InputError, match=said):
            batcher.add("a", prompt)
    batcher.add("a", {"embeddings": x, "hidden": x})
    with raises("batcher.tokens_not_a_mapping"):
        batcher.extend("a", x[0])
