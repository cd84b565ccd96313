"""Code generation and linking: a lowered module becomes the bytes of model.so."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import tvm

from .errors import TargetError
from .runtime.parallel import link_options
from .target import Target


def build(module: tvm.IRModule, target: Target) -> bytes:
    """The shared library.

    Raises TargetError when the linker is missing or fails.
    """
    if shutil.which(target.linker) is None:
        raise TargetError(
            f"Target '{target.name}' is linked by '{target.linker}', which is not installed. "
            "Install it or name another with --cc."
        )
    executable = tvm.compile(module, target=target.tvm, relax_pipeline=tvm.transform.Sequential([]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        try:
            executable.export_library(str(path), cc=target.linker, options=link_options(target.linker, folder))
        except RuntimeError as error:
            raise TargetError(f"'{target.linker}' could not link for target '{target.name}': {error}") from error
        return path.read_bytes()
