"""An encoder-decoder: the encoder runs once, and so does what the decoder makes of its output; search, and serving.

A Whisper with random weights (nothing is downloaded) is exported in two halves: the encoder, and the decoder with its
past as inputs, which multiplies the encoder's output by the weights of all cross-attention at each step. Compiled with
`static_cache`, it does so once for each recording. Beams share a recording, and go on from each other by `reorder`.
Compiled with `serve`, it reads many recordings at once, of different lengths, one of which comes before each step. ONNX
Runtime runs the same files beside it.

Needs the `examples` extra:

    pip install '.[examples]'
    python examples/07_speech_decoder.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
import torch
from transformers import DynamicCache, EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration

import lowering

CONFIG = WhisperConfig(
    vocab_size=2048,
    d_model=256,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    max_source_positions=200,
    num_mel_bins=80,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
LAYERS, HEADS = CONFIG.decoder_layers, CONFIG.decoder_attention_heads
SIZE = CONFIG.d_model // HEADS
TOKENS, CAPACITY = 48, 64


class Encoder(torch.nn.Module):
    """features [B, mels, frames] -> states [B, E, hidden]"""

    def __init__(self, inner: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner.model.encoder(features).last_hidden_state


class Decoder(torch.nn.Module):
    """input_ids [B, S], states [B, E, hidden], past [B, H, P, D] each -> logits, present [B, H, P + S, D] each"""

    def __init__(self, inner: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, states: torch.Tensor, past: list[torch.Tensor]) -> tuple:
        caches = EncoderDecoderCache(DynamicCache(list(zip(past[::2], past[1::2]))), DynamicCache())
        out = self.inner(encoder_outputs=(states,), decoder_input_ids=input_ids, past_key_values=caches)
        grown = out.past_key_values.self_attention_cache
        return out.logits, *(x for layer in grown.layers for x in (layer.keys, layer.values))


def export(folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    inner = WhisperForConditionalGeneration(CONFIG).eval()
    encoder, decoder = folder / "encoder.onnx", folder / "decoder.onnx"
    features = torch.randn(2, CONFIG.num_mel_bins, 2 * CONFIG.max_source_positions)
    torch.onnx.export(
        Encoder(inner),
        (features,),
        encoder,
        dynamic_shapes=({0: "batch"},),
        output_names=["states"],
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    past = [torch.zeros(2, HEADS, 6, SIZE) for _ in range(2 * LAYERS)]
    torch.onnx.export(
        Decoder(inner),
        (torch.ones(2, 3, dtype=torch.int64), torch.randn(2, 9, CONFIG.d_model), past),
        decoder,
        dynamic_shapes=(
            {0: "batch", 1: "tokens"},
            {0: "batch", 1: "source"},
            [{0: "batch", 2: "past"} for _ in past],
        ),
        output_names=["logits", *(f"present_{k}" for k in range(len(past)))],
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    return encoder, decoder


class Steps(Protocol):
    """What a search needs of a decoder."""

    def step(self, ids: np.ndarray) -> np.ndarray: ...

    def reorder(self, rows: np.ndarray) -> None: ...


class GrowingDecoder:
    """The decoder by ONNX Runtime: caches are arrays that grow, and beams have copies of the encoder's output."""

    def __init__(self, path: Path, states: np.ndarray, batch: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.names = [i.name for i in self.session.get_inputs()]
        self.states = states.repeat(batch, axis=0)
        self.past = [np.zeros((batch, HEADS, 0, SIZE), np.float32) for _ in range(2 * LAYERS)]

    def step(self, ids: np.ndarray) -> np.ndarray:
        """The logits [batch, vocabulary] behind one more token of each sequence."""
        inputs = dict(zip(self.names, [ids[:, None], self.states, *self.past]))
        logits, *self.past = self.session.run(None, inputs)
        return logits[:, -1]

    def reorder(self, rows: np.ndarray) -> None:
        """Each sequence b goes on from sequence rows[b]."""
        self.past = [past[rows] for past in self.past]


def search(decoder: Steps, beams: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest sequences that a beam search finds, best first [beams, TOKENS], and their log-probabilities.

    With one beam it is greedy. Random weights know no end, so that all sequences have the same length.
    """
    scores = np.where(np.arange(beams) == 0, 0.0, -np.inf)  # all beams begin alike: one is enough
    tokens = np.full(beams, CONFIG.decoder_start_token_id)
    sequences = np.zeros((beams, 0), np.int64)
    for _ in range(TOKENS):
        logits = decoder.step(tokens).astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        totals = scores[:, None] + shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        best = np.argsort(-totals, axis=None)[:beams]
        rows, tokens = np.divmod(best, totals.shape[1])
        scores = totals.ravel()[best]
        sequences = np.concatenate([sequences[rows], tokens[:, None]], axis=1)
        decoder.reorder(rows)
    return sequences, scores


def serve(model: lowering.Model, recordings: list[np.ndarray]) -> list[list[int]]:
    """The likeliest tokens of each recording [1, E, hidden], one of which comes before each step."""
    batcher = lowering.Batcher(model, blocks=len(recordings) * CAPACITY // 16, source_blocks=64)
    waiting, texts = list(enumerate(recordings)), [[] for _ in recordings]
    while waiting or batcher.waiting:
        if waiting:
            request, states = waiting.pop(0)
            batcher.add(request, [CONFIG.decoder_start_token_id], fixed={"states": states})
        for request, logits in batcher.step().items():
            texts[request].append(int(logits.argmax()))
            if len(texts[request]) < TOKENS:
                batcher.extend(request, texts[request][-1])
            else:
                batcher.free(request)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1, CONFIG.num_mel_bins, 2 * CONFIG.max_source_positions), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        encoder, decoder = export(Path(folder))
        states = lowering.compile(encoder, threads=1).run({"features": features})["states"]
        model = lowering.compile(decoder, static_cache=CAPACITY, threads=1)
        for beams in (1, 4):
            runs = {"onnx-lowering": model.decoder(fixed={"states": states})}
            runs["onnxruntime"] = GrowingDecoder(decoder, states, beams)
            results = []
            for name, run in runs.items():
                start = time.perf_counter()
                results.append(search(run, beams))
                seconds = time.perf_counter() - start
                rate, (_, scores) = TOKENS / seconds, results[-1]
                print(f"{name:14} {beams} beams {rate:6.0f} tokens/s, log-probability {scores[0]:.4f}")
            (ours, our_scores), (theirs, their_scores) = results
            assert (ours == theirs).all()
            assert np.abs(our_scores - their_scores).max() < 1e-3
            print(*ours[0])
        recordings = [states[:, :rows] for rows in (200, 60, 131, 17)]
        served = lowering.compile(decoder, serve=lowering.Serve(CAPACITY), threads=1)
        start = time.perf_counter()
        texts = serve(served, recordings)
        rate = len(texts) * TOKENS / (time.perf_counter() - start)
        alone = [search(GrowingDecoder(decoder, states, 1), 1)[0][0].tolist() for states in recordings]
        print(f"served: {len(texts)} recordings, {rate:.0f} tokens/s")
        assert texts == alone


if __name__ == "__main__":
    main()
