"""Cache updates on GPUs: they write the rows and nothing else, for any type, size and indices."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

import lowering
from lowering.tensorir.scatter import CacheUpdate, make_copying_update, make_in_place_update
from schedules.cuda.cache.scatter import cache_update
from tests import cuda_emulation as emulated
from tests.cases.scatter_cases import Case, expected, random_bits, random_rows, same_bits

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})

UPDATES = {
    "rows of 16 bytes": CacheUpdate("float16", (None, 2, None, 8), None, 2),
    "bshd, circular": CacheUpdate("bfloat16", (None, None, 24), None, 1, circular=True),
    "rows of 8 bytes, static": CacheUpdate("float64", (2, 3, 5, 1), 2, 2),
    "rows of 3 bytes, no indices": CacheUpdate("bool", (None, None, 3), None, 1, indices=False),
    "rows of any size": CacheUpdate("float32", (None, 2, None, None), None, 2, circular=True),
    "the last axis": CacheUpdate("uint16", (None, 7, None), None, 2),
    "heads after rows": CacheUpdate("float16", (None, 3, None, 8), None, 2, rows_first=True),
    "complex128": CacheUpdate("uint64", (None, None, 3, 2), None, 1),
}
# Symbolic sizes of an update: batch, slots and other axes; rows of the update; write indices.
CALLS = [((2, 7, 6), 3, (1, 6)), ((3, 33, 4), 5, (-2, 30, 0)), ((1, 4, 5), 0, (0,)), ((0, 4, 4), 2, ())]
WRAPPED = [((2, 4, 4), 9, (3, -7)), ((1, 1, 3), 3, (1,))]  # more rows than slots: the last ones stay


@functools.cache
def kernels() -> emulated.Module:
    functions = {}
    for name, update in UPDATES.items():
        for form, function in (("copying", make_copying_update(update)), ("in_place", make_in_place_update(update))):
            functions[f"{form}_{list(UPDATES).index(name)}"] = cache_update(function, TARGET)[0].make()
    return emulated.module(functions, arch="sm_80")


def case(update: CacheUpdate, sizes: tuple[int, int, int], length: int, indices: tuple[int, ...]) -> Case:
    of_axis = {0: sizes[0], update.axis: sizes[1]}
    dims = tuple(of_axis.get(axis, sizes[2]) if d is None else d for axis, d in enumerate(update.dims))
    indices = (indices + (4,) * dims[0])[: dims[0]]
    return Case(update, dims, length if update.length is None else update.length, indices)


@pytest.mark.parametrize("name", UPDATES)
def test_writes_the_rows_and_nothing_else(name: str) -> None:
    update, number = UPDATES[name], list(UPDATES).index(name)
    rng = np.random.default_rng(number)
    for call in CALLS + WRAPPED * update.circular:
        drawn = case(update, *call)
        cache, rows = random_rows(rng, drawn)
        arguments = [cache, rows] + [np.array(drawn.indices, np.int64)] * update.indices
        want = expected(drawn, cache, rows)
        for order in ("ascending", "descending"):
            present = random_bits(rng, update.dtype, drawn.dims)
            *inputs, copied = kernels().call(f"copying_{number}", [*arguments, present], order=order)
            assert same_bits(copied, want)
            assert same_bits(inputs[0], cache)
            updated, read, *_ = kernels().call(f"in_place_{number}", arguments, order=order)
            assert same_bits(updated, want)
            assert same_bits(read, rows)


# Every axis of arrays of static sizes that are empty, or smaller than a chunk of a thread: dims, length, axis.
TINY = [
    ((5, 4), 0, 1), ((2, 1), 1, 1), ((2, 1), 0, 1), ((1, 3), 2, 1), ((0, 3), 1, 1), ((2, 0), 0, 1), ((2, 0), 1, 1),
    ((2, 1, 3), 1, 1), ((2, 3, 1), 1, 2), ((2, 1, 1), 1, 1), ((1, 2, 1), 2, 2), ((2, 3, 0), 1, 1), ((1, 0, 3), 1, 2),
    ((2, 3, 7, 5), 0, 2), ((1, 2, 3, 1), 2, 2), ((1, 1, 2, 3), 3, 3), ((1, 1, 1, 1), 1, 3),
]  # fmt: skip
TINY_TYPES = ("uint8", "int16", "float64", "float32", "float16")


def tiny_updates() -> list[CacheUpdate]:
    """Return updates of two types for each of the sizes above."""
    updates = []
    for number, (dims, length, axis) in enumerate(TINY):
        for k in (0, 2):
            dtype = TINY_TYPES[(number + k) % len(TINY_TYPES)]
            circular = bool((number + k // 2) % 2) and dims[axis] > 0
            updates.append(CacheUpdate(dtype, dims, length, axis, circular, indices=(number + k) % 3 > 0))
    return updates


@functools.cache
def tiny_kernels() -> emulated.Module:
    functions = {}
    for number, update in enumerate(tiny_updates()):
        for form, function in (("copying", make_copying_update(update)), ("in_place", make_in_place_update(update))):
            functions[f"{form}_{number}"] = cache_update(function, TARGET)[0].make()
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("number", range(2 * len(TINY)))
def test_tiny_and_empty_updates(number: int) -> None:
    """Static sizes of 0 or smaller than a chunk: TVM must not divide by them."""
    rng, update = np.random.default_rng(number), tiny_updates()[number]
    for indices in ((0, 0, 0, 0, 0), (1, -1, 2, 2, 2)):
        drawn = Case(update, update.dims, update.length, indices[: update.dims[0]])
        cache, rows = random_rows(rng, drawn)
        arguments = [cache, rows] + [np.array(drawn.indices, np.int64)] * update.indices
        want = expected(drawn, cache, rows)
        present = random_bits(rng, update.dtype, drawn.dims)
        *inputs, copied = tiny_kernels().call(f"copying_{number}", [*arguments, present])
        assert same_bits(copied, want)
        assert same_bits(inputs[0], cache)
        updated, read, *_ = tiny_kernels().call(f"in_place_{number}", arguments)
        assert same_bits(updated, want)
        assert same_bits(read, rows)


ALONE = """
<ir_version: 11, opset_import: ["" : 24]>
m (float[2, 0] a, float[2, 0] rows_a) => (float[2, 0] p) { p = TensorScatter <axis = 1> (a, rows_a) }
"""
TOGETHER = """
<ir_version: 11, opset_import: ["" : 24]>
m (float[2, 0] a, float[2, 0] rows_a, float[5, 4] b, float[5, 0] rows_b, float[2, 1] c, float[2, 1] rows_c)
=> (float[2, 0] p, float[5, 4] q, float[2, 1] r)
{
  p = TensorScatter <axis = 1> (a, rows_a)
  q = TensorScatter <axis = 1> (b, rows_b)
  r = TensorScatter <axis = 1> (c, rows_c)
}
"""
SHAPES = {"a": (2, 0), "rows_a": (2, 0), "b": (5, 4), "rows_b": (5, 0), "c": (2, 1), "rows_c": (2, 1)}


def run_model(text: str, folder: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a model in the emulation's process."""
    lowering.compile(onnx.parser.parse_model(text), "cuda:sm_90a").save(folder)
    return lowering.load(folder).run(arrays)


@pytest.mark.parametrize("text", [ALONE, TOGETHER])
def test_whole_models_of_tiny_and_empty_updates(text: str, tmp_path: Path) -> None:
    """The first one does not have a kernel at all."""
    rng = np.random.default_rng(0)
    inputs = [value.name for value in onnx.parser.parse_model(text).graph.input]
    arrays = {name: rng.standard_normal(SHAPES[name]).astype("float32") for name in inputs}
    results = emulated.run(run_model, text, str(tmp_path / "m"), arrays, arch="sm_90a")
    want = {"p": "a", "q": "b", "r": "rows_c"}
    assert len(results) == len(inputs) // 2
    for name, array in results.items():
        np.testing.assert_array_equal(array, arrays[want[name]])
