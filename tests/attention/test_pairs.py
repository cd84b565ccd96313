"""The work of an attention equals a count over the reference's scores: random problems, masks and lengths."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tvm
from hypothesis import HealthCheck, example, given, settings

from lowering.attention.codegen.pairs import count_pairs
from lowering.attention.codegen.scores import HIDDEN_BIAS
from lowering.attention.record.cache_layout import Pages
from lowering.attention.record.problem import AttentionProblem
from lowering.attention.reference import compute_scores, read_dense_inputs
from lowering.passes.tvm_workarounds.guard_divisions import guard_divisions
from tests.cases.attention_cases import TARGET, Case, arrays, cases, draw_cases, outputs
from tests.support.placed_arrays import borrow


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(4))
@example(draw_cases(1519491422, 4))  # a mask of no columns, which masks nothing
def test_counts(calls: list[Case]) -> None:
    function = count_pairs(calls[0].problem).with_attr("global_symbol", "count_pairs")
    module = tvm.compile(guard_divisions(tvm.IRModule({"count_pairs": function})), target=TARGET)
    for case in calls:
        case = dataclasses.replace(case, poisoned=False)
        p, inputs = case.problem, arrays(case)
        operands = inputs | outputs(case, inputs)
        tensors = {name: x if isinstance(x, int) else borrow(x) for name, x in operands.items()}
        counts = np.full(2, -1)
        module["count_pairs"](*(tensors[name] for name in p.parameters()), borrow(counts))
        seen = bias(p, case, inputs) > HIDDEN_BIAS
        assert counts[0] == seen.sum()
        before_mask = bias(dataclasses.replace(p, mask=None), case, inputs) > HIDDEN_BIAS
        needed = before_mask.any(axis=(1, 2)).sum() * p.kv_heads
        assert counts[1] <= slots(p, inputs) * p.kv_heads
        if p.mask is None and p.window is None and case.q_len and not p.is_ragged:
            assert counts[1] == slots(p, inputs) * p.kv_heads - needed


def slots(p: AttentionProblem, inputs: dict[str, np.ndarray]) -> int:
    """Return how many keys the cache has room for."""
    shape = inputs["kv" if p.layout.is_joint else "k"].shape
    count = math.prod(size for axis, size in zip(p.layout.axes, shape) if axis in "btpl")
    return count // 2 if isinstance(p.layout.slots, Pages) and p.layout.slots.apart else count


def bias(p: AttentionProblem, case: Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return the bias of each score, -inf where a key is hidden: [B, Hq, S, T]."""
    return compute_scores(p, read_dense_inputs(p, inputs), inputs).bias
