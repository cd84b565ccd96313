"""Intermediate tensors share one block without overlapping, and memory does not grow with the sizes that were seen."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tvm import tirx
from tvm.sym import Analyzer

import lowering
from lowering.passes.memory.plan_memory import (
    PlannedTensor,
    Polynomial,
    SizePolynomials,
    add_polynomials,
    estimate_size,
    find_top,
    is_at_most,
    place_tensors,
)
from lowering.tensorir.expressions import substitute

B, S, P = (tirx.Var(name, "int64") for name in "BSP")


def terms() -> SizePolynomials:
    polynomials = SizePolynomials()
    polynomials.add_symbols((B, S, P))
    return polynomials


def tensor(polynomials: SizePolynomials, size: object, first: int, last: int) -> PlannedTensor:
    polynomial = polynomials.to_polynomial(size)
    assert polynomial is not None
    aligned = polynomials.align_up(polynomial)
    assert aligned is not None
    return PlannedTensor(first, last, polynomial, aligned)


def value(polynomials: SizePolynomials, polynomial: dict, sizes: dict) -> int:
    return int(Analyzer().simplify(substitute(polynomials.to_expression(polynomial), sizes)))


def draw_tensors(polynomials: SizePolynomials, rng: np.random.Generator) -> list[PlannedTensor]:
    """Tensors of all forms of sizes, whose lives overlap."""

    def constant(k: int) -> tirx.IntImm:
        return tirx.const(int(k), "int64")

    forms = [
        lambda c: constant(c),
        lambda c: B * S * constant(c),
        lambda c: B * (S + P) * constant(c),
        lambda c: B * S * (S + P) * constant(c),
        lambda c: tirx.min(S, 7) * constant(c),
        lambda c: tirx.max(S + P - 3, 0) * constant(c),
    ]
    tensors = []
    for _ in range(40):
        first = int(rng.integers(60))
        size = forms[rng.integers(len(forms))](rng.choice([1, 4, 24, 64, 256, 1000, 3072]))
        tensors.append(tensor(polynomials, size, first, first + int(rng.integers(1, 12))))
    return tensors


@pytest.mark.parametrize("seed", range(6))
def test_no_two_tensors_that_live_together_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    polynomials = terms()
    tensors = draw_tensors(polynomials, rng)
    place_tensors(tensors)
    total = find_top(tensors)
    for numbers in rng.integers(0, 40, (8, 3)):
        sizes = {s: tirx.const(int(n), "int64") for s, n in zip((B, S, P), np.maximum(numbers, (0, 1, 0)))}
        spans = []
        for t in tensors:
            begin = value(polynomials, t.offset, sizes)
            assert begin % 64 == 0 and begin >= 0
            spans.append((begin, begin + value(polynomials, t.size, sizes)))
            assert spans[-1][1] <= value(polynomials, total, sizes)
        for k, a in enumerate(tensors):
            for j, b in enumerate(tensors[:k]):
                together = a.first <= b.last and b.first <= a.last
                assert not together or spans[k][1] <= spans[j][0] or spans[j][1] <= spans[k][0]


@pytest.mark.parametrize("seed", range(6))
def test_every_tensor_lies_as_low_as_can_be_proved(seed: int) -> None:
    """Its offset is 0 or the end of another tensor that was planned before it, as in greedy by size."""
    tensors = draw_tensors(terms(), np.random.default_rng(seed))
    place_tensors(tensors)

    def is_disjoint(t: PlannedTensor, start: Polynomial, other: PlannedTensor) -> bool:
        assert other.offset is not None
        return other.ends_before(start) or is_at_most(add_polynomials(start, t.size), other.offset)

    planned: list[PlannedTensor] = []
    for t in sorted(tensors, key=lambda t: (-estimate_size(t.aligned_size), t.first)):
        neighbors = [o for o in planned if o.first <= t.last and t.first <= o.last]
        starts = [s for s in [{}, *(o.end() for o in neighbors)] if all(is_disjoint(t, s, o) for o in neighbors)]
        assert t.offset == (min(starts, key=estimate_size) if starts else find_top(neighbors))
        planned.append(t)


def test_a_thousand_tensors_at_once() -> None:
    polynomials = terms()
    tensors = [tensor(polynomials, B * S * 64, k, 1000) for k in range(1000)]
    place_tensors(tensors)
    assert find_top(tensors) == polynomials.to_polynomial(B * S * 64_000)
    assert len({tuple(sorted(t.offset.items())) for t in tensors if t.offset is not None}) == 1000


def test_numbers_that_are_no_sizes_do_not_wrap() -> None:
    polynomials = terms()
    tensors = [tensor(polynomials, B * tirx.const(1 << 62, "int64"), 0, 9) for _ in range(5)]
    place_tensors(tensors)
    assert find_top(tensors) == dict.fromkeys(tensors[0].size, 5 << 62)


def test_a_transformer_layer_takes_what_lives_at_once() -> None:
    """Four tensors of attention lie where the inner one of the feed-forward part lies later."""
    polynomials = terms()
    row = B * S * 1024
    tensors = [tensor(polynomials, row, 0, 9)]
    tensors += [tensor(polynomials, row, k, 4) for k in range(1, 4)]
    tensors += [
        tensor(polynomials, row * 4, 5, 7),
        tensor(polynomials, row, 7, 9),
        tensor(polynomials, B * S * 8, 1, 3),
    ]
    place_tensors(tensors)
    assert find_top(tensors) == polynomials.to_polynomial(row * 6)


def test_sizes_that_may_be_negative_are_not_planned() -> None:
    polynomials = terms()
    assert polynomials.to_polynomial(tirx.floordiv(S - 5, 2) * 4) is None
    below = polynomials.to_polynomial(S * 4 - 400)
    assert below is not None and polynomials.align_up(below) is None


def chain(rows: str = "n") -> onnx.ModelProto:
    """Eight softmaxes over alternating axes of x[n, 4096], each a kernel of its own."""
    x, y = (helper.make_tensor_value_info(k, TensorProto.FLOAT, [rows, 4096]) for k in "xy")
    names = ["x", *(f"t{k}" for k in range(7)), "y"]
    nodes = [helper.make_node("Softmax", [a], [b], axis=k % 2) for k, (a, b) in enumerate(pairwise(names))]
    graph = helper.make_graph(nodes, "chain", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_the_sizes_that_were_seen() -> None:
    module = lowering.compile(chain())
    largest = np.ones((160, 4096), "f")
    for _ in range(2):
        module.run({"x": largest})
    before = resident()
    for rows in range(1, 160):
        module.run({"x": largest[:rows]})
    # Less than one set of tensors for each power of two; by length they would be 160 times 80 rows.
    assert resident() - before < 6 * largest.nbytes
