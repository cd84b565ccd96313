"""Operators that implement a mixture of experts (lowering/graph/experts.py).

They belong to the compiler's own domain. Each row of a tensor is processed by one expert. Rows are first sorted by
expert, so that the rows of an expert are contiguous. There is one file per operator.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
