"""Small models to tune, and faulty candidates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm.script import tirx as T

from lowering.target import resolve
from lowering.tuning.build import compile_library

K, N = 96, 160


def matmul(rows: int | str = "n", seed: int = 0) -> onnx.ModelProto:
    """Return relu(x W + b), then a softmax."""
    rng = np.random.default_rng(seed)
    weights = {"W": rng.standard_normal((K, N)), "b": rng.standard_normal(N)}
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["m"], name="matmul"),
        helper.make_node("Add", ["m", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], name="softmax"),
    ]
    graph = helper.make_graph(
        nodes,
        "matmul",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, N])],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w, b = (numpy_helper.to_array(i).astype(np.float64) for i in model.graph.initializer)
    r = np.maximum(x.astype(np.float64) @ w + b, 0)
    e = np.exp(r - r.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


SIZE = 64

# Functions of x and y [64]: they should compute y = 2 x.


@T.prim_func
def right(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        y[i] = x[i] * T.float32(2)


@T.prim_func
def slow(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        y[i] = x[i] * T.float32(2)
    for _ in range(10000):  # each step needs the one before, and none changes y
        for i in range(64):
            y[i] = y[i] * T.float32(0.5) + x[i]


@T.prim_func
def wrong(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(63):
        y[i] = x[i] * T.float32(2)


@T.prim_func
def spoils_what_it_reads(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        y[i] = x[i] * T.float32(2)
        x[i] = T.float32(0)


@T.prim_func
def crashes(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        y[i + T.int64(1099511627776)] = x[i]


@T.prim_func
def hangs(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    while x[0] == x[0]:
        y[0] = y[0] + x[1]


@T.prim_func
def wants_memory(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    large = T.alloc_buffer((17179869184,), "float32")
    for i in range(64):
        large[i * 1048576] = x[i]
    for i in range(64):
        y[i] = large[i * 1048576] * T.float32(2)


def library(func: tvm.tirx.PrimFunc, folder: Path, name: str) -> Path:
    path = folder / f"{name}.so"
    path.write_bytes(compile_library(func, resolve("cpu")[0]))
    return path
