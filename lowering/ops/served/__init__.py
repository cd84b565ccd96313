"""Operators that `serve` puts into a decoder (lowering/graph/paged_decoder.py), in a domain of this compiler alone.

Tokens of all requests lie side by side: request r has rows row_starts[r] to row_starts[r + 1] - 1, which follow its
past_lengths[r] tokens in the cache; tables are int64. One file per operator.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
