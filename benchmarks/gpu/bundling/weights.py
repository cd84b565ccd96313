"""Chains of matmuls by constant matrices of float16, and of 4 and 8 bits with scales (com.microsoft MatMulNBits).

The matrices are too many for the second-level cache, and repeat a few numbers, so that they travel compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowering.compiling.compiler import compile_to

from ..host.packed import PERIOD, pack, repeat
from ..plan import Program
from .folders import make_empty

BLOCK = 32  # values of a scale
TOLERANCE = 1e-2
ROWS, SIZE, LAYERS = (1, 8, 32, 512), 4096, 8


def write(
    folder: Path,
    target: str,
    *,
    size: int = SIZE,
    layers: int = LAYERS,
    rows: Sequence[int] = ROWS,
    widths: Sequence[int] = (16, 8, 4),
) -> list[Program]:
    """A program for weights of each of these widths, in bits, in folders below `folder` / "weights"."""
    programs = []
    for bits in widths:
        name = "float16" if bits == 16 else f"int{bits}"
        target_folder = make_empty(folder / "weights" / name)
        block = 0 if bits == 16 else BLOCK
        tiles = _tiles(bits, size)
        nodes, weights = _chain(tiles, bits, size, layers)
        compile_to(target_folder / "artifact", _model(nodes, weights, size), target)
        pack(target_folder / "artifact")
        np.savez(target_folder / "tiles.npz", allow_pickle=False, **tiles)
        details: dict[str, Any] = {"rows": list(rows), "layers": layers, "depth": size, "block": block}
        programs.append(Program(name, "weights", f"weights/{name}", {**details, "bits": bits, "tolerance": TOLERANCE}))
    return programs


def _tiles(bits: int, size: int) -> dict[str, np.ndarray]:
    """The numbers that the matrices repeat, so scaled that rows keep their norm."""
    rng = np.random.default_rng(bits)
    if bits == 16:
        return {"values": (rng.standard_normal(PERIOD) * size**-0.5).astype(np.float16)}
    spread = (4**bits / 12) ** 0.5  # of integers
    scales = ((0.5 + rng.random(PERIOD)) * size**-0.5 / spread).astype(np.float16)
    integers = rng.integers(0, 1 << bits, PERIOD, np.uint8)
    return {"integers": integers, "scales": scales, "zero": np.float32(1 << (bits - 1))}


def _chain(
    tiles: dict[str, np.ndarray], bits: int, size: int, layers: int
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    nodes, weights = [], []
    for layer in range(layers):
        source, result = ("x" if layer == 0 else f"y{layer}"), ("y" if layer == layers - 1 else f"y{layer + 1}")
        if bits == 16:
            arrays = {f"w{layer}": repeat(tiles["values"], (size, size), layer)}
            node = helper.make_node("MatMul", [source, *arrays], [result])
        else:
            arrays = {
                f"w{layer}": _packed(repeat(tiles["integers"], (size, size), layer), bits),
                f"s{layer}": repeat(tiles["scales"], (size, size // BLOCK), layer),
            }
            fields = {"K": size, "N": size, "bits": bits, "block_size": BLOCK}
            node = helper.make_node("MatMulNBits", [source, *arrays], [result], domain="com.microsoft", **fields)
        nodes.append(node)
        weights += [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return nodes, weights


def _packed(integers: np.ndarray, bits: int) -> np.ndarray:
    """As MatMulNBits has them: [n, blocks, bytes], two of 4 bits in a byte, the first one low."""
    data = integers if bits == 8 else integers[:, ::2] | (integers[:, 1::2] << 4)
    return np.ascontiguousarray(data.reshape(len(integers), -1, BLOCK * bits // 8))


def _model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], size: int) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["rows", size]) for name in "xy"]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
