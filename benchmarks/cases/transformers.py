"""Whole models at published sizes with random weights: a BERT encoder, and a Llama-style decoder with slot caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from lowering.demo.decoder import DecoderConfig, ModelBuilder, build_decoder

from .case import Arrays, Bar, Case, Work

# Relative to the range of an output: float32 through many layers, and what weights of fewer bits may cost.
_TOLERANCE = {"": 1e-4, "f16": 1e-3, "int8": 0.05, "int4": 0.3}
_BITS = {"": 32, "f16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder; the defaults are BERT-base's."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 30522


BERT = BertConfig()

LLAMA = DecoderConfig(layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, mlp=2816, vocabulary=32000)
WIDE = DecoderConfig(layers=4, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, vocabulary=32000)


@dataclass(frozen=True, kw_only=True)
class BertCase(Case):
    """ids int64 [B, S] -> hidden float32 [B, S, 768] of BERT-base."""

    B: int = 1
    S: int

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[""]

    @property
    def source(self) -> str:
        return "bert"

    def feeds(self) -> Arrays:
        return {"ids": np.random.default_rng(0).integers(0, BERT.vocabulary, (self.B, self.S))}

    def model(self) -> onnx.ModelProto:
        return bert()

    def expected(self) -> Arrays:
        return evaluated(self.model(), self.feeds(), ("hidden",))

    def work(self) -> Work:
        """Matmuls of weights, and of scores and values."""
        c = BERT
        per_token = c.layers * (2 * (4 * c.hidden * c.hidden + 2 * c.hidden * c.inner) + 4 * self.S * c.hidden)
        return Work(float(self.B * self.S * per_token), "FLOP")


@dataclass(frozen=True, kw_only=True)
class LlamaCase(Case):
    """`lowering.demo.decoder`: S new tokens after `past` ones in caches with `capacity` slots.

    weights compresses ours, which then multiplies as accuracy_level permits, and those of llama.cpp and of
    onnxruntime's MatMulNBits; other peers run float32.
    """

    S: int
    past: int
    capacity: int
    weights: str = ""
    accuracy_level: int | None = None
    config: DecoderConfig = LLAMA

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.weights]

    @property
    def source(self) -> str:
        return f"llama {self.config.hidden}"

    @property
    def options(self) -> Mapping[str, Any]:
        options = {"weights": self.weights, "accuracy_level": self.accuracy_level}
        return {name: value for name, value in options.items() if value}

    @property
    def in_place(self) -> Mapping[str, str]:
        return {
            f"present_{kind}.{layer}": f"cache_{kind}.{layer}" for layer in range(self.config.layers) for kind in "kv"
        }

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        shape = (1, self.config.kv_heads, self.capacity, self.config.head_dim)
        caches = {name: np.zeros(shape, np.float32) for name in self.in_place.values()}
        for slots in caches.values():
            slots[:, :, : self.past] = rng.standard_normal(
                (1, self.config.kv_heads, self.past, self.config.head_dim), np.float32
            )
        ids = rng.integers(0, self.config.vocabulary, (1, self.S))
        return {"ids": ids, "write_indices": np.array([self.past]), **caches}

    def model(self) -> onnx.ModelProto:
        return llama(self.config)

    def expected(self) -> Arrays:
        """The logits, which depend on every row that was written."""
        return _llama_logits(self.S, self.past, self.config)

    def work(self) -> Work:
        c = self.config
        layer = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads) + 3 * c.hidden * c.mlp
        head = c.hidden * c.vocabulary
        if self.S == 1:
            keys = 4.0 * c.layers * 2 * (self.past + 1) * c.kv_heads * c.head_dim
            return Work((c.layers * layer + head) * _BITS[self.weights] / 8 + keys, "byte")
        pairs = self.S * self.past + self.S * (self.S + 1) / 2
        return Work(2.0 * (c.layers * (self.S * layer + 2 * pairs * c.heads * c.head_dim) + head), "FLOP")


@cache
def llama(config: DecoderConfig = LLAMA) -> onnx.ModelProto:
    """Inputs ids, write_indices, cache_k.N and cache_v.N; outputs logits, present_k.N and present_v.N."""
    return build_decoder(config)


@cache
def bert(config: BertConfig = BERT) -> onnx.ModelProto:
    """BERT (Devlin et al., 2018) as exporters write it at opset 23: projections to heads, Attention, Gelu."""
    c, g = config, ModelBuilder(seed=0)

    def linear(x: str, inputs: int, outputs: int, name: str) -> str:
        matmul = g.node("MatMul", x, g.weight(inputs, outputs, name=f"{name}.weight"), name=f"{name}.matmul")
        bias = g.rng.standard_normal(outputs, np.float32) * 0.1
        return g.node("Add", matmul, g.constant(bias, f"{name}.bias"), name=name)

    def norm(x: str, name: str) -> str:
        scale, bias = np.ones(c.hidden, np.float32), g.rng.standard_normal(c.hidden, np.float32) * 0.1
        names = g.constant(scale, f"{name}.weight"), g.constant(bias, f"{name}.bias")
        return g.node("LayerNormalization", x, *names, name=name, axis=-1, epsilon=1e-12)

    table = g.constant(g.rng.standard_normal((c.vocabulary, c.hidden), np.float32), "token_table")
    positions = g.constant(g.rng.standard_normal((512, c.hidden), np.float32), "positions")
    length = g.node("Shape", "ids", name="length", start=1, end=2)
    bounds = (g.constant(np.array([0]), "zero"), length)
    x = g.node("Add", g.node("Gather", table, "ids", name="word"), g.node("Slice", positions, *bounds, name="position"),
               name="embedded")  # fmt: skip
    x = norm(x, "embedded.norm")
    split = g.constant(np.array([0, 0, c.heads, c.hidden // c.heads]), "split")
    merged = g.constant(np.array([0, 0, c.hidden]), "merged")
    for k in range(c.layers):
        p = f"layer{k}"
        heads = []
        for name in "qkv":
            rows = g.node("Reshape", linear(x, c.hidden, c.hidden, f"{p}.{name}"), split, name=f"{p}.{name}.split")
            heads.append(g.node("Transpose", rows, name=f"{p}.{name}.heads", perm=[0, 2, 1, 3]))
        y = g.node("Transpose", g.node("Attention", *heads, name=f"{p}.attention"), name=f"{p}.rows", perm=[0, 2, 1, 3])
        y = linear(g.node("Reshape", y, merged, name=f"{p}.merged"), c.hidden, c.hidden, f"{p}.output")
        x = norm(g.node("Add", y, x, name=f"{p}.residual1"), f"{p}.norm1")
        y = g.node("Gelu", linear(x, c.hidden, c.inner, f"{p}.up"), name=f"{p}.gelu")
        y = g.node("Add", linear(y, c.inner, c.hidden, f"{p}.down"), x, name=f"{p}.residual2")
        x = norm(y, f"{p}.norm2" if k < c.layers - 1 else "hidden")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "S"])
    hidden = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", "S", c.hidden])
    graph = helper.make_graph(g.nodes, "bert", [ids], [hidden], g.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@cache
def _llama_logits(S: int, past: int, config: DecoderConfig) -> Arrays:
    """The same at every capacity, so it is computed without room to spare."""
    case = LlamaCase(name="", group="", S=S, past=past, capacity=S + past, config=config)
    return evaluated(llama(config), case.feeds(), ("logits",))


def evaluated(model: onnx.ModelProto, feeds: Arrays, outputs: tuple[str, ...]) -> Arrays:
    """onnx's reference evaluator on the model in float64: the outputs of those names."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for value in (*wide.graph.input, *wide.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for k, tensor in enumerate(wide.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT:
            wide.graph.initializer[k].CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
            )
    inputs = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in feeds.items()}
    return dict(zip(outputs, ReferenceEvaluator(wide).run(list(outputs), inputs)))


