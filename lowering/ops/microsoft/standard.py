"""com.microsoft operators equal to those of ai.onnx, for more types or as in older models."""

from __future__ import annotations

from .. import op
from ..math.quantization import dequantize_linear, quantize_linear
from ..tensor.movement import trilu
from . import DOMAIN

op("QuantizeLinear", since=1, domain=DOMAIN)(quantize_linear)
op("DequantizeLinear", since=1, domain=DOMAIN)(dequantize_linear)
op("Trilu", since=1, domain=DOMAIN)(trilu)
