"""Operators that the ONNX standard tries out, in the domain ai.onnx.preview.

There is one file per operator, plus helper modules.
"""

from __future__ import annotations

import importlib
import pkgutil

DOMAIN = "ai.onnx.preview"

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
