"""Another runtime for comparison: ONNX Runtime on the model that the artifact was compiled from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..machine import describe_missing_package
from ..manifest import Manifest


def load_onnxruntime(
    model: str | os.PathLike[str], manifest: Manifest, inputs: Mapping[str, Any], threads: int
) -> Callable[[], object]:
    """Return a call of the model on copies of these arrays, with `threads` threads, on the CPU.

    Raises InputError if onnxruntime is not installed, cannot run the model, or has other inputs than the artifact.
    """
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise InputError("toolchain.package_missing", describe_missing_package("onnxruntime")) from error
    options = ort.SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # else its threads take the CPUs in our turns
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    try:
        session = ort.InferenceSession(str(Path(model)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its own types
        raise InputError("profile.onnxruntime_failed", f"onnxruntime cannot load '{model}': {_line(error)}") from error
    names, specs = [node.name for node in session.get_inputs()], [spec.name for spec in manifest.inputs]
    if set(names) != set(specs):
        raise InputError(
            "profile.model_mismatch",
            f"'{model}' has the inputs {', '.join(names)}, but the artifact has {', '.join(specs)}. Give the model "
            "from which it was compiled, without static_cache and serve.",
        )
    arrays = {name: array.copy() for name, array in inputs.items()}

    def call() -> object:
        return session.run(None, arrays)

    try:
        call()
    except Exception as error:
        raise InputError(
            "profile.onnxruntime_run_failed", f"onnxruntime cannot run '{model}' on these inputs: {_line(error)}"
        ) from error
    return call


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
