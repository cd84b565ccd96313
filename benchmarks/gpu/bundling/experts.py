"""Mixtures of experts (com.microsoft MoE, gated by SiLU) in float16, of widths that published models have.

The matrices repeat a few numbers, so that they travel compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowering.compiling.compiler import compile_to

from ..host.packed import PERIOD, mixture_matrices, pack
from ..plan import Program
from .folders import make_empty

TOLERANCE = 4e-3
TOKENS = (1, 4, 8, 16, 32, 128, 512, 2048)

SIZES = {"32 experts, 4 chosen": {"experts": 32, "chosen": 4, "width": 2048, "inner": 1024}}
"""By name of a program the experts, how many a token chooses, and the widths of tokens and between both matmuls."""


def write(
    folder: Path, target: str, *, sizes: Mapping[str, Mapping[str, int]] = SIZES, tokens: Sequence[int] = TOKENS
) -> list[Program]:
    """A program for each mixture, in folders below `folder` / "experts"."""
    programs = []
    for number, (name, size) in enumerate(sizes.items()):
        target_folder = make_empty(folder / "experts" / str(number))
        tile = (np.random.default_rng(number).standard_normal(PERIOD) * size["width"] ** -0.5).astype(np.float16)
        compile_to(target_folder / "artifact", _model(tile, size), target)
        pack(target_folder / "artifact")
        np.savez(target_folder / "tiles.npz", allow_pickle=False, values=tile)
        details = {**size, "tokens": list(tokens), "tolerance": TOLERANCE}
        programs.append(Program(name, "experts", f"experts/{number}", details))
    return programs


def _model(tile: np.ndarray, size: Mapping[str, int]) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(array, name) for name, array in mixture_matrices(tile, size).items()]
    node = helper.make_node(
        "MoE", ["x", "router", "fc1", "", "fc2", "", "fc3"], ["y"], domain="com.microsoft", k=size["chosen"],
        activation_type="silu", normalize_routing_weights=1,
    )  # fmt: skip
    widths = {"x": size["width"], "router": size["experts"], "y": size["width"]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["t", n]) for name, n in widths.items()}
    graph = helper.make_graph([node], "mixture", [values["x"], values["router"]], [values["y"]], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