def cases() -> list[Case]:
    prefill = Bar(share=0.85, ratio=1.1, scaling=1.85)
    transformer_cases: list[Case] = [
        BertCase(name="BERT 128 tokens", group="transformers", bar=prefill, S=128),
        BertCase(name="BERT 384 tokens", group="transformers", bar=prefill, S=384),
        BertCase(name="BERT 8 x 128 tokens", group="transformers", B=8, S=128),
        LlamaCase(name="Llama prefill 512", group="transformers", bar=prefill, S=512, past=0, capacity=1024),
    ]
    decode = {
        1024: Bar(share=0.9, ratio=1.05),
        4096: Bar(share=0.9, ratio=1.05, compared_to=("Llama decode, 1024 slots", 0.95)),
    }
    transformer_cases += [
        LlamaCase(name=f"Llama decode, {n} slots", group="transformers", bar=bar, S=1, past=959, capacity=n)
        for n, bar in decode.items()
    ]
    transformer_cases += [
        LlamaCase(name=f"Llama decode, {kind} weights", group="weights", bar=bar, S=1, past=959,
                  capacity=1024, weights=kind)
        for kind, bar in (("f16", Bar()), ("int8", Bar(ratio=2.5)), ("int4", Bar(ratio=4.0)))
    ]  # fmt: skip
    # Weights of few bits, whose rows become int8, as in llama.cpp and in MatMulNBits of accuracy level 4.
    for kind in ("int8", "int4"):
        for name, new, past in (("prefill 128", 128, 0), ("prefill 512", 512, 0), ("decode after 128", 1, 128),
                                ("decode after 1024", 1, 1024), ("decode after 4096", 1, 4096)):  # fmt: skip
            transformer_cases.append(
                LlamaCase(name=f"wide Llama {name}, {kind}, level 4", group="low bits", S=new, past=past,
                          capacity=max(512, past + 64), weights=kind, accuracy_level=4, config=WIDE)
            )  # fmt: skip
    return transformer_cases
