"""Decoders of a real export, by torch.onnx of a Llama of transformers: with static caches, and served.

What they should give is what PyTorch gives in float32 for the same tokens.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lowering

from ..host.packed import PERIOD, pack, repeat
from ..plan import Program
from .folders import make_empty

NEEDED = ("torch", "transformers", "onnxscript")
"""Packages that export the model."""

CAPACITY = 512
TOKENS, PROMPT, REQUESTS = 40, 24, 5
BLOCKS = 128
TOLERANCE = {"float32": 1e-3, "float16": 2e-2}

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "static cache, float16": {"static_cache": CAPACITY, "precision": "float16"},
    "static cache, float32": {"static_cache": CAPACITY},
    "Batcher, float32": {"serve": lowering.Serve(context=CAPACITY)},
}
"""Options of `lowering.compile`, by program."""


def write(
    folder: Path, target: str, *, sizes: dict[str, int] | None = None, names: Sequence[str] = tuple(OPTIONS)
) -> list[Program]:
    """Programs of these names in folders below `folder` / "decoders"; none where a package of NEEDED is missing."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return []
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "decoder.onnx"
        recorded = _export(path, sizes or SIZES)
        return [_write(folder, target, path, name, OPTIONS[name], recorded) for name in names]


def _write(
    folder: Path, target: str, path: Path, name: str, options: dict[str, Any], recorded: dict[str, np.ndarray]
) -> Program:
    target_folder = make_empty(folder / "decoders" / name.replace(", ", "-").replace(" ", "-"))
    lowering.compile(path, target=target, **options).save(target_folder / "artifact")
    pack(target_folder / "artifact")
    np.savez_compressed(target_folder / "tokens.npz", allow_pickle=False, **recorded)
    details = {"prompt": PROMPT, "tolerance": TOLERANCE[options.get("precision", "float32")]}
    kind = "batcher" if "serve" in options else "decoder"
    details |= {"blocks": BLOCKS, "context": CAPACITY} if kind == "batcher" else {}
    return Program(name, kind, str(target_folder.relative_to(folder)), details)


def _export(path: Path, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Writes the model; its tokens [REQUESTS, TOKENS], and their logits."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    class Decoder(torch.nn.Module):
        """input_ids [B, S], attention_mask [B, P + S], past [B, Hkv, P, D] each -> logits, present."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = LlamaForCausalLM(LlamaConfig(**sizes))
            numbers = np.random.default_rng(0).standard_normal(PERIOD).astype(np.float32)
            for number, parameter in enumerate(self.inner.parameters()):
                if parameter.dim() > 1:
                    values = repeat(numbers * parameter.shape[-1] ** -0.5, tuple(parameter.shape), number)
                    parameter.data.copy_(torch.from_numpy(values))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]) -> tuple:
            cache = DynamicCache(list(zip(past[::2], past[1::2])))
            out = self.inner(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            return out.logits, *(x for layer in out.past_key_values.layers for x in (layer.keys, layer.values))

    decoder, layers = Decoder().eval(), sizes["num_hidden_layers"]
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    past = [torch.zeros(2, sizes["num_key_value_heads"], 6, size) for _ in range(2 * layers)]
    torch.onnx.export(
        decoder,
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64), past),
        path,
        dynamic_shapes=(
            {0: "batch", 1: "tokens"},
            {0: "batch", 1: "total"},
            [{0: "batch", 2: "past"} for _ in past],
        ),
        output_names=["logits", *(f"present_{k}" for k in range(2 * layers))],
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    tokens = np.random.default_rng(1).integers(0, sizes["vocab_size"], (REQUESTS, TOKENS))
    with torch.inference_mode():
        logits = decoder.inner(torch.from_numpy(tokens)).logits.numpy()
    return {"tokens": tokens, "logits": logits.astype(np.float32)}
