"""FlexAttention of the domain lowering.flex: attention whose score and mask are expressions.

`lowering.flex` traces the expressions from Python functions, and writes models of one such node. The expressions are
those of `lowering.attention.expr`, as JSON.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
