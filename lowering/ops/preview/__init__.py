"""Operators that the ONNX standard tries out, in the domain ai.onnx.preview.

There is one file per operator, plus helper modules.
"""

from __future__ import annotations

DOMAIN = "ai.onnx.preview"
