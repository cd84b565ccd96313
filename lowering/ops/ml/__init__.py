"""Operators of the domain ai.onnx.ml. There is one file per operator."""

from __future__ import annotations

import importlib
import pkgutil

DOMAIN = "ai.onnx.ml"

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
