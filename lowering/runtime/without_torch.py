"""Imports tvm_ffi without PyTorch, which it would import wherever it is installed: a second for nothing.

What PyTorch's tensors need of tvm_ffi is DLPack, which does not ask when PyTorch is imported. Where it is imported
already, tvm_ffi finds it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoTorch(MetaPathFinder):
    """Says that there is no PyTorch, to the thread that made it alone: another may be about to import it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("tvm_ffi is imported without PyTorch", name=name)
        return None


@contextmanager
def hidden() -> Iterator[None]:
    """Around imports of what would import PyTorch if there were one."""
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with hidden():
    import tvm_ffi  # noqa: F401
