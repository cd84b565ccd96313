"""The files of `compile --dump-dir`: the model before and after fusion, the module after every pass, the manifest.

given.onnx is the original model, with model-local functions inlined, and large weights as inputs: it is meant for
inspection. fused.onnx is complete, and other tools run it. NN_<pass>.py are scripts of modules. artifact.json is the
artifact's manifest, written last; `inspect --html --dump` uses it to match both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ..graph.loading.undeclared import drop_data
from ..manifest import Manifest

if TYPE_CHECKING:
    import tvm

FILE = "artifact.json"

_LARGE_BYTES = 1 << 10  # bytes
_HEADER_CHARS = 200  # characters of a script that identify it


class DumpFolder:
    """A `dump` for `compile`, which writes into a folder. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        for old in folder.glob("[0-9][0-9]*_*.py"):  # of an earlier compilation, which may have had more passes
            if "tvm.script" in old.read_text("utf-8", "replace")[:_HEADER_CHARS]:
                old.unlink()

    def __call__(self, name: str, module: ir.Model | tvm.IRModule) -> None:
        if isinstance(module, ir.Model):
            if name == "given":
                copy = drop_data(module, lambda tensor: tensor.nbytes > _LARGE_BYTES)
                ir.save(copy, self._folder / f"{name}.onnx")
            else:
                ir.save(module, self._folder / f"{name}.onnx", external_data=f"{name}.onnx.data")
            return
        self._steps += 1
        (self._folder / f"{self._steps:02}_{name}.py").write_text(module.script() + "\n", encoding="utf-8")

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest of the complete compilation."""
        (self._folder / FILE).write_text(manifest.to_json())
