"""Import tvm_ffi without PyTorch, which it would import wherever it is installed, at a cost of a second.

tvm_ffi exchanges PyTorch tensors through DLPack, which works whenever PyTorch is imported. If PyTorch is already
imported, tvm_ffi finds it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _TorchBlocker(MetaPathFinder):
    """Import hook that hides PyTorch from the creating thread only: another thread may be about to import it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("tvm_ffi is imported without PyTorch", name=name)
        return None


@contextmanager
def hide_torch() -> Iterator[None]:
    """Hide PyTorch from imports in the block."""
    finder = _TorchBlocker()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with hide_torch():
    import tvm_ffi  # noqa: F401
