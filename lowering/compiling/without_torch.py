"""Import TVM without PyTorch, which TVM would import if it is installed: that takes two seconds for nothing."""

from ..runtime.without_torch import hide_torch

with hide_torch():
    import tvm.relax  # noqa: F401  (for what it imports)
