"""Attention operators of com.microsoft over pages, beams and codes, on the emulated GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import cuda_emulation as emulated
import pytest

sys.path.append(str(Path(__file__).parents[2]))

TARGET = "cuda:sm_80"


def paged(number: int) -> None:
    from tests.ops.microsoft.test_paged_attention import check

    check(number, 2, TARGET)


def decoder(number: int) -> None:
    from tests.ops.microsoft.test_decoder_attention import check

    check(number, 2, TARGET)


def quantised(number: int) -> None:
    from tests.ops.microsoft.test_quantised_caches import check

    check(number, 2, TARGET)


@pytest.mark.parametrize(
    ("function", "number"),
    [
        *(pytest.param(paged, n, id=f"PagedAttention {n}") for n in (1, 2, 10)),
        *(pytest.param(decoder, n, id=f"beams {n}") for n in (0, 3)),
        *(pytest.param(quantised, n, id=f"codes {n}") for n in (0, 2)),
    ],
)
def test_equals_the_reference(function: Callable[..., None], number: int) -> None:
    emulated.run(function, number, arch="sm_80", timeout=500)
