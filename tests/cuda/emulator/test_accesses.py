"""The emulator counts the banks and sectors that warps access, and notices parameters that alias."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import cuda_emulation as emulated
from tests.cuda_emulation import Access, EmulationError, Pointer

pytestmark = pytest.mark.no_gpu

launch = partial(emulated.launch, Path(__file__).with_name("accesses.cu").read_text())
LINE = np.zeros(32 * 32, "float32")


def counted(kernel: str, *arguments: Any) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    """Return requests, and minimal and actual wavefronts or sectors, by memory, kind and bytes of a lane."""
    with emulated.counting() as accesses:
        launch(kernel, [1], [32], arguments)
    return {(a.memory, a.kind, a.bytes): (a.requests, a.least, a.taken) for a in accesses}


@pytest.mark.parametrize(("stride", "wavefronts"), [(0, 1), (1, 1), (2, 2), (3, 1), (32, 32), (33, 1)])
def test_scalars_of_shared_memory(stride: int, wavefronts: int) -> None:
    accesses = counted("scalars", LINE, np.int32(stride))
    assert accesses["shared", "write", 4] == accesses["shared", "read", 4] == (1, 1, wavefronts)


@pytest.mark.parametrize(("stride", "by_8", "by_16"), [(0, 2, 4), (1, 2, 4), (2, 4, 8), (8, 16, 32)])
def test_vectors_go_by_halves_and_quarters_of_a_warp(stride: int, by_8: int, by_16: int) -> None:
    accesses = counted("vectors", LINE, LINE, np.int32(stride))
    assert accesses["shared", "read", 8] == (1, 2, by_8) and accesses["shared", "read", 16] == (1, 4, by_16)
    assert accesses["global", "write", 8] == (1, 8, 8) and accesses["global", "write", 16] == (1, 16, 16)


def test_lanes_share_banks() -> None:
    accesses = counted("small", LINE.astype("uint16"))
    assert accesses["shared", "write", 2] == accesses["shared", "read", 2] == (1, 1, 1)
    assert accesses["global", "write", 2] == (1, 2, 2)


@pytest.mark.parametrize(("stride", "wavefronts"), [(8, 4), (64, 32), (72, 4), (16, 8)])
def test_ldmatrix_and_asynchronous_copies(stride: int, wavefronts: int) -> None:
    accesses = counted("matrices", LINE, LINE, np.int32(stride), np.int32(1))
    assert accesses["shared", "read", 16] == accesses["shared", "write", 16] == (1, 4, wavefronts)
    assert accesses["global", "read", 16] == (1, 16, 16)


@pytest.mark.parametrize(
    ("offset", "stride", "lanes", "least", "sectors"),
    [(0, 1, 32, 4, 4), (4, 1, 32, 4, 5), (0, 0, 32, 1, 1), (0, 2, 32, 4, 8), (0, 8, 32, 4, 32), (0, 1, 16, 2, 2)],
)
def test_sectors_of_device_memory(offset: int, stride: int, lanes: int, least: int, sectors: int) -> None:
    """Three requests, in which masked lanes do not count. A vector access by PTX is one access."""
    counts = counted("gathered", Pointer(4, offset), LINE, np.int32(stride), np.int32(lanes), LINE)
    assert counts["global", "read", 4] == (3, 3 * least, 3 * sectors) and counts["global", "write", 16] == (1, 16, 16)


def test_lines_are_named_and_nothing_is_counted_unasked() -> None:
    with emulated.counting() as accesses:
        launch("small", [3], [32], [LINE.astype("uint16")])
    assert {(a.source, a.requests) for a in accesses} == {
        ("s[threadIdx.x] = threadIdx.x;", 3),
        ("y[threadIdx.x] = s[5];", 3),
    }
    before = list(accesses)
    launch("small", [1], [32], [LINE.astype("uint16")])
    assert accesses == before
    assert emulated.factor([Access("k", "shared", "read", 4, 1, "", 1, 2, 6), *accesses[:1]]) == (6 + 3) / (2 + 3)


# ---- __restrict__

X = np.arange(96, dtype="float32")
INTO_X = Pointer(0)


def shifted(kernel: str, *arguments: Any, reads: int, writes: int, order: emulated.Order = "ascending") -> np.ndarray:
    return launch(kernel, [1], [32], [*arguments, np.int32(reads), np.int32(writes)], order=order)[0]


def test_parameters_that_alias_are_reported() -> None:
    said = "aliasing: {} through the __restrict__ parameter {} .* of an allocation of 384.* {} through {} "
    with pytest.raises(EmulationError, match=said.format("read", "x", "written", "y")):
        shifted("restricted", X, INTO_X, reads=0, writes=16)
    with pytest.raises(EmulationError, match=said.format("write", "y", "read", "x")):
        shifted("restricted", X, INTO_X, reads=0, writes=16, order="descending")
    with pytest.raises(EmulationError, match=r"y \(byte 124 of"):
        shifted("restricted", X, Pointer(0, 124), reads=0, writes=0, order="descending")


def test_slices_of_one_allocation_do_not_alias() -> None:
    """Parameters without a promise may alias, too."""
    want = np.concatenate([X[:32], X[:32] + 1, X[64:]])
    np.testing.assert_array_equal(shifted("restricted", X, INTO_X, reads=0, writes=32), want)
    np.testing.assert_array_equal(shifted("restricted", X, Pointer(0, 128), reads=0, writes=0), want)
    np.testing.assert_array_equal(shifted("unrestricted", X, INTO_X, reads=0, writes=0)[:32], X[:32] + 1)
