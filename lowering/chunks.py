"""Work on large matrices by chunks of columns, on all CPUs: temporary arrays stay small, and in caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import numpy as np

_ELEMENTS = 1 << 19  # of a chunk

_Result = TypeVar("_Result")


def map_columns(compute: Callable[[slice], _Result], rows: int, columns: int, multiple: int = 1) -> list[_Result]:
    """Return compute(chunk) for successive chunks of the columns of a matrix, in order.

    Chunks but the last are a multiple of `multiple` columns wide.
    """
    width = max(_ELEMENTS // max(rows, 1) // multiple, 1) * multiple
    chunks = [slice(first, min(first + width, columns)) for first in range(0, columns, width)]
    if len(chunks) < 2:
        return list(map(compute, chunks))
    context = copy_context()  # the caller's np.errstate
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(chunks))) as executor:
        return list(executor.map(lambda chunk: context.copy().run(compute, chunk), chunks))


def measure_error(exact: np.ndarray, rounded: np.ndarray) -> tuple[float, float]:
    """Return the sums of squares of the errors of a matrix, and of its elements; not finite if an element is not."""
    exact = exact.astype(np.float64)
    errors = rounded - exact
    # A matmul of BLAS would start threads of its own.
    return float(np.einsum("ij,ij->", errors, errors)), float(np.einsum("ij,ij->", exact, exact))
