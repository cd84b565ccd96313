"""NaNs on the emulated GPU: arithmetic and conversions make the canonical ones of hardware, and moves keep all bits.

Hardware is represented by CUDA's own headers on a host (cuda_fp16.hpp, __internal_float2half and
__internal_half2float; cuda_bf16.hpp, __internal_float2bfloat16; cuda_fp8.hpp). An H200 gave the same.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from tests import cuda_emulation as emulated

THREADS = 256
launch = partial(emulated.launch, Path(__file__).with_name("nans.cu").read_text())

ALL_16 = np.arange(1 << 16, dtype="uint16")
FLOAT16, BFLOAT16 = ALL_16.view("float16"), ALL_16.view(ml_dtypes.bfloat16)


def floats() -> np.ndarray:
    """Return random bits, infinities, zeros and NaNs of both signs, signaling ones among them."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 12, dtype="uint32")
    bits[::3] |= 0x7F800000
    special = [0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    bits[: len(special)] = special
    return bits.view("float32")


def run(kernel: str, *arrays: np.ndarray) -> list[np.ndarray]:
    return launch(kernel, [arrays[0].size // THREADS], [THREADS], list(arrays))


def canonical(numbers: np.ndarray, is_nan: np.ndarray, nan: int) -> np.ndarray:
    bits = numbers.view(f"uint{8 * numbers.itemsize}").copy()
    bits[is_nan] = nan
    return bits


def like(x: np.ndarray, dtype: object) -> np.ndarray:
    return np.zeros(x.size, np.dtype(dtype))


def test_narrowing_gives_the_canonical_nan() -> None:
    x = floats()
    results = run("narrowed", x, like(x, "float16"), like(x, ml_dtypes.bfloat16), like(x, "uint32"))[1:]
    with np.errstate(over="ignore", invalid="ignore"):
        half, brain = (canonical(x.astype(t), np.isnan(x), 0x7FFF) for t in ("float16", ml_dtypes.bfloat16))
    np.testing.assert_array_equal(results[0].view("uint16"), half)
    np.testing.assert_array_equal(results[1].view("uint16"), brain)
    np.testing.assert_array_equal(results[2], half * np.uint32(0x10001))


def test_widening_float16_gives_the_canonical_nan_and_bfloat16_keeps_it() -> None:
    of_half, of_brain = run("widened", FLOAT16, BFLOAT16, like(ALL_16, "float32"), like(ALL_16, "float32"))[2:]
    with np.errstate(invalid="ignore"):
        numbers = FLOAT16.astype("float32")
    np.testing.assert_array_equal(of_half.view("uint32"), canonical(numbers, np.isnan(FLOAT16), 0x7FFFFFFF))
    np.testing.assert_array_equal(of_brain.view("uint32"), ALL_16.astype("uint32") << 16)


def test_arithmetic_gives_the_canonical_nan() -> None:
    x = np.resize(floats(), ALL_16.size)
    outputs = [like(ALL_16, t) for t in ("float16", ml_dtypes.bfloat16, "float32", "float32")]
    results = run("computed", FLOAT16, BFLOAT16, x, *outputs)[3:]
    for source, result, nan in zip((FLOAT16, BFLOAT16, x, x), results, (0x7FFF, 0x7FFF, 0x7FFFFFFF, 0x7FFFFFFF)):
        bits = result.view(f"uint{8 * result.itemsize}")
        assert np.isnan(source).any() and (bits[np.isnan(source)] == nan).all()


def test_float8_gives_the_canonical_nan() -> None:
    encodings = np.arange(256, dtype="uint16")
    (halves,) = run("of_float8", encodings * np.uint16(0x101), like(encodings, "uint32"))[1:]
    numbers = encodings.astype("uint8").view(ml_dtypes.float8_e4m3fn)
    right = canonical(numbers.astype("float16"), np.isnan(numbers.astype("float32")), 0x7FFF)
    np.testing.assert_array_equal(halves, right * np.uint32(0x10001))


def test_moves_keep_all_bits() -> None:
    x = np.resize(floats(), ALL_16.size)
    outputs = [like(ALL_16, t) for t in ("float16", ml_dtypes.bfloat16, "float32")]
    for source, result in zip((FLOAT16, BFLOAT16, x), run("moved", FLOAT16, BFLOAT16, x, *outputs)[3:]):
        assert source.tobytes() == result.tobytes()
