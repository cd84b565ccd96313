"""Inputs made up for a model, by what its manifest says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ..manifest import TensorSpec
from ..runtime.elements import ElementType


def random_input(spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """An array of the input's type; symbolic dimensions are 4 unless `sizes` says otherwise. Integers are 0 and 1."""
    shape = [d if isinstance(d, int) else sizes.get(d, 4) for d in spec.dims]
    if spec.dtype == "string":
        return rng.choice(np.array(["a", "b", "c"], dtype=object), shape)
    if spec.dtype == "bool":
        return rng.random(shape) < 0.5
    dtype = ElementType(spec.dtype, spec.storage).numpy
    if is_integer(spec):
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def is_integer(spec: TensorSpec) -> bool:
    return re.match(r"u?int", spec.dtype) is not None
