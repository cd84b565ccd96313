"""model.so: a model as a shared library that needs a C library alone (runtime/native/library.h)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..emission.library_source import write_source
from ..manifest import CODE, WeightSpec
from ..target import Target
from . import progress
from .bundled_sources import LIBRARY
from .c_model import compile_c_model, compile_objects, run_tool
from .compilation import LoweredModel

_EXPORTS = "{ global: lowering_model; local: *; };\n"
_FLAGS = ("-shared", "-pthread", "-Wl,--version-script=exports", "-Wl,-z,defs", "-Wl,--build-id=none", "-s")


def build_library(lowered: LoweredModel, target: Target, weights: Sequence[WeightSpec]) -> bytes:
    """Return the library of a model that was lowered with `native`.

    Raises:
        ModelError: It needs more than calls of kernels (`static.unsupported`).
        TargetError: The C compiler or the linker is missing or fails.
    """
    counters = {kernel.name: kernel.counter for kernel in lowered.manifest.kernels if kernel.counter is not None}
    objects = compile_c_model(lowered, weights, weights[0].offset if weights else 0, counters.values())
    files = {"model.c": write_source(objects.model, counters), "exports": _EXPORTS}
    with progress.stage("linking"), tempfile.TemporaryDirectory() as folder:
        names = compile_objects(target, Path(folder), objects, files, [LIBRARY])
        run_tool(target, Path(folder), [target.linker, *_FLAGS, *names, "-lm", "-o", CODE])
        return (Path(folder) / CODE).read_bytes()
