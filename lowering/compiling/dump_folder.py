"""What `compile --dump-dir` writes: the model before and after fusion, the module after every pass, the manifest.

given.onnx is the model as it was given, with model-local functions inlined, and large weights as inputs: it is there to
be looked at. fused.onnx is whole, and other tools run it. NN_<pass>.py are scripts of modules. artifact.json is the
artifact's manifest, written last, by which `inspect --html --dump` knows that both belong together.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ..manifest import Manifest

if TYPE_CHECKING:
    import tvm

FILE = "artifact.json"

_LARGE = 1 << 10  # bytes
_HEAD = 200  # characters of a script that say what it is


class DumpFolder:
    """A `dump` for `compile`, which writes into a folder. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        for old in folder.glob("[0-9][0-9]*_*.py"):  # of another compilation, which may have had more passes
            if "tvm.script" in old.read_text("utf-8", "replace")[:_HEAD]:
                old.unlink()

    def __call__(self, name: str, module: ir.Model | tvm.IRModule) -> None:
        if isinstance(module, ir.Model):
            if name == "given":
                ir.save(_without_weights(module), self._folder / f"{name}.onnx")
            else:
                ir.save(module, self._folder / f"{name}.onnx", external_data=f"{name}.onnx.data")
            return
        self._steps += 1
        (self._folder / f"{self._steps:02}_{name}.py").write_text(module.script() + "\n", encoding="utf-8")

    def finish(self, manifest: Manifest) -> None:
        """The compilation is complete, and this is what came of it."""
        (self._folder / FILE).write_text(manifest.to_json())


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy whose large initializers are inputs."""
    copy = model.clone()
    graph = copy.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > _LARGE:
            del graph.initializers[name]
            value.const_value = None
            if value not in graph.inputs:
                graph.inputs.append(value)
    return copy
