"""Code of CPUs without LLVM's optimizations, which take a third of the time of the tests.

What compares answers runs such code, except one of EVERY tests, others with every sample. Slow tests, tests with the
marker `optimized`, and all that runs in processes of its own get the code that users get.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi

from lowering import cache_folder
from lowering.compiling.cache import object_cache

from . import sampled

EVERY = 4

_is_selected = False
_BUILD = "target.build.llvm"
_build = tvm.get_global_func(_BUILD)
_folder = object_cache.folder


def select(item: pytest.Item) -> None:
    """Select the code that a test gets."""
    global _is_selected
    needs_optimized = any(item.get_closest_marker(name) for name in ("slow", "optimized"))
    _is_selected = not needs_optimized and not sampled.is_in_sample(item, EVERY)


def _build_unoptimized(module: Any, target: tvm.target.Target) -> Any:
    return _build(module, tvm.target.Target({**target.export(), "opt-level": 0}) if _is_selected else target)


def _find_folder() -> Path | None:
    """Return the folder of objects: one of their own for those that are not optimized."""
    return cache_folder.find_private_subfolder("unoptimized") if _is_selected else _folder()


tvm_ffi.register_global_func(_BUILD, _build_unoptimized, override=True)
pytest.MonkeyPatch().setattr(object_cache, "folder", _find_folder)
