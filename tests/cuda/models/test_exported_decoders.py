"""Decoders of ONNX Runtime's exporter on GPUs: caches and states in place, and served, as on the CPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

import lowering
from lowering.graph.caches import windowed_caches
from tests import cuda_emulation as emulated

FOLDER = Path(__file__).parents[2] / "exports" / "decoders"
CAPACITY = 48
IN_PLACE = (
    "llama@static", "llama", "llama@cpu", "gemma4_text", "deepseek_v3", "qwen3_5_text", "t5", "bamba", "gemma3n_text",
    "gpt2", "phi3", "mixtral", "gpt_oss",
)  # fmt: skip
SERVED = (
    "gemma4_text", "llama", "deepseek_v3", "llama@static", "bloom", "qwen3_5_text", "bamba", "mamba2", "minimax",
    "t5", "gpt_oss",
)  # fmt: skip


def in_place(name: str, precision: str | None) -> float:
    """The largest difference of logits from the CPU's in float32, of a prompt and 3 steps, relative to the largest."""
    export, rng = onnx.load(FOLDER / f"{name}.onnx"), np.random.default_rng(0)
    ids, mask = rng.integers(0, 40, (2, 8)), np.ones((2, 8), np.int64)
    mask[1, :2] = 0
    answers = []
    for target, computed in (("cuda:sm_90a", precision), ("cpu", None)):
        model = lowering.compile(export, target, static_cache=CAPACITY, precision=computed)
        states = np.random.default_rng(1).standard_normal((1, 7, 16)).astype(np.float32)
        source = {"encoder_hidden_states": states, "source_lengths": np.array([5])}
        decoder = model.decoder(fixed={} if model.setup is None else source)
        prompt = decoder.prefill(ids[:, :5], mask[:, :5])[mask[:, :5].astype(bool)]
        steps = [decoder.step(ids[:, 5])]
        decoder.reorder([1, 0])
        answers.append(np.concatenate([prompt, *steps, *(decoder.step(ids[:, k]) for k in range(6, 8))]))
    return float(np.abs(answers[0] - answers[1]).max() / np.abs(answers[1]).max())


def in_rings(name: str, precision: str | None) -> float:
    """As `in_place`, with windows in rings so short that they wrap."""
    with mock.patch.multiple(windowed_caches, _ROWS=2, _MULTIPLE=1):
        return in_place(name, precision)


def served(name: str) -> float:
    path, worst = FOLDER / f"{name}.onnx", 0.0
    models = [lowering.compile(path, target, serve=lowering.Serve(32, 8)) for target in ("cuda:sm_90a", "cpu")]
    batchers = [lowering.Batcher(model, None if name == "mamba2" else 8, 9) for model in models]
    states = np.random.default_rng(1).standard_normal((1, 11, 16)).astype(np.float32)
    for request, prompt, rows in (("a", range(13), 11), ("b", range(3, 8), 5)):
        for batcher, model in zip(batchers, models):
            there = states if model.gpu is None or request == "a" else model.gpu.copy(states)  # where the GPU has it
            source = {} if model.setup is None else {"encoder_hidden_states": there, "source_lengths": rows}
            batcher.add(request, prompt, fixed=source)
    for token in range(3):
        gpu, cpu = (batcher.step() for batcher in batchers)
        assert gpu.keys() == cpu.keys()
        for request, logits in cpu.items():
            worst = max(worst, float(np.abs(gpu[request] - logits).max() / np.abs(logits).max()))
            for batcher in batchers:
                batcher.extend(request, token)
    return worst


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", IN_PLACE)
def test_caches_in_place(name: str) -> None:
    assert emulated.run(in_place, name, None, arch="sm_90a", timeout=500) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "precision"), (("gpt_oss", "float16"), ("gemma3_text", None)))
def test_caches_in_rings(name: str, precision: str | None) -> None:
    bar = 1e-5 if precision is None else 1e-2
    assert emulated.run(in_rings, name, precision, arch="sm_90a", timeout=500) < bar


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ("qwen3", "gemma3_text", "gpt_oss"))
def test_half_precision(name: str) -> None:
    assert emulated.run(in_place, name, "float16", arch="sm_90a", timeout=500) < 1e-2


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    assert emulated.run(served, name, arch="sm_90a", timeout=500) < 1e-5
