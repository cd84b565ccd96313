"""DFT and STFT against NumPy, for constant and symbolic sizes."""

from __future__ import annotations

import node_cases
import numpy as np
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import InputError, NodeError

from .expectations import model, value_info


@pytest.mark.parametrize("operator", ["DFT", "STFT"])
def test_cases_with_constants(operator: str) -> None:
    for case in node_cases.cases(operator):
        if not case.expanded:
            node_cases.run(node_cases.with_constants(case))


@pytest.mark.parametrize("parts, inverse, onesided", [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (2, 1, 1)])
@pytest.mark.parametrize("length", [None, 12])
def test_dft(parts: int, inverse: int, onesided: int, length: int | None) -> None:
    node = helper.make_node("DFT", ["x", "n" if length else "", "axis"], ["y"], inverse=inverse, onesided=onesided)
    constants = [numpy_helper.from_array(np.asarray(1), "axis"), numpy_helper.from_array(np.asarray(length or 0), "n")]
    dims = ["b", 8, "c", parts]
    proto = model([node], [value_info("x", "float32", dims)], [value_info("y", "float32", ["b", "k", "c", "p"])], 20,
                  constants)  # fmt: skip
    x = np.random.default_rng(0).standard_normal((2, 8, 3, parts)).astype(np.float32)
    found = np.asarray(lowering.compile(proto)(x=x)["y"])
    z = x[..., 0].astype(np.float64) if parts == 1 else x[..., 0].astype(np.float64) + 1j * x[..., 1]
    if inverse and onesided:
        want = np.fft.irfft(z, length or 14, axis=1)[..., None]
    else:
        made = np.fft.ifft(z, length, axis=1) if inverse else np.fft.fft(z, length, axis=1)
        made = made[:, : made.shape[1] // 2 + 1] if onesided else made
        want = np.stack([made.real, made.imag], axis=-1)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, atol=2e-5)


@pytest.mark.parametrize("rank, window", [(2, "hann"), (3, None), (3, "run time")])
def test_stft(rank: int, window: str | None) -> None:
    node = helper.make_node("STFT", ["x", "step", "w" if window else "", "" if window else "n"], ["y"])
    weights = np.hanning(16).astype(np.float32)
    constants = [numpy_helper.from_array(np.asarray(n), name) for name, n in (("step", 5), ("n", 16))]
    inputs = [value_info("x", "float32", ["b", "l", 1][:rank])]
    if window == "hann":
        constants.append(numpy_helper.from_array(weights, "w"))
    elif window:
        inputs.append(value_info("w", "float32", [16]))
    proto = model([node], inputs, [value_info("y", "float32", ["b", "f", "k", 2])], 17, constants)
    module, rng = lowering.compile(proto), np.random.default_rng(1)
    for length in (16, 20, 61):
        x = rng.standard_normal((2, length)).astype(np.float32)
        given = {"x": x if rank == 2 else x[..., None]} | ({"w": weights} if window == "run time" else {})
        frames = np.stack([x[:, at : at + 16] for at in range(0, length - 15, 5)], axis=1)
        made = np.fft.rfft(frames * (weights if window else 1), axis=2)
        found = np.asarray(module(**given)["y"])
        np.testing.assert_allclose(found, np.stack([made.real, made.imag], axis=-1), atol=2e-5)
    with pytest.raises(InputError, match="has no frame of 16"):
        module(**{**given, "x": given["x"][:, :15]})


def test_refusals() -> None:
    node = helper.make_node("DFT", ["x"], ["y"])
    proto = model([node], [value_info("x", "float32", ["b", 8, 3])], [value_info("y", "float32", ["b", 8, 2])], 20)
    with pytest.raises(NodeError, match="1 part, the real one, or 2"):
        lowering.compile(proto)
