"""Imports TVM without PyTorch, which it would import wherever it is installed: two seconds for nothing."""

from ..runtime.without_torch import hide_torch

with hide_torch():
    import tvm.relax  # noqa: F401  (for what it imports)
