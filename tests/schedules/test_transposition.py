"""Transpositions in tiles against NumPy: element types, permutations, odd and short axes, neighbors that fuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import lowering

SHAPES = ((1, 1, 1), (3, 5, 17), (2, 16, 16), (1, 70, 259), (33, 4, 40), (300, 65, 2))
PERMUTATIONS = ((0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0), (1, 0, 2))


def moved(dtype: str, dims: tuple[int | str, ...], target: str) -> lowering.Model:
    """Compile transpositions: every permutation of x; x + y with y transposed; x concatenated with transposed y, where
    half of the loads is guarded; and gathered rows of x, transposed, whose indices depend on data."""
    nodes = [helper.make_node("Transpose", ["x"], [f"t{k}"], perm=perm) for k, perm in enumerate(PERMUTATIONS)]
    nodes += [
        helper.make_node("Transpose", ["y"], ["z"], perm=[0, 2, 1]),
        helper.make_node("Add", ["x", "z"], ["sum"]),
        helper.make_node("Concat", ["x", "z"], ["both"], axis=1),
        helper.make_node("Neg", ["from_end"], ["order"]),
        helper.make_node("Gather", ["x", "order"], ["ordered"], axis=1),
        helper.make_node("Transpose", ["ordered"], ["rows"], perm=[0, 2, 1]),
    ]
    names = [*(f"t{k}" for k in range(len(PERMUTATIONS))), "sum", "both", "rows"]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    b, m, n = dims
    inputs = [helper.make_tensor_value_info(name, element, d) for name, d in (("x", (b, m, n)), ("y", (b, n, m)))]
    inputs.append(helper.make_tensor_value_info("from_end", helper.np_dtype_to_tensor_dtype(np.dtype("int64")), ["k"]))
    outputs = [helper.make_tensor_value_info(name, element, [f"{name}{k}" for k in range(3)]) for name in names]
    graph = helper.make_graph(nodes, "moved", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return lowering.compile(model, target=target)


def check(model: lowering.Model, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    b, m, n = shape
    x, y = ((rng.integers(-60, 60, s)).astype(dtype) for s in ((b, m, n), (b, n, m)))
    z = y.transpose(0, 2, 1)
    expected = {f"t{k}": x.transpose(perm) for k, perm in enumerate(PERMUTATIONS)}
    order = rng.integers(-m, 0, 37)
    expected |= {"sum": x + z, "both": np.concatenate([x, z], 1), "rows": x[:, order].transpose(0, 2, 1)}
    for threads in (1, 2):
        for name, result in model.run({"x": x, "y": y, "from_end": -order}, threads=threads).items():
            np.testing.assert_array_equal(result, expected[name], err_msg=f"{name} {shape}")


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        ("float32", "cpu"),
        ("float32", "cpu:x86-64-v3"),
        ("bfloat16", "cpu"),
        ("float16", "cpu:x86-64-v3"),
        ("int8", "cpu"),
        ("int64", "cpu"),
    ],
)
def test_any_sizes(dtype: str, target: str) -> None:
    model = moved(dtype, ("b", "m", "n"), target)
    for shape in SHAPES:
        check(model, dtype, shape)


@pytest.mark.parametrize("shape", [(2, 70, 5), (3, 3, 33)])
def test_static_sizes(shape: tuple[int, int, int]) -> None:
    """Tiles that fit the shorter axis."""
    check(moved("float32", shape, "cpu"), "float32", shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tiles_lie_on_the_stack(dtype: str, tmp_path: Path) -> None:
    """A heap allocation takes longer than the tile of a task."""
    moved(dtype, (2, 70, 96), "cpu").save(tmp_path / "model")
    assert b"TVMBackendAllocWorkspace" not in (tmp_path / "model" / "model.so").read_bytes()
