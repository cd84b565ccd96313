"""Operators of the domain com.microsoft, as the optimizers of onnxruntime and Olive write them.

Their meaning is that of onnxruntime's schemas and CPU kernels
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). One file per family; files are found by
themselves.
"""

from __future__ import annotations

import importlib
import pkgutil

DOMAIN = "com.microsoft"

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
