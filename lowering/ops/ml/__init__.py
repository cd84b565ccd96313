"""Operators of the domain ai.onnx.ml. There is one file per operator."""

from __future__ import annotations

DOMAIN = "ai.onnx.ml"
