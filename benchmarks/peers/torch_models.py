"""Modules of the whole-model cases in PyTorch, with the weights of the ONNX models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch.nn import functional as F

from ..cases.transformers import BERT, BertCase, LlamaCase


def weights_of(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """Return weights by name; matrices of linear layers transposed to [outputs, inputs], as PyTorch stores them."""
    weights = {}
    for tensor in model.graph.initializer:
        array = torch.from_numpy(np.array(onnx.numpy_helper.to_array(tensor)))
        embedding = tensor.name in ("embedding", "token_table", "positions", "cos_cache", "sin_cache")
        weights[tensor.name] = array if array.ndim != 2 or embedding else array.T.contiguous()
    return weights


def bert(case: BertCase) -> Callable[[], Any]:
    w, ids = weights_of(case.model()), torch.from_numpy(case.feeds()["ids"])
    shape = (case.B, case.S, BERT.heads, BERT.hidden // BERT.heads)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (BERT.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def forward() -> torch.Tensor:
        x = norm(F.embedding(ids, w["token_table"]) + w["positions"][: case.S], "embedded.norm")
        for k in range(BERT.layers):
            p = f"layer{k}"
            q, key, v = (linear(x, f"{p}.{name}").view(shape).transpose(1, 2) for name in "qkv")
            y = F.scaled_dot_product_attention(q, key, v).transpose(1, 2).reshape(case.B, case.S, BERT.hidden)
            x = norm(linear(y, f"{p}.output") + x, f"{p}.norm1")
            y = linear(F.gelu(linear(x, f"{p}.up")), f"{p}.down")
            x = norm(y + x, f"{p}.norm2" if k < BERT.layers - 1 else "hidden")
        return x

    return forward


def llama(case: LlamaCase) -> Callable[[], Any]:
    """Writes its rows into slots and attends to a slice of those that are valid, so capacity costs nothing."""
    c, feeds = case.config, {name: torch.from_numpy(array) for name, array in case.feeds().items()}
    w, end = weights_of(case.model()), case.past + case.S
    cos, sin = (w[name][case.past : end] for name in ("cos_cache", "sin_cache"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (c.hidden,), w[f"{name}.weight"], 1e-5)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)

    def forward() -> torch.Tensor:
        x = F.embedding(feeds["ids"], w["embedding"])
        for k in range(c.layers):
            p = f"layer{k}"
            h = norm(x, f"{p}.norm1")
            q, key, v = (
                F.linear(h, w[f"{p}.w{name}"]).view(1, case.S, heads, c.head_dim).transpose(1, 2)
                for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
            )
            keys, values = feeds[f"cache_k.{k}"], feeds[f"cache_v.{k}"]
            keys[:, :, case.past : end] = rotated(key)
            values[:, :, case.past : end] = v
            y = F.scaled_dot_product_attention(
                rotated(q), keys[:, :, :end], values[:, :, :end], is_causal=case.S > 1, enable_gqa=True
            )
            x = x + F.linear(y.transpose(1, 2).reshape(1, case.S, -1), w[f"{p}.wo"])
            h = norm(x, f"{p}.norm2")
            x = x + F.linear(F.silu(F.linear(h, w[f"{p}.w1"])) * F.linear(h, w[f"{p}.w3"]), w[f"{p}.w2"])
        return F.linear(norm(x, "norm")[:, -1], w["lm_head"])

    return forward
