"""Synthetic inputs for a model, by its manifest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import Manifest, TensorSpec
from ..runtime import Model
from ..runtime.arrays.elements import ElementType
from ..runtime.artifact.checks import check_dimensions, check_fixed_dimensions, check_integer


def add_derived_sizes(
    sizes: dict[str, int], derived: Mapping[str, Mapping[str, int]], default: int | None = None
) -> None:
    """Add the sizes that are sums of others (Manifest.derived) and still missing.

    default stands for missing sizes that are not sums; without a default, sums that need them stay missing.
    """
    pending = {name: terms for name, terms in derived.items() if name not in sizes}
    while pending:
        computable = {n: t for n, t in pending.items() if all(_has(sizes, k, pending, default) for k in t if k)}
        if not computable:
            return
        for name, terms in computable.items():
            size = sum(factor * (sizes.get(k, default or 0) if k else 1) for k, factor in terms.items())
            if size >= 0:
                sizes[name] = size
            del pending[name]


def _has(sizes: Mapping[str, int], name: str, pending: Mapping[str, object], default: int | None) -> bool:
    return name in sizes or (default is not None and name not in pending)


def random_input(spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """Return a random array of the input's type; symbolic dimensions default to 4, and integers are 0 and 1."""
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


def synthetic_inputs(model: Model, sizes: Mapping[str, int], arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all inputs of a model: the given ones, and synthetic ones, in the memory where the model runs.

    Floating-point numbers are normally distributed, integers and bools are 1, so that masks hide nothing.

    Raises InputError if sizes are missing or not the model's.
    """
    arrays = arrays or {}
    resolved = resolve_sizes(model.manifest, sizes, arrays)
    rng = np.random.default_rng(0)
    synthetic = {t.name: _input(t, model.manifest, resolved, rng) for t in model.inputs if t.name not in arrays}
    return {
        **arrays,
        **(synthetic if model.gpu is None else {name: model.gpu.copy(array) for name, array in synthetic.items()}),
    }


def resolve_sizes(manifest: Manifest, explicit: Mapping[str, int], arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return all sizes that are needed: the explicit ones and those of the arrays.

    Raises InputError if sizes are missing or not the model's.
    """
    sizes = {name: check_integer(n, f"the size of '{name}'", 0, 2**63 - 1) for name, n in explicit.items()}
    for spec in manifest.inputs:
        for dim, size in zip(spec.dims, getattr(arrays.get(spec.name), "shape", ())):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    add_derived_sizes(sizes, manifest.derived)
    missing_inputs = [t for t in manifest.inputs if t.name not in arrays]
    needed = {d for t in missing_inputs for d in t.dims if isinstance(d, str)}
    symbols = {d for t in manifest.inputs for d in t.dims if isinstance(d, str)}
    if manifest.slots is not None:
        symbols.add(manifest.slots.length)
        needed |= {t.name for t in missing_inputs if t.name == manifest.slots.length}
    check_dimensions(sizes, symbols | manifest.ranges.keys())
    check_fixed_dimensions(sizes, manifest.ranges)
    derived = dict(sizes)
    add_derived_sizes(derived, manifest.derived, default=0)
    missing = sorted(needed - derived.keys())
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        options = " ".join(f"--dim {shlex.quote(f'{name}=8')}" for name in missing)
        raise InputError(
            "dims.size_missing",
            f"the model's inputs have symbolic dimensions {names}. Give their sizes, for instance {options}.",
        )
    return sizes


def _input(spec: TensorSpec, manifest: Manifest, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    if manifest.slots is not None and spec.name == manifest.slots.length:
        return np.array(sizes[spec.name], np.int64)
    array = random_input(spec, sizes, rng)
    return np.ones_like(array) if spec.dtype == "bool" or is_integer(spec) else array
