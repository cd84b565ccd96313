"""An encoder-decoder: the encoder runs once, its keys and values are fixed, the decoder's own caches grow in place.

A Whisper with random weights (nothing is downloaded) is exported in two halves: the encoder with the cross-attention's
keys and values of every decoder layer as outputs, and the decoder with those and its past as inputs. The decoder is
compiled with `static_cache`; ONNX Runtime runs the same files beside it.

Needs the `examples` extra:

    pip install torch==2.13.0 'onnx-lowering[examples]'
    python examples/07_speech_decoder.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

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
CROSS = [f"cross_{k}" for k in range(2 * LAYERS)]


class Encoder(torch.nn.Module):
    """features [B, mels, frames] -> cross keys and values [B, H, E, D] of every decoder layer"""

    def __init__(self, inner: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: torch.Tensor) -> tuple:
        states = self.inner.model.encoder(features).last_hidden_state
        projections = [
            projection
            for layer in self.inner.model.decoder.layers
            for projection in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)
        ]
        return tuple(p(states).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for p in projections)


class Decoder(torch.nn.Module):
    """input_ids [B, S], past [B, H, P, D] each, cross [B, H, E, D] each -> logits, present [B, H, P + S, D] each"""

    def __init__(self, inner: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, past: list[torch.Tensor], cross: list[torch.Tensor]) -> tuple:
        own, other = (DynamicCache(list(zip(x[::2], x[1::2]))) for x in (past, cross))
        states = torch.zeros(input_ids.shape[0], cross[0].shape[2], CONFIG.d_model)  # all that counts is in `cross`
        out = self.inner(
            encoder_outputs=(states,), decoder_input_ids=input_ids, past_key_values=EncoderDecoderCache(own, other)
        )
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
        output_names=CROSS,
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    past, cross = ([torch.zeros(2, HEADS, n, SIZE) for _ in CROSS] for n in (6, CONFIG.max_source_positions))
    torch.onnx.export(
        Decoder(inner),
        (torch.ones(2, 3, dtype=torch.int64), past, cross),
        decoder,
        dynamic_shapes=(
            {0: "batch", 1: "tokens"},
            [{0: "batch", 2: "past"} for _ in past],
            [{0: "batch", 2: "source"} for _ in cross],
        ),
        output_names=["logits", *(f"present_{k}" for k in range(len(past)))],
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    return encoder, decoder


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1, CONFIG.num_mel_bins, 2 * CONFIG.max_source_positions), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        encoder, decoder = export(Path(folder))
        made = lowering.compile(encoder, threads=1).run({"features": features})
        model = lowering.compile(decoder, static_cache=CAPACITY, threads=1)
        # The decoder's cross inputs come in the order of the encoder's outputs.
        own = {"input_ids", *model.manifest.donated, model.manifest.slots.length}
        names = [t.name for t in model.inputs if t.name not in own]
        ours = model.decoder(fixed=dict(zip(names, made.values())))

        theirs = session(decoder)
        cross = session(encoder).run(None, {"features": features})
        past = [np.zeros((1, HEADS, 0, SIZE), np.float32) for _ in cross]
        given = [i.name for i in theirs.get_inputs()]

        seconds, worst, token = {"onnx-lowering": 0.0, "onnxruntime": 0.0}, 0.0, CONFIG.decoder_start_token_id
        for _ in range(TOKENS):
            start = time.perf_counter()
            mine = ours.step(token)[0]
            middle = time.perf_counter()
            logits, *past = theirs.run(None, dict(zip(given, [np.array([[token]]), *past, *cross])))
            end = time.perf_counter()
            seconds["onnx-lowering"] += middle - start
            seconds["onnxruntime"] += end - middle
            worst = max(worst, float(np.abs(mine - logits[0, -1]).max()))
            token = int(mine.argmax())
            print(token, end=" ", flush=True)
        print()
        for name, time_taken in seconds.items():
            print(f"{name:14} {TOKENS / time_taken:8.0f} tokens/s")
        print(f"largest difference of a logit: {worst:.1e}")
        assert worst < 1e-4


if __name__ == "__main__":
    main()
