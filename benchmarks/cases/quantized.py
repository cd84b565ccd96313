"""Models at published widths as onnxruntime's tools quantize them: on the way or with calibrated scales."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from lowering.checking.references import create_session_options

from .case import Arrays, Bar, error
from .exported import PublishedWidths, exports_module

GROUP = "quantized"
_MODELS = ("bert", "vit", "gpt2", "llama", "qwen2")
_EXPORTS = exports_module("forms")
# Type of weights, by column, and for calibrated scales the format.
_WAYS: dict[str, tuple[str, bool, str]] = {
    "dynamic, U8S8": ("QInt8", False, ""),
    "dynamic, U8U8": ("QUInt8", False, ""),
    "dynamic, U8S8 by column": ("QInt8", True, ""),
    "QDQ": ("QInt8", False, "QDQ"),
    "QDQ by column": ("QInt8", True, "QDQ"),
    "QLinear": ("QInt8", False, "QOperator"),
}


@dataclass(frozen=True, kw_only=True)
class QuantizedCase(PublishedWidths):
    """An export with its matmuls in 8 bits, by one of `_WAYS`; static scales come from the inputs of the call."""

    way: str

    @cached_property
    def tolerance(self) -> float:
        """The tolerance of quantization. With scales of one call and random weights the tool's own runtime may be off
        by more than 0.1: a result that is a fifth further off than that is wrong."""
        import onnxruntime

        session = onnxruntime.InferenceSession(self._quantized.SerializeToString(), create_session_options())
        answers = dict(zip((output.name for output in session.get_outputs()), session.run(None, self.feeds())))
        return max(0.1, 1.2 * max(error(answers[name], expected) for name, expected in self.expected().items()))

    def model(self) -> onnx.ModelProto:
        return self._quantized

    @cached_property
    def _quantized(self) -> onnx.ModelProto:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

        weights, by_column, form = _WAYS[self.way]
        options: dict[str, Any] = {"weight_type": QuantType[weights], "per_channel": by_column}
        logging.getLogger().setLevel(logging.ERROR)  # the tools ask for a pre-processing that changes nothing here
        with tempfile.TemporaryDirectory() as folder:
            source, path = self.path() / "model.onnx", Path(folder) / "model.onnx"
            if form:
                reader = _Once(self.feeds())
                quantize_static(source, path, reader, quant_format=QuantFormat[form], **options)
            else:
                quantize_dynamic(source, path, **options)
            return onnx.load(path)


class _Once:
    """A reader for calibration: one call."""

    def __init__(self, feeds: Arrays) -> None:
        self.calls: Iterator[Arrays] = iter([feeds])

    def get_next(self) -> Arrays | None:
        return next(self.calls, None)


def cases() -> list[QuantizedCase]:
    """Return encoders with a prompt, and decoders with a token after a past."""
    quantized_cases = []
    for export in _EXPORTS.published():
        decodes = export.model not in ("bert", "vit")
        if export.model in _MODELS and export.opset == 18 and export.form == "symbolic" and export.past == decodes:
            quantized_cases += [
                QuantizedCase(
                    name=f"{export.name}, {way}", group=GROUP, bar=Bar(ratio=1.0), export=export.name,
                    past=export.past, way=way,
                )
                for way in _WAYS
            ]  # fmt: skip
    return quantized_cases
