"""Mixtures of experts that are written out densely compute only the experts that are chosen.

Before, as exporters write it: every expert computes every token, and is weighted by 0 where a token did not choose it.

    sum over e of expert_e(x) * ReduceSum(weights * Cast(chosen == e), -1)     x [..., H], weights and chosen [..., k]

After: rows [R, H], k for each token, sorted by expert; one subgraph of all experts, in which a MatMul is a
GroupedMatMul and a bias that of the row's expert; then the sum over the k rows of each token.

The experts must be alike up to constants, and chosen by TopK among as many as there are. What an expert computes of a
token that did not choose it is never seen, not even where it is infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..fusion.matching import (
    Rewrite,
    array,
    attribute,
    dims,
    integers,
    is_op,
    number,
    numbers,
    only_reader,
    operand,
    pairs,
)
from ..fusion.opset import opset
from ..fusion.sizes import InferSizesPass
from .expert_rows import ExpertRows
from .gathered_matrices import choices, group_gathered_matmuls
from .legality import import_own_domain

_OPSET = 18  # from which on axes of ReduceSum and Split are what is written here


@dataclass(frozen=True)
class _Contribution:
    """expert_e(x) * weight: `output` is both multiplied, `computed` the result of the expert."""

    expert: int
    weights: ir.Value
    computed: ir.Value
    output: ir.Value


def group_experts(model: ir.Model) -> None:
    """Rewrite every dense mixture of experts of a fused model, and matrices that are gathered for rows."""
    if opset(model) < _OPSET or not any(is_op(node, "TopK") for node in model.graph):
        return
    InferSizesPass()(model)
    done = [_rewrite(model.graph, chosen) for chosen in _candidates(model.graph)]
    if group_gathered_matmuls(model.graph) or any(done):
        import_own_domain(model)
        common.RemoveUnusedNodesPass()(model)


def _candidates(graph: ir.Graph) -> list[ir.Value]:
    """Return what is compared with numbers of experts."""
    return list(dict.fromkeys(chosen for node in graph if (chosen := _compared(node)) is not None))


def _compared(node: ir.Node) -> ir.Value | None:
    if not is_op(node, "Equal"):
        return None
    return next((value for value, other in pairs(node) if number(other) is not None and number(value) is None), None)


def _rewrite(graph: ir.Graph, chosen: ir.Value) -> bool:
    """Rewrite the mixtures whose experts `chosen` chooses: several may share a router."""
    count, per_token = choices(chosen), numbers(dims(chosen)[-1:])
    if count is None or not per_token or per_token[0] >= count:
        return False
    terms = {term.output: term for term in _contributions(chosen)}
    sums = _sums_of(list(terms))
    done = [_rewrite_sum(total, [terms[part] for part in parts], chosen, count) for total, parts in sums.items()]
    return any(done)


def _rewrite_sum(total: ir.Value, terms: list[_Contribution], chosen: ir.Value, count: int) -> bool:
    first, tokens, per_token = terms[0], dims(chosen)[:-1], dims(chosen)[-1]
    if sorted(term.expert for term in terms) != list(range(count)) or dims(first.weights) != dims(chosen):
        return False
    if any(term.weights is not first.weights or dims(term.computed)[:-1] != tokens for term in terms):
        return False
    anchor = total.producer()
    if anchor is None or dims(total) != dims(first.computed) or not isinstance(per_token, int):
        return False
    rows = ExpertRows(Rewrite(anchor), chosen, per_token, count)
    computed = rows.merge(tuple(term.computed for term in sorted(terms, key=lambda term: term.expert)))
    if computed is None:
        return False
    rows.new.replace([anchor], total, rows.sum_per_token(computed, first.weights, total))
    return True


def _contributions(chosen: ir.Value) -> Iterator[_Contribution]:
    for node in [use.node for use in chosen.uses() if is_op(use.node, "Equal")]:
        expert = next((number(other) for value, other in pairs(node) if value is chosen), None)
        found = None if expert is None else _contribution(node)
        if expert is not None and expert.is_integer() and found is not None:
            yield _Contribution(int(expert), *found)


def _contribution(match: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return the weights, what an expert makes, and both multiplied, for Equal(chosen, expert)."""
    weighted = _weighted(match)
    reduced = only_reader(weighted[1], "ReduceSum") if weighted is not None else None
    if weighted is None or reduced is None:
        return None
    weights, masked = weighted
    rank = len(dims(masked))
    axes = integers(reduced, 1, "axes") if rank else None
    if axes is None or [axis % rank for axis in axes] != [rank - 1]:
        return None
    weight = reduced.outputs[0]
    if not attribute(reduced, "keepdims", 1):
        unsqueeze = only_reader(weight, "Unsqueeze")
        if unsqueeze is None or [axis % rank for axis in integers(unsqueeze, 1, "axes") or ()] != [rank - 1]:
            return None
        weight = unsqueeze.outputs[0]
    times = only_reader(weight, "Mul")
    if times is None:
        return None
    computed = next(value for value, other in pairs(times) if other is weight)
    return weights, computed, times.outputs[0]


def _weighted(match: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the weights and what is left of them where a choice matches: times the match, or by Where."""
    where = only_reader(match.outputs[0], "Where")
    if where is not None:
        return (operand(where, 1), where.outputs[0]) if number(operand(where, 2)) == 0 else None
    cast = only_reader(match.outputs[0], "Cast")
    times = only_reader(cast.outputs[0], "Mul") if cast is not None else None
    if cast is None or times is None:
        return None
    return next(value for value, other in pairs(times) if other is cast.outputs[0]), times.outputs[0]


def _sums_of(terms: list[ir.Value]) -> dict[ir.Value, list[ir.Value]]:
    """Return the values that are sums of these and nothing else, as far as sums go, with the terms of each."""
    parts = {term: [term] for term in terms}
    while True:
        adds = (only_reader(value, "Add", "Sum") for value in parts)
        add = next((add for add in adds if add is not None and _adds(add, parts)), None)
        if add is None:
            return parts
        added = [value for value in dict.fromkeys(add.inputs) if value is not None and value in parts]
        parts[add.outputs[0]] = [term for value in added for term in parts.pop(value)]


def _adds(add: ir.Node, parts: dict[ir.Value, list[ir.Value]]) -> bool:
    """Whether a sum is of parts, and of zeros that one may begin with."""
    others = [value for value in add.inputs if value not in parts]
    return all(value is not None and _is_zero(value) for value in others) and (
        len(others) == 0 or len(add.inputs) - len(others) == 1
    )


def _is_zero(value: ir.Value) -> bool:
    known = array(value)
    if known is not None:
        return not known.any()
    node = value.producer()
    if node is not None and is_op(node, "Expand"):
        return number(operand(node, 0)) == 0
    fill = attribute(node, "value", None) if node is not None and is_op(node, "ConstantOfShape") else None
    return is_op(node, "ConstantOfShape") and (fill is None or not np.asarray(fill.numpy()).any())
