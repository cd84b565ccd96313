"""com.microsoft GatherBlockQuantized compared with onnxruntime: types, bits, axes, blocks, and indices out of range."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering

from ..expectations import value_info
from .comparison import opsets

RNG = np.random.default_rng(0)


def pack_rows(quantized: np.ndarray, bits: int) -> np.ndarray:
    """Pack quantized values along the last axis into bytes, lowest bits first."""
    lane_count = 8 // bits
    width = -(-quantized.shape[-1] // lane_count) * lane_count
    padded = np.zeros((*quantized.shape[:-1], width), np.uint8)
    padded[..., : quantized.shape[-1]] = quantized
    lanes = padded.reshape(*quantized.shape[:-1], -1, lane_count)
    return (lanes << (np.arange(lane_count, dtype=np.uint8) * bits)).sum(axis=-1).astype(np.uint8)


def make_model(data: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, **attributes: Any) -> onnx.ModelProto:
    names = ["data", "indices", "scales", *([] if zeros is None else ["zeros"])]
    node = helper.make_node("GatherBlockQuantized", names, ["y"], domain="com.microsoft", name="rows", **attributes)
    constants = {"data": data, "scales": scales, **({} if zeros is None else {"zeros": zeros})}
    rank = data.ndim + 1
    graph = helper.make_graph(
        [node], "g", [value_info("indices", "int64", ["a", "b"])],
        [value_info("y", scales.dtype.name, [f"d{k}" for k in range(rank)])],
        [numpy_helper.from_array(x, n) for n, x in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


def check_equal(proto: onnx.ModelProto, indices: np.ndarray) -> None:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"indices": indices})
    got = lowering.compile(proto).run({"indices": indices})["y"]
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-3, atol=0)


INDICES = np.array([[0, 5, -1], [36, -37, 2]])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_of_bytes(bits: int, dtype: str, zeros: bool) -> None:
    """70 elements of a row are five blocks of 16; the last block is incomplete."""
    quantized = RNG.integers(0, 2**bits, (37, 70))
    scales = RNG.uniform(0.01, 0.1, (37, 5)).astype(dtype)
    points = pack_rows(RNG.integers(0, 2**bits, (37, 5)), bits) if zeros else None
    check_equal(
        make_model(pack_rows(quantized, bits), scales, points, bits=bits, block_size=16, quantize_axis=1), INDICES
    )


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize(("gather", "quantize"), [(0, 1), (1, 0), (0, -1), (1, 1)])
def test_types_of_four_bits(kind: str, gather: int, quantize: int) -> None:
    low = -8 if kind == "int4" else 0
    shape = (37, 64) if gather == 0 else (64, 37)
    blocks = [-(-n // 16) if k == quantize % 2 else n for k, n in enumerate(shape)]
    quantized, points = (RNG.integers(low, low + 16, s).astype(getattr(ml_dtypes, kind)) for s in (shape, blocks))
    scales = RNG.uniform(0.01, 0.1, blocks).astype(np.float32)
    check_equal(
        make_model(quantized, scales, points, block_size=16, gather_axis=gather, quantize_axis=quantize), INDICES
    )


def test_indices_out_of_range_give_zeros() -> None:
    """As in the definition, for indices of any magnitude."""
    quantized = RNG.integers(0, 256, (37, 32)).astype(np.uint8)
    proto = make_model(quantized, np.ones((37, 2), np.float32), None, bits=8, block_size=16)
    indices = np.array([[37, -38, 1 << 40, -(1 << 62), 3]])
    y = lowering.compile(proto).run({"indices": indices})["y"]
    assert not y[0, :4].any()
    np.testing.assert_array_equal(y[0, 4], quantized[3].astype(np.float32) - 128)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"bits": 3}, "attribute bits is 3. Use 2, 4 or 8."),
        ({"block_size": 0}, "attribute block_size is 0."),
        ({"block_size": 32}, "input scales has shape [37, 2], and data consists of [37, 1] blocks of 32."),
        ({"gather_axis": 7}, "axis"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], what: str) -> None:
    quantized = RNG.integers(0, 256, (37, 32)).astype(np.uint8)
    proto = make_model(quantized, np.ones((37, 2), np.float32), None, **{"bits": 8, "block_size": 16, **change})
    with pytest.raises(lowering.NodeError, match=re.escape(what)) as error:
        lowering.compile(proto)
    assert "'rows'" in str(error.value)
