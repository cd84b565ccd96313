"""PyTorch modules around the models of models.py: tensors in, a flat tuple of tensors out, caches as plain tensors.

Symbols: B batch, S new tokens, P past tokens, T = P + S, E length of the encoder's states, L layers.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from tests.exports.forms import Setting
from tests.exports.models import Model
from tests.exports.sizes import Size


def build(model: Model, past: bool, size: Size, half: bool) -> nn.Module:
    """Build the module with deterministic weights, rounded to float16 where half is set."""
    torch.manual_seed(0)
    config = model.build_config(size)
    inner = getattr(transformers, model.architecture)(config)
    _randomize(inner, model.gain)
    wrapper = {
        ("encoder", False): Encoder,
        ("decoder", False): Decoder,
        ("decoder", True): DecoderWithPast,
        ("seq2seq", False): Seq2Seq,
        ("seq2seq", True): Seq2SeqWithPast,
        ("speech", False): Speech,
        ("speech", True): Seq2SeqWithPast,
        ("vision", False): Vision,
        ("clip", False): Clip,
    }[model.kind, past](inner)
    return wrapper.eval().half() if half else wrapper.eval()


def _randomize(module: nn.Module, gain: float) -> None:
    """Draw matrices that multiply the variance by gain^2, embeddings of unit variance, and visible biases and norms."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    transposed = {id(m.weight) for m in module.modules() if isinstance(m, transformers.pytorch_utils.Conv1D)}
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.ndim >= 2:
                inputs = parameter.shape[0] if id(parameter) in transposed else parameter[0].numel()
                parameter.copy_(noise * gain / inputs**0.5)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * noise)


