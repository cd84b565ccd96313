"""DFT and STFT compared with NumPy, for constant and symbolic sizes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import InputError
from tests.cases import node_cases
from tests.ops.expectations import make_model, value_info
from tests.support.error_codes import raises


@pytest.mark.parametrize("operator", ["DFT", "STFT"])
def test_cases_with_constants(operator: str) -> None:
    for case in node_cases.cases(operator):
        if not case.expanded:
            node_cases.run(node_cases.with_constants(case))


@pytest.mark.parametrize("components, inverse, onesided", [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (2, 1, 1)])
@pytest.mark.parametrize("length", [None, 12])
def test_dft(components: int, inverse: int, onesided: int, length: int | None) -> None:
    node = helper.make_node("DFT", ["x", "n" if length else "", "axis"], ["y"], inverse=inverse, onesided=onesided)
    constants = [numpy_helper.from_array(np.asarray(1), "axis"), numpy_helper.from_array(np.asarray(length or 0), "n")]
    dims = ["b", 8, "c", components]
    proto = make_model([node], [value_info("x", "float32", dims)], [value_info("y", "float32", ["b", "k", "c", "p"])],
                       20, constants)  # fmt: skip
    x = np.random.default_rng(0).standard_normal((2, 8, 3, components)).astype(np.float32)
    actual = np.asarray(lowering.compile(proto)(x=x)["y"])
    z = x[..., 0].astype(np.float64) if components == 1 else x[..., 0].astype(np.float64) + 1j * x[..., 1]
    if inverse and onesided:
        expected = np.fft.irfft(z, length or 14, axis=1)[..., None]
    else:
        spectrum = np.fft.ifft(z, length, axis=1) if inverse else np.fft.fft(z, length, axis=1)
        spectrum = spectrum[:, : spectrum.shape[1] // 2 + 1] if onesided else spectrum
        expected = np.stack([spectrum.real, spectrum.imag], axis=-1)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=2e-5)


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
    proto = make_model([node], inputs, [value_info("y", "float32", ["b", "f", "k", 2])], 17, constants)
    module, rng = lowering.compile(proto), np.random.default_rng(1)
    for length in (16, 20, 61):
        x = rng.standard_normal((2, length)).astype(np.float32)
        feeds = {"x": x if rank == 2 else x[..., None]} | ({"w": weights} if window == "run time" else {})
        frames = np.stack([x[:, at : at + 16] for at in range(0, length - 15, 5)], axis=1)
        spectrum = np.fft.rfft(frames * (weights if window else 1), axis=2)
        actual = np.asarray(module(**feeds)["y"])
        np.testing.assert_allclose(actual, np.stack([spectrum.real, spectrum.imag], axis=-1), atol=2e-5)
    with raises("stft.signal_too_short"):
        module(**{**feeds, "x": feeds["x"][:, :15]})


def compute_dft(x: np.ndarray, axis: int, length: int | None, inverse: int, onesided: int) -> np.ndarray:
    z = x[..., 0].astype(np.float64) if x.shape[-1] == 1 else x[..., 0].astype(np.float64) + 1j * x[..., 1]
    if inverse and onesided:
        return np.fft.irfft(z, length, axis=axis)[..., None]
    if onesided:
        y = np.fft.fft(z, length, axis=axis)
        y = y.take(range(y.shape[axis] // 2 + 1), axis)
    else:
        y = (np.fft.ifft if inverse else np.fft.fft)(z, length, axis=axis)
    return np.stack([y.real, y.imag], axis=-1)


FORMS = [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (2, 1, 1), (1, 1, 0)]


OF_RUN = ("axis", "length", "size", "axis and length")


@pytest.mark.parametrize(
    "of_run, components, inverse, onesided",
    [(n, *form) for k, form in enumerate(FORMS) for j, n in enumerate(OF_RUN) if form == (2, 1, 1) or (k + j) % 2],
)
def test_dft_of_run(of_run: str, components: int, inverse: int, onesided: int) -> None:
    """Axes, lengths and sizes of the run."""
    names = ["x", "n" if "length" in of_run else "", "axis"]
    node = helper.make_node("DFT", names, ["y"], inverse=inverse, onesided=onesided)
    dims = ["b", "n0" if of_run == "size" else 6, "c", components]
    inputs, constants = [value_info("x", "float32", dims)], []
    for name in ("axis", "n"):
        if (name == "axis" and "axis" in of_run) or (name == "n" and "length" in of_run):
            inputs.append(value_info(name, "int64", []))
    if "axis" not in of_run:
        constants.append(numpy_helper.from_array(np.asarray(-3), "axis"))
    proto = make_model([node], inputs, [value_info("y", "float32", [f"y{k}" for k in range(4)])], 20, constants)
    module, rng = lowering.compile(proto), np.random.default_rng(4)
    for axis, length in ((1, 4), (-4, 9), (2, 3)) if "axis" in of_run else ((1, 4), (1, 9), (1, 1)):
        x = rng.standard_normal((2, 6 if of_run != "size" else length + 1, 5, components)).astype(np.float32)
        feeds = {"x": x, "axis": np.asarray(axis), "n": np.asarray(length)}
        actual = module.run({port.name: feeds[port.name] for port in module.inputs})["y"]
        expected = compute_dft(x, axis % 4, length if "length" in of_run else None, inverse, onesided)
        assert np.shape(actual) == expected.shape
        np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-5)
    hostile = {"axis": (3, -1, -5, 2**40), "n": (-1, 2**40)}
    for name in hostile.keys() & {port.name for port in module.inputs}:
        for number in hostile[name]:
            with pytest.raises(InputError):
                module.run({port.name: {**feeds, name: np.asarray(number)}[port.name] for port in module.inputs})


@pytest.mark.parametrize("run_time_inputs", ["step", "length", "both", "window"])
def test_stft_of_run(run_time_inputs: str) -> None:
    names = ["x", "step", "w" if run_time_inputs == "window" else "", "" if run_time_inputs == "window" else "n"]
    node = helper.make_node("STFT", names, ["y"])
    inputs, constants = [value_info("x", "float32", ["b", "l", 1])], []
    if run_time_inputs in ("step", "both"):
        inputs.append(value_info("step", "int64", []))
    else:
        constants.append(numpy_helper.from_array(np.asarray(5), "step"))
    if run_time_inputs in ("length", "both"):
        inputs.append(value_info("n", "int64", []))
    elif run_time_inputs == "window":
        inputs.append(value_info("w", "float32", ["n"]))
    else:
        constants.append(numpy_helper.from_array(np.asarray(16), "n"))
    module = lowering.compile(
        make_model([node], inputs, [value_info("y", "float32", ["b", "f", "k", 2])], 17, constants)
    )
    rng = np.random.default_rng(6)
    for size, step, length in ((40, 5, 16), (33, 3, 7), (16, 9, 16)):
        step, length = step if run_time_inputs in ("step", "both") else 5, 16 if run_time_inputs == "step" else length
        x, w = rng.standard_normal((2, size)).astype(np.float32), rng.random(length).astype(np.float32)
        frames = np.stack([x[:, at : at + length] for at in range(0, size - length + 1, step)], axis=1)
        spectrum = np.fft.rfft(frames * (w if run_time_inputs == "window" else 1), axis=2)
        feeds = {"x": x[..., None], "step": np.asarray(step), "n": np.asarray(length), "w": w}
        actual = module.run({port.name: feeds[port.name] for port in module.inputs})["y"]
        np.testing.assert_allclose(np.asarray(actual), np.stack([spectrum.real, spectrum.imag], axis=-1), atol=2e-5)
    hostile = {"step": (0, -3, -(2**62)), "n": (0, -1, 17, 2**50)}
    for name in hostile.keys() & {port.name for port in module.inputs}:
        for number in hostile[name]:
            with pytest.raises(InputError):
                module.run({port.name: {**feeds, name: np.asarray(number)}[port.name] for port in module.inputs})


def test_refusals() -> None:
    node = helper.make_node("DFT", ["x"], ["y"])
    proto = make_model([node], [value_info("x", "float32", ["b", 8, 3])], [value_info("y", "float32", ["b", 8, 2])], 20)
    with raises("node.components_unsupported"):
        lowering.compile(proto)
