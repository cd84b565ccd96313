"""A hundred thousand calls of one compiled model, whose lengths change from call to call: memory stays what it is."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import lowering

SAMPLE = Path(__file__).parents[1] / "exports" / "samples" / "llama-past-dynamo23" / "model.onnx"
CALLS = (1_000, 10_000, 100_000)
# Bytes that may come after the first thousand calls: eleven for each of the others would be more.
GROWTH = 1 << 20


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["run", "bind", "submit"])
def test_memory_of_many_calls(way: str) -> None:
    """Every length up to 64 is seen before the first figure; results of equal inputs stay equal."""
    model, rng = lowering.compile(SAMPLE, threads=1), np.random.default_rng(0)
    calls = [feeds(model, length, rng) for length in range(1, 65)]
    expected = [model.run(inputs) for inputs in calls]
    first, done, figures = model.outputs[0].name, 0, []
    for count in CALLS:
        while done < count:
            k = int(rng.integers(len(calls)))
            outputs = called(model, way, calls[k])
            if done % 100 == 0:
                np.testing.assert_array_equal(outputs[first], expected[k][first])
            del outputs
            done += 1
        figures.append(resident())
        print(f"{way} {count}: {figures[-1] / 2**20:.2f} MiB")
    assert figures[-1] - figures[0] < GROWTH, figures


def called(model: lowering.Model, way: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if way == "run":
        return model.run(inputs)
    return model.bind(inputs)() if way == "bind" else model.submit(inputs).result()


def feeds(model: lowering.Model, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw rows of tokens after others that are in a cache."""
    rows, past = 1 + length % 2, int(rng.integers(0, 40))
    sizes = {"batch": rows, "tokens": length, "past": past, "total": past + length}
    arrays = {}
    for spec in model.inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims]
        drawn = rng.standard_normal(shape) if spec.dtype == "float32" else np.ones(shape)
        arrays[spec.name] = drawn.astype(spec.dtype)
    return arrays
