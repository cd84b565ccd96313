"""Libraries for C: a model as model.so, which needs a C library alone, and the source of the loader.

The folder has model.so, weights.bin, and the files of `LOADER`, of which a program compiles lowering.c.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ..emission.library_source import write_source
from ..graph.loading.model import ModelLike
from ..manifest import CODE, LOADER, Manifest
from ..runtime.artifact.folders import replace_folder
from ..target import Target
from . import progress
from .bundled_sources import FOLDER, LIBRARY
from .c_model import compile_c_model, compile_objects, lower_to_c, run_tool, write_c_weights
from .compilation import LoweredModel
from .interrupts import preserve_interrupts
from .options import CompileOptions
from .pipeline import Dump

_EXPORTS = "{ global: lowering_description; local: *; };\n"
_FLAGS = ("-shared", "-pthread", "-Wl,--version-script=exports", "-Wl,-z,defs", "-Wl,--build-id=none", "-s")


@preserve_interrupts()
def write_library(folder: Path, model: ModelLike, options: CompileOptions, dump: Dump | None = None) -> Manifest:
    """Compile a model into a folder with its library; return the model's description.

    Args:
        folder: The folder, which is replaced in one step if it exists.
        model: The model.
        options: As for an artifact.
        dump: As for `compile`.

    Raises:
        InputError: As for `lower_to_c`.
        ModelError: As for `lower_to_c` and `compile_c_model`.
        TargetError: The C compiler or the linker is missing or fails.
    """
    target, lowered = lower_to_c(model, options, dump)
    with replace_folder(folder) as new:
        lowered = write_c_weights(lowered, new)
        (new / CODE).write_bytes(_build(lowered, target))
        for name in LOADER:
            shutil.copyfile(FOLDER / name, new / name)
    return lowered.manifest


def _build(lowered: LoweredModel, target: Target) -> bytes:
    """Return the library."""
    counters = {kernel.name: kernel.counter for kernel in lowered.manifest.kernels if kernel.counter is not None}
    objects = compile_c_model(lowered, counters.values())
    files = {"model.c": write_source(objects.model, counters), "exports": _EXPORTS}
    with progress.stage("linking"), tempfile.TemporaryDirectory() as folder:
        names = compile_objects(target, Path(folder), objects, files, [LIBRARY])
        run_tool(target, Path(folder), [target.linker, *_FLAGS, *names, "-lm", "-o", CODE])
        return (Path(folder) / CODE).read_bytes()
