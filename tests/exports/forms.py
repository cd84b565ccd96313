"""The exports by name, and the sizes at which each is run: records that need no PyTorch.

Symbols: B batch, S new tokens, P past tokens, E length of the encoder's states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.exports.sizes import PUBLISHED, Kind, Width

Form = Literal["symbolic", "batch1", "fixed"]
"""Every size symbolic; the batch fixed at 1 and the others symbolic; every size fixed."""

FORMS: tuple[Form, ...] = ("symbolic", "batch1", "fixed")

TRACED_OPSET = 17  # the tracing exporter's newest

DYNAMO_OPSETS = (18, 23)  # decomposed; with Attention, RotaryEmbedding and RMSNormalization


@dataclass(frozen=True)
class Setting:
    """The sizes of one call. For clip, `past` is the number of images."""

    batch: int
    tokens: int
    past: int
    source: int


# The first is what the exporter sees. The second has batch 1 and one new token, as decoding has; the last exceeds
# every window.
SETTINGS = (Setting(2, 5, 6, 7), Setting(1, 1, 4, 9), Setting(3, 21, 11, 12))
_SETTINGS: dict[Width, tuple[Setting, ...]] = {
    "whole": SETTINGS,
    "narrow": (SETTINGS[1], Setting(2, 70, 11, 75)),
    "tiny": SETTINGS[:2],
}

# Calls of models of the published widths: (without past, with past).
_CALLS: dict[Kind, tuple[Setting, ...]] = {
    "encoder": (Setting(1, 128, 0, 0),),
    "decoder": (Setting(1, 256, 0, 0), Setting(1, 1, 512, 0)),
    "seq2seq": (Setting(1, 32, 0, 128), Setting(1, 1, 256, 128)),
    "speech": (Setting(1, 32, 0, 0), Setting(1, 1, 256, 1500)),
    "vision": (Setting(1, 0, 0, 0),),
    "clip": (Setting(1, 77, 1, 0),),
}


@dataclass(frozen=True)
class Export:
    """One model as one exporter writes it: the small one of docs/models.md, or at the widths of a published one."""

    model: str
    past: bool
    opset: int
    traced: bool = False
    half: bool = False
    form: Form = "symbolic"
    published: bool = False

    @property
    def name(self) -> str:
        """Return the fields joined by dashes, without the default ones."""
        form = "" if self.form == "symbolic" and not self.published else self.form
        fields = ("published" * self.published, self.model, "past" * self.past, f"{self.exporter}{self.opset}")
        return "-".join(field for field in (*fields, "f16" * self.half, form) if field)

    @property
    def exporter(self) -> str:
        return "traced" if self.traced else "dynamo"

    def settings(self, width: Width = "whole") -> tuple[Setting, ...]:
        """Return the sizes at which it is compared with PyTorch, those that its form allows."""
        if self.published:
            return (_CALLS[PUBLISHED[self.model].kind][self.past],)
        settings = SETTINGS[:1] if self.form == "fixed" else _SETTINGS[width]
        if self.form == "symbolic":
            return settings
        single = tuple(Setting(1, s.tokens, s.past, s.source) for s in settings)
        return single

    def seen(self) -> Setting:
        """Return the sizes of the exporter's example; symbolic ones differ, and none is 1."""
        if self.form == "fixed":
            return self.settings()[0]
        return SETTINGS[0] if self.form == "symbolic" else Setting(1, *_sizes(SETTINGS[0]))


def _sizes(setting: Setting) -> tuple[int, int, int]:
    return setting.tokens, setting.past, setting.source


def published() -> list[Export]:
    """Return every model of `PUBLISHED` in every form, at both opsets, without past and with it."""
    return [
        Export(model, past, opset, form=form, published=True)
        for model, about in PUBLISHED.items()
        for past in ((False, True) if about.past else (False,))
        for opset in DYNAMO_OPSETS
        for form in FORMS
    ]


def published_half() -> list[Export]:
    """Return float16 exports of some of these models, with every size symbolic."""
    return [
        Export(model, past, DYNAMO_OPSETS[-1], half=True, published=True)
        for model in ("bert", "gpt2", "llama", "qwen3", "t5", "whisper", "vit")
        for past in ((False, True) if PUBLISHED[model].past else (False,))
    ]


def find_exports(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and model of every export in the folder, of all widths and in all forms, sorted by name."""
    for path in sorted(folder.glob("*/model.onnx")):
        if path.parent.suffix != PARTIAL:
            yield path.parent.name, path


PARTIAL = ".partial"
"""The suffix of the folder of an export while it is being written."""
