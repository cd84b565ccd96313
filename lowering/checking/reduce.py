"""Reduction of a failing model to a minimal submodel (`verify --reduce`).

The reference's values of the whole model turn any set of nodes into a model. A value that it reads from outside becomes
an input, or a constant if it depends on no input or is shape arithmetic. The search has two phases. First bisection
finds the shortest failing prefix of the model: its last node is the offending one, or the last of those that are
compiled as one. Then nodes before it are removed, many at a time at first, as long as the rest fails (ddmin, Zeller and
Hildebrandt 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import onnx_ir as ir

from ..compiling import progress
from .references import Against, Feeds
from .submodels import EvaluatedModel, Submodel

FindFailingOutputs: TypeAlias = Callable[[ir.Model, Feeds], Collection[str]]
"""The failing outputs of a model for these arrays; none if it passes, or fails in another way."""

_MAX_SINGLE_OUTPUTS = 4  # outputs that are tried individually


def reduce_model(model: ir.Model, feeds: Feeds, against: Against, find_failing: FindFailingOutputs) -> Submodel | None:
    """Return the smallest failing submodel, or None if the whole model passes.

    `find_failing` returns the failing outputs of a model; feeds are the arrays by input name.

    Raises:
        LoweringError: The reference cannot run the model.
    """
    model_values = EvaluatedModel(model, feeds, against)
    prefix = model_values.extract_prefix(len(model_values.nodes))
    if not _find_failing(prefix, find_failing):
        return None
    passing, failing = 0, len(model_values.nodes)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        progress.report(f"reducing: {failing} of {len(model_values.nodes)} nodes fail")
        candidate = model_values.extract_prefix(middle)
        if _find_failing(candidate, find_failing):
            failing, prefix = middle, candidate
        else:
            passing = middle
    last_outputs = {value.name for value in model_values.nodes[failing - 1].outputs}
    names = sorted(_find_failing(prefix, find_failing), key=lambda name: name not in last_outputs)
    for name in names[:_MAX_SINGLE_OUTPUTS]:
        if _find_failing(candidate := model_values.extract_submodel(range(failing), [name]), find_failing):
            return None if candidate is None else _shrink(model_values, candidate, [name], find_failing)
    return None if prefix is None else _shrink(model_values, prefix, names, find_failing)


def _shrink(
    model_values: EvaluatedModel, candidate: Submodel, outputs: Sequence[str], find_failing: FindFailingOutputs
) -> Submodel:
    """Return the submodel without all nodes that the failure does not need."""
    count = max(1, len(candidate.nodes) // 2)
    while True:
        count_before, start = len(candidate.nodes), 0
        while start < len(candidate.nodes):
            progress.report(
                f"reducing: {len(candidate.nodes)} of {len(model_values.nodes)} nodes fail", start, len(candidate.nodes)
            )
            smaller = model_values.extract_submodel(
                (*candidate.nodes[:start], *candidate.nodes[start + count :]), outputs
            )
            if smaller is not None and _find_failing(smaller, find_failing):
                candidate = smaller
            else:
                start += count
        if count == 1 and len(candidate.nodes) == count_before:
            return candidate
        count = max(1, count // 2)


def _find_failing(candidate: Submodel | None, find_failing: FindFailingOutputs) -> Collection[str]:
    return () if candidate is None else find_failing(candidate.model, candidate.feeds)
