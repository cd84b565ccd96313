"""Assign a crash: `python -m tests.attacks.fuzz.blame [onnx | NAME] FILE SECONDS` does one thing to one input.

With `onnx`, it calls onnx as the importer does before it looks at a model itself. A model that ends that process, too,
is a fault of onnx.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from contextlib import suppress
from pathlib import Path

import onnx


def by_onnx_alone(data: bytes) -> None:
    with suppress(Exception):
        model = onnx.load_model_from_string(data)
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, data_prop=True)
        onnx.version_converter.convert_version(model, 24)


def main() -> None:
    name, path, seconds = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    data = Path(path).read_bytes()
    if name == "onnx":
        by_onnx_alone(data)
        return
    with suppress(Exception):
        importlib.import_module(f"tests.attacks.fuzz.{name}").attempt(data)


if __name__ == "__main__":
    main()
