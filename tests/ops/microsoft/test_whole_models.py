"""Whole models of com.microsoft operators: a decoder as onnxruntime-genai builds it, and optimized exports."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from tests.support.error_codes import raises

from .comparison import assert_close, opsets

RNG = np.random.default_rng(0)
VOCABULARY, HIDDEN, HEADS, KV_HEADS, SIZE, LAYERS, POSITIONS = 40, 64, 4, 2, 16, 2, 64


class Builder:
    """A graph under construction; weights are drawn at their first use."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, operator: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        vendor = operator[:4] in ("Skip", "Grou", "MatM") and operator != "MatMul"
        domain = "com.microsoft" if vendor else ""
        self.nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names

    def weight(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def linear(self, x: str, rows: int, columns: int) -> str:
        """Add a weight of 4 bits in blocks of 32."""
        packed = RNG.integers(0, 256, (columns, rows // 32, 16)).astype(np.uint8)
        scales = (RNG.random((columns, rows // 32)) / rows**0.5 / 2).astype(np.float32)
        inputs = [x, self.weight(packed), self.weight(scales)]
        return self.node("MatMulNBits", inputs, K=rows, N=columns, bits=4, block_size=32)[0]


def make_decoder(window: int, shared: bool) -> onnx.ModelProto:
    """Return a Llama-shaped decoder with the interface of onnxruntime-genai. shared declares caches of one length."""
    b = Builder()
    ends = b.node("ReduceSum", ["attention_mask", b.weight(np.array([1]))], keepdims=0)[0]
    ends = b.node("Cast", b.node("Sub", [ends, b.weight(np.array(1))]), to=TensorProto.INT32)[0]
    shape = b.node("Shape", ["attention_mask"])[0]
    total = b.node("Cast", b.node("Gather", [shape, b.weight(np.array(1))], axis=0), to=TensorProto.INT32)[0]
    angles = np.arange(POSITIONS)[:, None] / 100.0 ** (np.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = b.weight(np.cos(angles).astype(np.float32)), b.weight(np.sin(angles).astype(np.float32))

    def norm_weight() -> str:
        return b.weight(RNG.random(HIDDEN).astype(np.float32))

    table = b.weight(RNG.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32))
    total_x = b.node("Gather", [table, "input_ids"])[0]
    x = b.node("SimplifiedLayerNormalization", [total_x, norm_weight()], axis=-1, epsilon=1e-5, stash_type=1)[0]
    presents = []
    for layer in range(LAYERS):
        qkv = b.linear(x, HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        y, *_ = b.node(
            "GroupQueryAttention",
            [qkv, "", "", *past, ends, total, cos, sin],
            3,
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
            local_window_size=window,
        )
        for k, kind in enumerate(("key", "value"), start=1):
            presents.append(f"present.{layer}.{kind}")
            b.nodes[-1].output[k] = presents[-1]
        y = b.linear(y, HEADS * SIZE, HIDDEN)
        outputs = b.node("SkipSimplifiedLayerNormalization", [total_x, y, norm_weight()], 4, epsilon=1e-5)
        x, total_x = outputs[0], outputs[3]
        b.nodes[-1].output[1] = b.nodes[-1].output[2] = ""
        gate, up = b.linear(x, HIDDEN, 96), b.linear(x, HIDDEN, 96)
        silu = b.node("Mul", [gate, b.node("Sigmoid", [gate])[0]])[0]
        y = b.linear(b.node("Mul", [silu, up])[0], 96, HIDDEN)
        outputs = b.node("SkipSimplifiedLayerNormalization", [total_x, y, norm_weight()], 4, epsilon=1e-5)
        x, total_x = outputs[0], outputs[3]
        b.nodes[-1].output[1] = b.nodes[-1].output[2] = ""
    b.nodes.append(
        helper.make_node(
            "MatMul", [x, b.weight(RNG.standard_normal((HIDDEN, VOCABULARY)).astype(np.float32))], ["logits"]
        )
    )

    def cache(name: str, length: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", KV_HEADS, length, SIZE])

    past_length, total_length = ("max_length",) * 2 if shared else ("past_length", "total_length")
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total_length"]),
        *(cache(name.replace("present", "past_key_values"), past_length) for name in presents),
    ]
    outputs_ = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", VOCABULARY])]
    graph = helper.make_graph(
        b.nodes, "decoder", inputs, [*outputs_, *(cache(n, total_length) for n in presents)], b.weights
    )
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


@pytest.mark.parametrize(("shared", "window"), [(False, -1), (True, 5)])
def test_decoder_step_by_step(shared: bool, window: int) -> None:
    """A ragged prompt, then tokens one by one. Shared caches are updated in place."""
    model = make_decoder(window, shared)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    compiled = lowering.compile(model, donate=(r"past_key_values\..*",) if shared else ())
    names = [o.name for o in session.get_outputs()]
    batch, ends = 3, np.array([6, 2, 4])
    room = 12 if shared else 0
    caches, expected_caches = (
        {
            n.replace("present", "past_key_values"): np.zeros((batch, KV_HEADS, room, SIZE), np.float32)
            for n in names[1:]
        }
        for _ in range(2)
    )
    ids = RNG.integers(0, VOCABULARY, (batch, 6))
    mask = (np.arange(6) < ends[:, None]).astype(np.int64)
    for step in range(5):
        feeds = {"input_ids": ids, "attention_mask": mask}
        expected = dict(zip(names, session.run(names, {**feeds, **expected_caches})))
        before = dict(caches)
        got = compiled.run({**feeds, **caches})
        for b in range(batch):
            rows = ends[b] if step == 0 else 1
            assert_close(got["logits"][b, :rows], expected["logits"][b, :rows], f"step {step}, sequence {b}")
        expected_caches = {n.replace("present", "past_key_values"): expected[n] for n in names[1:]}
        caches = {n.replace("present", "past_key_values"): got[n] for n in names[1:]}
        assert all((caches[n] is before[n]) == shared for n in caches)
        ids = RNG.integers(0, VOCABULARY, (batch, 1))
        ends = ends + 1
        mask = (np.arange(6 + step + 1) < ends[:, None]).astype(np.int64)


def test_a_cache_without_room_is_an_error() -> None:
    compiled = lowering.compile(make_decoder(-1, shared=True))
    feeds = {"input_ids": np.zeros((1, 3), np.int64), "attention_mask": np.ones((1, 9), np.int64)}
    caches = {
        n: np.zeros((1, KV_HEADS, 8, SIZE), np.float32)
        for n in (i.name for i in compiled.inputs)
        if n.startswith("past")
    }
    with raises("run.size_mismatch"):
        compiled.run({**feeds, **caches})


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small BERT with random weights, as PyTorch's tracing exporter writes it: the optimizers match it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        attn_implementation="eager",
    )
    inner = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in inner.parameters():
        parameter.data.mul_(5)

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Any, mask: Any, kinds: Any) -> Any:
            return self.inner(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state

    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    ones = torch.ones(2, 7, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in (*names, "y")}
    torch.onnx.export(
        Hidden(),
        (ones,) * 3,
        path,
        input_names=names,
        output_names=["y"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    return path


@pytest.mark.slow  # needs torch
@pytest.mark.parametrize("form", ["Attention", "MultiHeadAttention", "of the session"])
def test_optimized_bert(bert: Path, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "fused.onnx")
    if form == "of the session":  # the optimizations of any session of onnxruntime
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = path
        onnxruntime.InferenceSession(bert, options, ["CPUExecutionProvider"])
        fused = "BiasGelu"
    else:
        from onnxruntime.transformers import fusion_options, optimizer

        chosen = fusion_options.FusionOptions("bert")
        chosen.use_multi_head_attention = form == "MultiHeadAttention"
        how = {"num_heads": 4, "hidden_size": 32, "optimization_options": chosen, "opt_level": 0}
        optimizer.optimize_model(str(bert), "bert", **how).save_model_to_file(path)
        fused = form
    counts = collections.Counter((n.domain, n.op_type) for n in onnx.load(path).graph.node)
    assert counts["com.microsoft", fused] == 1
    session = onnxruntime.InferenceSession(str(bert), providers=["CPUExecutionProvider"])
    compiled = lowering.compile(path)
    for batch, length in ((1, 1), (3, 17)):
        ids, kinds = RNG.integers(0, VOCABULARY, (batch, length)), RNG.integers(0, 2, (batch, length))
        mask = (np.arange(length) < length - np.arange(batch)[:, None]).astype(np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}
        (expected,) = session.run(["y"], feeds)
        inputs = {name: x.astype(kind) for (name, x), kind in zip(feeds.items(), _types(path, feeds))}
        assert_close(compiled.run(inputs)["y"], expected, f"{form}, batch {batch}, length {length}")


def _types(path: str, names: Any) -> list[Any]:
    """Return the types after the optimizer, which makes int64 inputs int32."""
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.load(path).graph.input}
    return [helper.tensor_dtype_to_np_dtype(kinds[name]) for name in names]
