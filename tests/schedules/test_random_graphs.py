"""Random graphs under the rules of the CPU: fused, transposed, sliced and reduced in every combination."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lowering
from tests.schedules.random_graphs import Graph

# Rounding of one step relative to the largest value, with room for steps that enlarge an error: norms of nearly equal
# channels do so tenfold.
TOLERANCE = {"float64": 1e-13, "float32": 5e-5, "float16": 5e-2, "bfloat16": 3e-1}
SIZES = [(1, 1), (2, 7), (3, 33), (1, 130), (5, 16), (1, 1000)]

LIMITS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would compile for hours
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    return Graph(draw, draw(st.sampled_from(["float32", *TOLERANCE])), draw(st.integers(1, 8)))


def check(graph: Graph, target: str, sizes: list[tuple[int, int]]) -> None:
    if not graph.outputs:
        return
    model = lowering.compile(graph.model(), target=target)
    for b, n in sizes:
        feeds = graph.feeds(b, n)
        expected, actual = graph.evaluate(feeds), model.run(feeds)
        for name in graph.outputs:
            assert actual[name].shape == expected[name].shape
            error = np.abs(actual[name].astype(float) - expected[name])
            assert (error <= TOLERANCE[graph.dtype] * max(1, np.abs(expected[name]).max())).all(), (name, error.max())


@given(graphs(), st.sampled_from(["cpu", "cpu:x86-64-v3"]), st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
@settings(LIMITS, max_examples=10)
def test_random_graphs(graph: Graph, target: str, sizes: list[tuple[int, int]]) -> None:
    check(graph, target, sizes)


@pytest.mark.slow
@given(graphs(), st.sampled_from(["cpu", "cpu:x86-64-v3"]), st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
@settings(LIMITS, max_examples=int(os.environ.get("RANDOM_GRAPHS", "300")))
def test_many_random_graphs(graph: Graph, target: str, sizes: list[tuple[int, int]]) -> None:
    check(graph, target, sizes)
