"""Gradients of flex_attention on the emulated GPU, against float64 on the CPU, checked by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests import cuda_emulation as emulated


def equals_the_cpu(name: str, dtype: str, arch: str) -> None:
    import ml_dtypes

    from tests.flex import test_gradients as cpu

    variant, sizes = cpu.VARIANTS[name], (2, 2, 4, 2, 9, 21, 40, 24)
    rng = np.random.default_rng(11)
    feeds = cpu._operands(rng, sizes) | variant.captures(rng, 2, 4, 9, 21)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    narrow = {n: x.astype(kind) if x.dtype == np.float64 else x for n, x in feeds.items()}
    exact = {n: x.astype(np.float64) if x.dtype == kind else x for n, x in narrow.items()}
    expected = cpu._gradients(cpu._module(variant, exact), exact)
    module = cpu._module(variant, narrow, target=f"cuda:{arch}")
    assert {kernel.schedule for kernel in module.gradient.manifest.kernels} >= {"gradient"}
    gradients_on_gpu = cpu._gradients(module, narrow)
    bound = {"float64": 1e-11, "float32": 3e-5}.get(dtype) or 4 * float(ml_dtypes.finfo(kind).eps)
    for operand, gradient in expected.items():
        assert gradients_on_gpu[operand].dtype == kind
        off = np.abs(gradients_on_gpu[operand].astype(np.float64) - gradient).max()
        assert off <= bound * np.abs(gradient).max(), operand


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    [
        ("plain", "float16", "sm_80"),
        ("soft cap and ALiBi", "float32", "sm_80"),
        ("by all, and a number", "float64", "sm_90a"),
        ("looked up", "bfloat16", "sm_90a"),
        ("rows that see nothing", "float32", "sm_90a"),
    ],
)
def test_equals_the_cpu(name: str, dtype: str, arch: str) -> None:
    emulated.run(equals_the_cpu, name, dtype, arch, arch=arch, timeout=500)
