"""Operators of the domain com.microsoft, as written by the optimizers of onnxruntime and Olive.

Their semantics are those of onnxruntime's schemas and CPU kernels
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). There is one file per family; files are
imported automatically.
"""

from __future__ import annotations

DOMAIN = "com.microsoft"
