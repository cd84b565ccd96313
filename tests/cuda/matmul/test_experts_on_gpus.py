"""Mixtures of experts on GPUs: the GPU sorts rows, and multiplies them by the matrices of their experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from tests import cuda_emulation as emulated
from tests.cuda.audits.early_launch import faults
from tests.cuda.audits.matmul_code import machine_code_of

EXPERTS, WIDTH, INNER = 4, 64, 32


def model(dtype: str) -> onnx.ModelProto:
    rng, kind = np.random.default_rng(3), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"fc1": (EXPERTS, 2 * INNER, WIDTH), "b1": (EXPERTS, 2 * INNER), "fc2": (EXPERTS, WIDTH, INNER)}
    arrays = {name: (rng.standard_normal(shape) / 6).astype(dtype) for name, shape in shapes.items()}
    node = helper.make_node(
        "MoE", ["x", "router", "fc1", "b1", "fc2"], ["y"], domain="com.microsoft", k=2, activation_type="swiglu",
        swiglu_fusion=1, normalize_routing_weights=1,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, kind, ["t", n]) for name, n in (("x", WIDTH), ("router", EXPERTS))]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    result = [helper.make_tensor_value_info("y", kind, ["t", WIDTH])]
    graph = helper.make_graph([node], "g", values, result, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def differences(dtype: str, weights: Any) -> list[float]:
    """Return differences from the CPU in the same types, relative to the largest result, by number of tokens."""
    compiled = [lowering.compile(model(dtype), target, weights=weights) for target in ("cuda:sm_90a", "cpu")]
    kernels = {kernel.schedule for kernel in compiled[0].manifest.kernels if "grouped_matmul" in kernel.name}
    assert kernels == {"ordinary" if dtype == "float32" else "matmul"}
    rng, errors = np.random.default_rng(4), []
    for tokens in (1, 19, 200):  # small batches go together, large ones by runs, by wide tiles where those are long
        feeds = {"x": rng.standard_normal((tokens, WIDTH)), "router": rng.standard_normal((tokens, EXPERTS))}
        gpu, cpu = (m.run({name: array.astype(dtype) for name, array in feeds.items()})["y"] for m in compiled)
        errors.append(float(np.abs(gpu.astype(np.float64) - cpu).max() / np.abs(cpu).max()))
    return errors


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "dtype, weights, bound", [("float16", None, 4e-3), ("float16", "int4", 4e-3), ("float32", None, 1e-5)]
)
def test_like_the_cpu(dtype: str, weights: Any, bound: float) -> None:
    assert np.max(emulated.run(differences, dtype, weights, arch="sm_90a", timeout=500)) < bound


def test_many_rows_are_multiplied_by_wgmma() -> None:
    """Each of the three grouped matmuls has a small-M kernel, and one for long runs and one for short ones."""
    _, functions = machine_code_of(model("float16"), "sm_90a")
    opcodes = [{line.opcode for line in f.instructions} for f in functions if "grouped_matmul" in f.name]
    assert len([used for used in opcodes if "HGMMA" in used]) == 6 and len(opcodes) == 9
    assert not set().union(*opcodes) & {"LDL", "STL"}


def test_tables_are_read_after_the_wait() -> None:
    """An earlier kernel may still be writing the matrix index of a row."""
    _, functions = machine_code_of(model("float16"), "sm_90a")
    assert any("grouped_matmul" in function.name for function in functions)
    assert not [fault for function in functions for fault in faults(function)]
