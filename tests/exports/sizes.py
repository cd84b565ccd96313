"""How wide the exported models are: records that need neither PyTorch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Kinds of inputs and outputs: see tests/exports/wrappers.py.
Kind = Literal["encoder", "decoder", "seq2seq", "speech", "vision", "clip"]

Width = Literal["whole", "narrow", "tiny"]
"""narrow: few heads, as wide as published ones, for emulated GPUs; tiny: a model of a few thousand numbers."""


@dataclass(frozen=True)
class Size:
    """The widths of a transformer; head is the width of one head where it is not hidden / heads.

    window is that of local attention; image and patch are sides in pixels, mels and frames the sizes of speech.
    vision gives the widths of a second stack, where they differ, and projection the width of their common space.
    """

    hidden: int
    heads: int
    inner: int
    kv_heads: int = 0
    head: int = 0
    layers: int = 2
    vocab: int = 512
    positions: int = 40
    window: int = 8
    image: int = 48
    patch: int = 16
    mels: int = 16
    frames: int = 96
    vision: Size | None = None
    projection: int = 32

    def of_width(self, width: Width) -> Size:
        return {"whole": lambda: self, "narrow": self.narrow, "tiny": self.tiny}[width]()

    def narrow(self) -> Size:
        """Return a size with one group of query heads, or two heads where keys are not shared, each as wide as before.

        There are more than 64 positions of every kind: with fewer, attention is that of decoding.
        """
        group = self.heads // self.kv_heads if self.kv_heads else 1
        heads = max(2, group)
        hidden = heads * (self.hidden // self.heads)
        kv_heads = self.kv_heads and heads // group
        fewer = replace(self, hidden=hidden, heads=heads, inner=2 * hidden, kv_heads=kv_heads, vocab=128)
        return replace(fewer, positions=96, image=9 * self.patch, frames=160)

    def tiny(self) -> Size:
        """Return the same proportions between heads in a model of a few thousand numbers."""
        kv_heads = self.kv_heads and max(1, 2 * self.kv_heads // self.heads)
        return replace(self, hidden=8, heads=2, inner=16, kv_heads=kv_heads, head=self.head and 4, vocab=32)


@dataclass(frozen=True)
class Published:
    """The widths of a checkpoint that people use; two layers, and a smaller vocabulary, so that files stay small."""

    checkpoint: str
    kind: Kind
    size: Size

    @property
    def past(self) -> bool:
        """Return whether the model has a form with past keys and values."""
        return has_past(self.kind)


def has_past(kind: Kind) -> bool:
    return kind in ("decoder", "seq2seq", "speech")


def _wide(hidden: int, heads: int, inner: int, kv_heads: int = 0, head: int = 0, **options: int | Size) -> Size:
    shared: dict = {"vocab": 8192, "positions": 1024, "window": 4096, "image": 224, "mels": 80, "frames": 3000}
    return Size(hidden, heads, inner, kv_heads, head, **(shared | options))


_BASE = _wide(768, 12, 3072)

# By model of tests/exports/models.py. Where nothing of the architecture is published between 768 and 2048 wide, a
# fraction of what is: all widths are divided, the width of a head and how many heads share keys stay.
PUBLISHED: dict[str, Published] = {
    "bert": Published("bert-base-uncased", "encoder", _BASE),
    "roberta": Published("roberta-base", "encoder", _BASE),
    "distilbert": Published("distilbert-base-uncased", "encoder", _BASE),
    "modernbert": Published("ModernBERT-base", "encoder", _wide(768, 12, 1152, window=128)),
    "gpt2": Published("gpt2", "decoder", _BASE),
    "opt": Published("opt-125m", "decoder", _BASE),
    "gpt-neox": Published("pythia-410m", "decoder", _wide(1024, 16, 4096)),
    "llama": Published("TinyLlama-1.1B", "decoder", _wide(2048, 32, 5632, 4)),
    "qwen2": Published("Qwen2.5-0.5B", "decoder", _wide(896, 14, 4864, 2)),
    "qwen3": Published("Qwen3-0.6B", "decoder", _wide(1024, 16, 3072, 8, 128)),
    "mistral": Published("a quarter of Mistral-7B", "decoder", _wide(1024, 8, 3584, 2)),
    "gemma2": Published("half of gemma-2-2b", "decoder", _wide(1152, 4, 4608, 2, 256)),
    "gemma3": Published("gemma-3-1b", "decoder", _wide(1152, 4, 6912, 1, 256, window=512)),
    "phi": Published("phi-1_5", "decoder", _wide(2048, 32, 8192, 32)),
    "phi3": Published("half of Phi-3-mini", "decoder", _wide(1536, 16, 4096, 16)),
    "falcon": Published("16 of the 71 heads of falcon-7b", "decoder", _wide(1024, 16, 4096)),
    "bloom": Published("bloom-560m", "decoder", _wide(1024, 16, 4096)),
    "t5": Published("t5-base", "seq2seq", _BASE),
    "flan-t5": Published("flan-t5-base", "seq2seq", _wide(768, 12, 2048)),
    "bart": Published("bart-base", "seq2seq", _BASE),
    "whisper": Published("whisper-small", "speech", _wide(768, 12, 3072, positions=448)),
    "vit": Published("vit-base-patch16-224", "vision", _BASE),
    "siglip": Published("siglip-base-patch16-224", "vision", _BASE),
    "clip": Published(
        "clip-vit-large-patch14", "clip",
        _wide(768, 12, 3072, projection=768, vision=_wide(1024, 16, 4096, patch=14)),
    ),
}  # fmt: skip
