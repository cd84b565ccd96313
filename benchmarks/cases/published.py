"""The models at published widths, in every form: see tests/exports/sizes.py and forms.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from lowering.graph.caches.static_cache import PAST_LENGTH

from .case import Arrays, Bar
from .exported import PublishedWidths, exports_module

_EXPORTS = exports_module("forms")
_WIDTHS = exports_module("sizes").PUBLISHED

FORMS: tuple[str, ...] = _EXPORTS.FORMS
GROUP = "published"
SLOTS = "slots"

_LENGTH_AXIS = 2
_PAST = "past_"  # how the dynamo exporter calls the cached keys and values
_TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class PublishedCase(PublishedWidths):
    """One export at the sizes that a caller asks for: a prompt, or one token after a past.

    slots: ours stores the past in caches of so many slots, written in place; peers let it grow, as is their way.
    Only the length of the past is symbolic there in the form "fixed", which is made of the export with batch 1.
    """

    model_name: str
    opset: int
    form: str
    slots: int = 0

    @property
    def checkpoint(self) -> str:
        """The checkpoint whose widths it has."""
        return _WIDTHS[self.model_name].checkpoint

    @property
    def task(self) -> str:
        """The task: rows of the table in docs/results.md."""
        return f"decode, {SLOTS}" if self.slots else "decode, growing" if self.past else "prefill"

    def model(self) -> onnx.ModelProto:
        model = super().model()
        if self.slots and self.form == "fixed":
            del model.graph.value_info[:]
            for value in (*model.graph.input, *model.graph.output):
                for size in value.type.tensor_type.shape.dim:
                    if size.dim_param == _TOKENS:
                        size.dim_value = 1
        return model

    @property
    def options(self) -> Mapping[str, Any]:
        return {"static_cache": self.slots} if self.slots else {}

    def own_feeds(self) -> Arrays:
        feeds = self.feeds()
        if not self.slots:
            return feeds
        for name in [name for name in feeds if name.startswith(_PAST)]:
            past = feeds[name]
            length = past.shape[_LENGTH_AXIS]
            rest = [(0, self.slots - length if axis == _LENGTH_AXIS else 0) for axis in range(past.ndim)]
            feeds[name] = np.pad(past, rest)
        return feeds | {PAST_LENGTH: np.array(length)}

    def expected(self) -> Arrays:
        """With slots without the caches, which have another shape then; what is computed depends on them."""
        return {n: a for n, a in super().expected().items() if not (self.slots and n.startswith("present"))}


def cases() -> list[PublishedCase]:
    """Return, by model: the prompt, then decoding with a growing past, then with slots."""
    published: list[PublishedCase] = []
    for export in _EXPORTS.published():
        (setting,) = export.settings()
        shared: dict[str, Any] = {
            "group": GROUP, "bar": Bar(ratio=1.0), "export": export.name, "past": export.past,
            "model_name": export.model, "opset": export.opset, "form": export.form,
        }  # fmt: skip
        published.append(PublishedCase(name=export.name, **shared))
        if export.past:
            if export.form == "fixed":  # such a past leaves no room for another row
                shared["export"] = replace(export, form="batch1").name
            published.append(PublishedCase(name=f"{export.name}, {SLOTS}", slots=2 * setting.past, **shared))
    return published


def quick(cases: list[Any]) -> list[Any]:
    """Keep one opset of each model: every other model has the older one."""
    opsets = {name: _EXPORTS.DYNAMO_OPSETS[k % 2] for k, name in enumerate(_WIDTHS)}
    return [case for case in cases if not isinstance(case, PublishedCase) or case.opset == opsets[case.model_name]]
