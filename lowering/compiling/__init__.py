"""From an imported model to an artifact."""

from ..runtime.without_torch import hidden

with hidden():
    import tvm.relax  # noqa: F401
