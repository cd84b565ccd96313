"""float16 models at published widths with their matmuls in bfloat16, by `precision="fast"`, as OpenVINO has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .case import Bar
from .exported import PublishedWidths, exports_module

_EXPORTS = exports_module("forms")


@dataclass(frozen=True, kw_only=True)
class HalfCase(PublishedWidths):
    """One export, called as `published` ones are."""

    @property
    def tolerance(self) -> float:
        return 3e-2

    @property
    def options(self) -> Mapping[str, Any]:
        return {"precision": "fast"}


def cases() -> list[HalfCase]:
    return [
        HalfCase(
            name=f"{export.name}, fast", group="half", bar=Bar(ratio=1.0), dtype="bf16", export=export.name,
            past=export.past,
        )
        for export in _EXPORTS.published_half()
    ]  # fmt: skip
