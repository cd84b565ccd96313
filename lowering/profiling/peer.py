"""Another runtime beside an artifact: ONNX Runtime on the model that the artifact was compiled from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..machine import not_installed
from ..manifest import Manifest


def onnxruntime(
    model: str | os.PathLike[str], manifest: Manifest, inputs: Mapping[str, Any], threads: int
) -> Callable[[], object]:
    """A call of the model on copies of these arrays, with so many threads, on the CPU.

    Raises InputError where onnxruntime is not installed, cannot run the model, or has other inputs than the artifact.
    """
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise InputError(not_installed("onnxruntime")) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    try:
        session = ort.InferenceSession(str(Path(model)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of types of its own
        raise InputError(f"onnxruntime does not take '{model}': {_line(error)}") from error
    theirs, ours = [found.name for found in session.get_inputs()], [spec.name for spec in manifest.inputs]
    if set(theirs) != set(ours):
        raise InputError(
            f"'{model}' has the inputs {', '.join(theirs)}, and the artifact {', '.join(ours)}: give the model that it "
            "was compiled from, without static_cache and serve."
        )
    given = {name: array.copy() for name, array in inputs.items()}

    def call() -> object:
        return session.run(None, given)

    try:
        call()
    except Exception as error:
        raise InputError(f"onnxruntime cannot run '{model}' on these inputs: {_line(error)}") from error
    return call


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
