"""Imports TVM without PyTorch, which it would import wherever it is installed: two seconds for nothing."""

from ..runtime.without_torch import hidden

with hidden():
    import tvm.relax  # noqa: F401  (for what it imports)
