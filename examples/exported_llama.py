"""A Llama with random weights as an ONNX file: what several examples work on. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)


class Decoder(torch.nn.Module):
    """input_ids [B, S], attention_mask [B, P + S], past [B, Hkv, P, D] each -> logits, present [B, Hkv, P + S, D]"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = LlamaForCausalLM(CONFIG)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]) -> tuple:
        cache = DynamicCache(list(zip(past[::2], past[1::2])))
        out = self.inner(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return out.logits, *(x for layer in out.past_key_values.layers for x in (layer.keys, layer.values))


def export(path: Path) -> None:
    """By torch.onnx, with past keys and values as inputs; its weights beside it."""
    heads, size = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
    past = [torch.zeros(2, heads, 6, size) for _ in range(2 * CONFIG.num_hidden_layers)]
    torch.onnx.export(
        Decoder().eval(),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64), past),
        path,
        dynamic_shapes=(
            {0: "batch", 1: "tokens"},
            {0: "batch", 1: "total"},
            [{0: "batch", 2: "past"} for _ in past],
        ),
        output_names=["logits", *(f"present_{k}" for k in range(len(past)))],
        opset_version=18,
        dynamo=True,
        verbose=False,
    )


def onnxruntime_of(path: Path) -> tuple[onnxruntime.InferenceSession, list[str], list[np.ndarray]]:
    """A session of one thread, the names of its inputs, and the past [1, Hkv, 0, D] of a sequence that begins."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    heads, size = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
    return session, names, [np.zeros((1, heads, 0, size), np.float32) for _ in names[2:]]
