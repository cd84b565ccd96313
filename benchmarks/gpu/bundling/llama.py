"""A decoder of the widths of Llama 3.2 1B in float16, as an artifact whose weights do not travel: hosts draw them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from lowering.compiling.compiler import compile_to
from lowering.demo.decoder import DecoderConfig, ModelBuilder, build_decoder
from lowering.manifest import FILE, WEIGHTS, Manifest, digest

from ..host import drawn
from ..plan import Program
from .folders import make_empty
from .models import in_half

LLAMA = DecoderConfig(
    layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, vocabulary=128256, positions=4096
)
NAME = "llama-3.2-1b"

_DATA = "model.data"


class _Drawn(ModelBuilder):
    """Weights go to a file next to the model; `tensors` lists them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.file = (folder / _DATA).open("wb")
        self.tensors: list[drawn.DrawnTensor] = []

    def weight(self, *shape: int, name: str, scale: float | None = None) -> str:
        tensor = drawn.DrawnTensor(name, shape, float(shape[0] ** -0.5 if scale is None else scale))
        self.tensors.append(tensor)
        proto = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT16)
        proto.data_location = TensorProto.EXTERNAL
        data = tensor.draw()
        for key, value in (("location", _DATA), ("offset", self.file.tell()), ("length", data.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self.file.write(data.data)
        self.initializers.append(proto)
        return name


def write(folder: Path, target: str, config: DecoderConfig = LLAMA) -> list[Program]:
    """Write the artifact into a folder below `folder` / "steps"."""
    artifact(make_empty(folder / "steps" / NAME), target, config)
    return [Program(NAME, "step", f"steps/{NAME}")]


def artifact(folder: Path, target: str, config: DecoderConfig = LLAMA) -> None:
    """Write it with weights.json and others.bin instead of weights.bin, which `drawn.fill` makes again from them.

    A step of it reads a token at half of the caches, which have room for half of its positions.
    """
    with tempfile.TemporaryDirectory() as temporary:
        graph = _Drawn(Path(temporary))
        model = in_half(build_decoder(config, graph))
        graph.file.close()
        onnx.save(model, Path(temporary) / "model.onnx")
        compile_to(folder, Path(temporary) / "model.onnx", target, donate=["cache_.*"])
    manifest = Manifest.from_dict(json.loads((folder / FILE).read_text()))
    data = np.memmap(folder / WEIGHTS, np.uint8, "r")
    recipe = drawn.recipe(data, [(weight.offset, weight.nbytes) for weight in manifest.weights], graph.tensors)
    capacity = config.positions // 2
    about = {**dataclasses.asdict(config), "capacity": capacity, "place": capacity // 2}
    recipe.write(folder, graph.tensors, about)
    drawn.fill(folder)
    if digest((folder / WEIGHTS).read_bytes()) != manifest.hashes[WEIGHTS]:
        raise AssertionError("weights drawn again differ from those of the artifact")
    (folder / WEIGHTS).unlink()