class Wrapper(nn.Module, abc.ABC):
    """A module with a description of its interface.

    `inputs` draws the arguments of forward by name, `dims` names their symbolic axes, `results` names the outputs.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    @abc.abstractmethod
    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]: ...

    @abc.abstractmethod
    def dims(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def results(self) -> list[str]: ...

    def ids(self, rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
        return rng.integers(3, self.config.get_text_config(decoder=True).vocab_size, (batch, tokens))

    def caches(self, rng: np.random.Generator, batch: int, past: int) -> list[np.ndarray]:
        """Draw keys and values of every layer, [B, Hkv, P, D]: k0, v0, k1, v1, ..."""
        shape = _cache_shape(self.config, batch, past)
        return [rng.standard_normal(shape, np.float32) for _ in range(2 * _layers(self.config))]


def right_padded(rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
    """Return 1 for the tokens of each row, 0 after them; the first row is full.

    Padding is so short that each row sees a token within every window: PyTorch and exporters differ for rows that see
    nothing.
    """
    lengths = rng.integers(max(1, tokens - 3), tokens + 1, batch)
    lengths[0] = tokens
    return (np.arange(tokens) < lengths[:, None]).astype(np.int64)


def left_padded(rng: np.random.Generator, batch: int, past: int, tokens: int) -> np.ndarray:
    """Return 0 before the past of each row; the first row has none."""
    empty = rng.integers(0, past, batch)
    empty[0] = 0
    return (np.arange(past + tokens) >= empty[:, None]).astype(np.int64)


def _layers(config: Any) -> int:
    return getattr(config, "decoder_layers", None) or config.num_hidden_layers


def _cache_shape(config: Any, batch: int, past: int) -> tuple[int, int, int, int]:
    heads = config.num_attention_heads
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    return batch, kv_heads, past, head


def _pairs(flat: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(flat[::2], flat[1::2]))


def _flat(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _names(stem: str, count: int) -> list[str]:
    return [f"{stem}.{k // 2}.{'key' if k % 2 == 0 else 'value'}" for k in range(count)]


TOKENS = {0: "batch", 1: "tokens"}


class Encoder(Wrapper):
    """input_ids [B, S], attention_mask [B, S] -> last_hidden_state [B, S, hidden]"""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state,)

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        return {"input_ids": self.ids(rng, s.batch, s.tokens), "attention_mask": right_padded(rng, s.batch, s.tokens)}

    def dims(self) -> dict[str, Any]:
        return {"input_ids": TOKENS, "attention_mask": TOKENS}

    def results(self) -> list[str]:
        return ["last_hidden_state"]


class Decoder(Encoder):
    """input_ids [B, S], attention_mask [B, S] -> logits [B, S, vocab]"""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits,)

    def results(self) -> list[str]:
        return ["logits"]


class DecoderWithPast(Wrapper):
    """input_ids [B, S], attention_mask [B, T], past [B, Hkv, P, D] each -> logits [B, S, vocab], present
    [B, Hkv, T, D]"""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache(_pairs(past))
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return (outputs.logits, *_flat(outputs.past_key_values))

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "input_ids": self.ids(rng, s.batch, s.tokens),
            "attention_mask": left_padded(rng, s.batch, s.past, s.tokens),
            "past": self.caches(rng, s.batch, s.past),
        }

    def dims(self) -> dict[str, Any]:
        return {
            "input_ids": TOKENS,
            "attention_mask": {0: "batch", 1: "total"},
            "past": [{0: "batch", 2: "past"}] * (2 * _layers(self.config)),
        }

    def results(self) -> list[str]:
        return ["logits", *_names("present", 2 * _layers(self.config))]


class Seq2Seq(Wrapper):
    """input_ids [B, E], attention_mask [B, E], decoder_input_ids [B, S] -> logits [B, S, vocab]"""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = self.inner(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
        )
        return (outputs.logits,)

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "input_ids": self.ids(rng, s.batch, s.source),
            "attention_mask": right_padded(rng, s.batch, s.source),
            "decoder_input_ids": self.ids(rng, s.batch, s.tokens),
        }

    def dims(self) -> dict[str, Any]:
        source = {0: "batch", 1: "source"}
        return {"input_ids": source, "attention_mask": source, "decoder_input_ids": TOKENS}

    def results(self) -> list[str]:
        return ["logits"]


class Seq2SeqWithPast(Wrapper):
    """A decoder after its encoder: decoder_input_ids [B, S], attention_mask [B, E] of the encoder's states, past
    [B, H, P, D] and cross [B, H, E, D] each -> logits [B, S, vocab], present [B, H, T, D]

    The encoder's states themselves are an input that nothing reads: their keys and values are in `cross`.
    """

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        states: torch.Tensor,
        past: list[torch.Tensor],
        cross: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(_pairs(past)), DynamicCache(_pairs(cross)))
        masked = {} if self.config.model_type == "whisper" else {"attention_mask": attention_mask}
        outputs = self.inner(
            encoder_outputs=(states,),
            decoder_input_ids=decoder_input_ids,
            past_key_values=cache,
            use_cache=True,
            **masked,
        )
        return (outputs.logits, *_flat(outputs.past_key_values.self_attention_cache))

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "decoder_input_ids": self.ids(rng, s.batch, s.tokens),
            "attention_mask": right_padded(rng, s.batch, s.source),
            "states": rng.standard_normal((s.batch, s.source, self.config.d_model), np.float32),
            "past": self.caches(rng, s.batch, s.past),
            "cross": self.caches(rng, s.batch, s.source),
        }

    def dims(self) -> dict[str, Any]:
        count = 2 * _layers(self.config)
        return {
            "decoder_input_ids": TOKENS,
            "attention_mask": {0: "batch", 1: "source"},
            "states": {0: "batch", 1: "source"},
            "past": [{0: "batch", 2: "past"}] * count,
            "cross": [{0: "batch", 2: "source"}] * count,
        }

    def results(self) -> list[str]:
        return ["logits", *_names("present", 2 * _layers(self.config))]


class Speech(Wrapper):
    """input_features [B, mel, frames], decoder_input_ids [B, S] -> logits [B, S, vocab]"""

    def forward(self, input_features: torch.Tensor, decoder_input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.inner(input_features=input_features, decoder_input_ids=decoder_input_ids, use_cache=False)
        return (outputs.logits,)

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        frames = 2 * self.config.max_source_positions
        return {
            "input_features": rng.standard_normal((s.batch, self.config.num_mel_bins, frames), np.float32),
            "decoder_input_ids": self.ids(rng, s.batch, s.tokens),
        }

    def dims(self) -> dict[str, Any]:
        return {"input_features": {0: "batch"}, "decoder_input_ids": TOKENS}

    def results(self) -> list[str]:
        return ["logits"]


class Vision(Wrapper):
    """pixel_values [B, 3, H, W] -> last_hidden_state [B, patches + 1, hidden]"""

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(pixel_values=pixel_values).last_hidden_state,)

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        size = self.config.image_size
        return {"pixel_values": rng.standard_normal((s.batch, 3, size, size), np.float32)}

    def dims(self) -> dict[str, Any]:
        return {"pixel_values": {0: "batch"}}

    def results(self) -> list[str]:
        return ["last_hidden_state"]


class Clip(Wrapper):
    """input_ids [B, S], pixel_values [images, 3, H, W], attention_mask [B, S] -> logits_per_text [B, images]"""

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = self.inner(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)
        return (outputs.logits_per_text,)

    def inputs(self, s: Setting, rng: np.random.Generator) -> dict[str, Any]:
        size = self.config.vision_config.image_size
        return {
            "input_ids": self.ids(rng, s.batch, s.tokens),
            "pixel_values": rng.standard_normal((s.past, 3, size, size), np.float32),
            "attention_mask": right_padded(rng, s.batch, s.tokens),
        }

    def dims(self) -> dict[str, Any]:
        return {"input_ids": TOKENS, "pixel_values": {0: "images"}, "attention_mask": TOKENS}

    def results(self) -> list[str]:
        return ["logits_per_text"]
