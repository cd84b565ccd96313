"""Operators that a mixture of experts becomes (lowering/graph/experts.py), in a domain of this compiler alone.

Each row of a tensor goes through one expert. Rows are sorted by their expert first, so that those of an expert lie side
by side. One file per operator.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
