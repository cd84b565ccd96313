"""A Llama-style decoder as an ONNX model of opset 24, with random weights of a fixed seed.

Each layer has RMSNormalization-23, Q/K/V projections, RotaryEmbedding-23, TensorScatter-24 into slot caches, grouped-
query Attention-24 over the valid part of the caches (nonpad_kv_seqlen), an output projection, RMSNormalization-23 and a
SwiGLU with Swish-24. Batch, number of new tokens and cache capacity are symbolic: one model serves prefill and decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder; `heads` are query heads, `kv_heads` key/value heads."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 704
    vocabulary: int = 4096
    positions: int = 8192
    seed: int = 0


class ModelBuilder:
    """A collector of nodes and initializers; every method returns the name of the value that it adds."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def node(self, op: str, *inputs: str, name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: np.ndarray, name: str) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int, name: str, scale: float | None = None) -> str:
        """Add normal numbers times `scale`, by default such that matmuls keep the size of activations."""
        scale = 1 / np.sqrt(shape[0]) if scale is None else scale
        return self.constant((self.rng.standard_normal(shape) * scale).astype(np.float32), name)


def build_decoder(config: DecoderConfig | None = None, graph: ModelBuilder | None = None) -> onnx.ModelProto:
    """Return the model.

    `graph` collects it and draws the weights. Inputs: ids int64 [batch, tokens], write_indices int64 [batch] (the
    tokens already in each row's cache), and for each layer cache_k.N, cache_v.N float32 [batch, kv_heads, capacity,
    head_dim]. Outputs: logits float32 [batch, vocabulary] of the last token, and the updated caches present_k.N,
    present_v.N.
    """
    c = config or DecoderConfig()
    g = graph or ModelBuilder(c.seed)
    axis_0 = g.constant(np.array([1], np.int64), "one")
    zero = g.constant(np.array(0, np.int64), "zero")
    step = g.constant(np.array(1, np.int64), "step")

    tokens = g.node("Shape", "ids", name="tokens", start=1, end=2)
    count = g.node("Squeeze", tokens, name="count")
    nonpad = g.node("Add", "write_indices", tokens, name="valid_lengths")
    new_positions = g.node("Range", zero, count, step, name="new_positions")
    start = g.node("Unsqueeze", "write_indices", axis_0, name="start")
    positions = g.node("Add", start, new_positions, name="positions")
    cos, sin = (
        g.constant(t, n) for t, n in zip(compute_rotary_tables(c.positions, c.head_dim), ("cos_cache", "sin_cache"))
    )

    # The embedding is scaled like its transpose, so that activations start at unit size.
    table = g.weight(c.vocabulary, c.hidden, name="embedding", scale=1.0)
    x = g.node("Gather", table, "ids", name="embedded")
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"]),
        helper.make_tensor_value_info("write_indices", TensorProto.INT64, ["batch"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", c.vocabulary])]
    cache_shape: list[str | int | None] = ["batch", c.kv_heads, "capacity", c.head_dim]

    def heads(source: str, weight: str, number: int, name: str) -> str:
        """Add a projection to [batch, heads, tokens, head_dim] of [batch, tokens, hidden], and return its name."""
        shape = g.constant(np.array([0, 0, number, c.head_dim], np.int64), f"{name}.shape")
        rows = g.node("MatMul", source, weight, name=f"{name}.rows")
        split = g.node("Reshape", rows, shape, name=f"{name}.split")
        return g.node("Transpose", split, name=name, perm=[0, 2, 1, 3])

    for layer in range(c.layers):
        p = f"layer{layer}"
        ones = np.ones(c.hidden, np.float32)
        h = g.node("RMSNormalization", x, g.constant(ones, f"{p}.norm1.weight"), name=f"{p}.norm1", axis=-1)
        q = heads(h, g.weight(c.hidden, c.heads * c.head_dim, name=f"{p}.wq"), c.heads, f"{p}.q")
        k = heads(h, g.weight(c.hidden, c.kv_heads * c.head_dim, name=f"{p}.wk"), c.kv_heads, f"{p}.k")
        v = heads(h, g.weight(c.hidden, c.kv_heads * c.head_dim, name=f"{p}.wv"), c.kv_heads, f"{p}.v")
        q = g.node("RotaryEmbedding", q, cos, sin, positions, name=f"{p}.q_rotated")
        k = g.node("RotaryEmbedding", k, cos, sin, positions, name=f"{p}.k_rotated")
        for kind, update in (("k", k), ("v", v)):
            cache, present = f"cache_{kind}.{layer}", f"present_{kind}.{layer}"
            inputs.append(helper.make_tensor_value_info(cache, TensorProto.FLOAT, cache_shape))
            outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, cache_shape))
            g.node("TensorScatter", cache, update, "write_indices", name=present, axis=2)
        caches = (f"present_k.{layer}", f"present_v.{layer}")
        y = g.node("Attention", q, *caches, "", "", "", nonpad, name=f"{p}.attention", is_causal=1)
        y = g.node("Transpose", y, name=f"{p}.rows", perm=[0, 2, 1, 3])
        merged = g.constant(np.array([0, 0, c.heads * c.head_dim], np.int64), f"{p}.merged.shape")
        y = g.node("Reshape", y, merged, name=f"{p}.merged")
        y = g.node("MatMul", y, g.weight(c.heads * c.head_dim, c.hidden, name=f"{p}.wo"), name=f"{p}.projected")
        x = g.node("Add", x, y, name=f"{p}.residual1")
        h = g.node("RMSNormalization", x, g.constant(ones, f"{p}.norm2.weight"), name=f"{p}.norm2", axis=-1)
        gate = g.node("MatMul", h, g.weight(c.hidden, c.mlp, name=f"{p}.w1"), name=f"{p}.gate")
        up = g.node("MatMul", h, g.weight(c.hidden, c.mlp, name=f"{p}.w3"), name=f"{p}.up")
        gated = g.node("Mul", g.node("Swish", gate, name=f"{p}.swish"), up, name=f"{p}.gated")
        down = g.node("MatMul", gated, g.weight(c.mlp, c.hidden, name=f"{p}.w2"), name=f"{p}.down")
        x = g.node("Add", x, down, name=f"{p}.residual2")

    x = g.node("RMSNormalization", x, g.constant(np.ones(c.hidden, np.float32), "norm.weight"), name="norm", axis=-1)
    last = g.node("Gather", x, g.constant(np.array(-1, np.int64), "last"), name="last_token", axis=1)
    g.node("MatMul", last, g.weight(c.hidden, c.vocabulary, name="lm_head"), name="logits")
    graph_proto = helper.make_graph(g.nodes, "decoder", inputs, outputs, g.initializers)
    return helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def compute_rotary_tables(positions: int, head_dim: int, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float32 [positions, head_dim / 2], of position * base^(-2k / head_dim).

    Source: RoFormer, section 3.2.2.
    """
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(positions)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
