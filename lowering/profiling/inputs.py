"""Synthetic inputs for a model, by what its manifest says of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import Manifest, TensorSpec
from ..runtime import Model
from ..runtime.checks import check_dimensions, check_fixed_dimensions, check_integer
from ..runtime.elements import ElementType


def add_derived(sizes: dict[str, int], derived: Mapping[str, Mapping[str, int]], default: int | None = None) -> None:
    """Add the sizes that are sums of others (Manifest.derived) and not there yet.

    default stands for sizes that are not there and are not sums; without one, sums of such stay away.
    """
    pending = {name: terms for name, terms in derived.items() if name not in sizes}
    while pending:
        known = {n: t for n, t in pending.items() if all(_has(sizes, k, pending, default) for k in t if k)}
        if not known:
            return
        for name, terms in known.items():
            size = sum(factor * (sizes.get(k, default or 0) if k else 1) for k, factor in terms.items())
            if size >= 0:
                sizes[name] = size
            del pending[name]


def _has(sizes: Mapping[str, int], name: str, pending: Mapping[str, object], default: int | None) -> bool:
    return name in sizes or (default is not None and name not in pending)


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


def synthetic_inputs(model: Model, sizes: Mapping[str, int], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return all inputs of a model: those that are given, and synthetic ones, in the memory where the model runs.

    Floating-point numbers are normally distributed, integers and bools are 1, so that masks show everything.

    Raises InputError where sizes are missing or not the model's.
    """
    given = given or {}
    known = run_sizes(model.manifest, sizes, given)
    rng = np.random.default_rng(0)
    free = {t.name: _input(t, model.manifest, known, rng) for t in model.inputs if t.name not in given}
    return {**given, **(free if model.gpu is None else {name: model.gpu.copy(array) for name, array in free.items()})}


def run_sizes(manifest: Manifest, said: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, int]:
    """Return all sizes that are needed: those said and those of the given arrays.

    Raises InputError where sizes are missing or not the model's.
    """
    sizes = {name: check_integer(n, f"the size of '{name}'", 0, 2**63 - 1) for name, n in said.items()}
    for spec in manifest.inputs:
        for dim, size in zip(spec.dims, getattr(given.get(spec.name), "shape", ())):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    add_derived(sizes, manifest.derived)
    free = [t for t in manifest.inputs if t.name not in given]
    needed = {d for t in free for d in t.dims if isinstance(d, str)}
    known = {d for t in manifest.inputs for d in t.dims if isinstance(d, str)}
    if manifest.slots is not None:
        known.add(manifest.slots.length)
        needed |= {t.name for t in free if t.name == manifest.slots.length}
    check_dimensions(sizes, known | manifest.ranges.keys())
    check_fixed_dimensions(sizes, manifest.ranges)
    follow = dict(sizes)
    add_derived(follow, manifest.derived, default=0)
    missing = sorted(needed - follow.keys())
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        options = " ".join(f"--dim {shlex.quote(f'{name}=8')}" for name in missing)
        raise InputError(f"the model's inputs have symbolic dimensions {names}: say how large, for instance {options}.")
    return sizes


def _input(spec: TensorSpec, manifest: Manifest, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    if manifest.slots is not None and spec.name == manifest.slots.length:
        return np.array(sizes[spec.name], np.int64)
    array = random_input(spec, sizes, rng)
    return np.ones_like(array) if spec.dtype == "bool" or is_integer(spec) else array
