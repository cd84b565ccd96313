"""No barrier, wait or fence of the kernels for matmuls can be left out unnoticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.cuda.matmul.matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from schedules.cuda.matmul.small_m_tiles import SmallMTiles
from tests import cuda_emulation as emulated
from tests.cuda.matmul.test_matmul_on_gpus import Case, first_variant
from tests.cuda_emulation.mutations import survivors

pytestmark = pytest.mark.no_gpu

# By architecture, case and tiles: every loop goes round often enough to need all of its steps.
KERNELS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "mma": ("sm_80", Case(m=50, n=40, k=200), {"tiles": MatmulTiles(32, 32, 32, 2, 1, 3, split_steps=100)}),
    "rows": ("sm_80", Case(m=5, n=40, k=200, b_transposed=True), {"rows": SmallMTiles(2, 2)}),
    "wgmma": ("sm_90a", Case(m=70, n=264, k=400), {"tiles": WgmmaMatmulTiles(1, 64, 3, 160, 24, 2, 100, blocks=2)}),
}
# Behind what a warp stores of its last rows nobody waits.
REDUNDANT: dict[str, list[str]] = {"mma": ["cuda_warp_sync"], "rows": [], "wgmma": ["cuda_warp_sync"]}


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_can_be_left_out(name: str) -> None:
    arch, case, tiles = KERNELS[name]
    arrays, want = case.arrays({})

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=2e-3, atol=5e-2, equal_nan=True)

    module = emulated.module({"main": first_variant(case, arch).make(**tiles)}, arch=arch)
    assert [step.name for step in survivors(module, "main", arrays, right)] == REDUNDANT[name]
