"""Rewrite of dense mixtures of experts, so that only the chosen experts are computed.

Before, as exporters write it: every expert computes every token, with the weight 0 if the token did not choose it.

    sum over e of expert_e(x) * ReduceSum(weights * Cast(chosen == e), -1)     x [..., H], weights and chosen [..., k]

After: rows [R, H], k for each token, sorted by expert; one subgraph for all experts, in which a MatMul is a
GroupedMatMul and a bias that of the row's expert; then the sum over the k rows of each token.

The experts must be equal up to constants, and chosen by TopK among as many as there are. The result of an expert for a
token that did not choose it is never used, not even if it is infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..loading.legality import import_own_domain
from ..rewriting.matching import (
    Rewrite,
    attribute,
    dims,
    is_op,
    only_reader,
    operand,
    operand_orders,
    read_array,
    read_integers,
    read_number,
    read_static_sizes,
)
from ..rewriting.opset import opset
from ..rewriting.sizes import InferSizesPass
from .expert_rows import ExpertRows
from .gathered_matrices import count_choices, group_gathered_matmuls

_MIN_OPSET = 18  # from which on axes of ReduceSum and num_outputs of Split have the form matched here


@dataclass(frozen=True)
class _Contribution:
    """expert_e(x) * weight: `output` is the product, `computed` the result of the expert."""

    expert: int
    weights: ir.Value
    computed: ir.Value
    output: ir.Value


def group_experts(model: ir.Model) -> None:
    """Rewrite every dense mixture of experts of a fused model, and matmuls of matrices gathered for rows."""
    if opset(model) < _MIN_OPSET or not any(is_op(node, "TopK") for node in model.graph):
        return
    InferSizesPass()(model)
    rewritten = [_rewrite(model.graph, chosen) for chosen in _find_candidates(model.graph)]
    if group_gathered_matmuls(model.graph) or any(rewritten):
        import_own_domain(model)
        common.RemoveUnusedNodesPass()(model)


def _find_candidates(graph: ir.Graph) -> list[ir.Value]:
    """Return the values that are compared with expert numbers."""
    return list(dict.fromkeys(chosen for node in graph if (chosen := _read_compared(node)) is not None))


def _read_compared(node: ir.Node) -> ir.Value | None:
    if not is_op(node, "Equal"):
        return None
    return next(
        (
            value
            for value, other in operand_orders(node)
            if read_number(other) is not None and read_number(value) is None
        ),
        None,
    )


def _rewrite(graph: ir.Graph, chosen: ir.Value) -> bool:
    """Rewrite the mixtures whose experts `chosen` selects: several may share a router."""
    count, per_token = count_choices(chosen), read_static_sizes(dims(chosen)[-1:])
    if count is None or not per_token or per_token[0] >= count:
        return False
    terms = {term.output: term for term in _find_contributions(chosen)}
    totals = _group_terms(list(terms))
    rewritten = [
        _rewrite_sum(total, [terms[output] for output in outputs], chosen, count) for total, outputs in totals.items()
    ]
    return any(rewritten)


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


def _find_contributions(chosen: ir.Value) -> Iterator[_Contribution]:
    for node in [use.node for use in chosen.uses() if is_op(use.node, "Equal")]:
        expert = next((read_number(other) for value, other in operand_orders(node) if value is chosen), None)
        contribution = None if expert is None else _match_contribution(node)
        if expert is not None and expert.is_integer() and contribution is not None:
            yield _Contribution(int(expert), *contribution)


def _match_contribution(match: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return the weights, the result of an expert, and their product, for Equal(chosen, expert)."""
    weighted = _match_weights(match)
    reduced = only_reader(weighted[1], "ReduceSum") if weighted is not None else None
    if weighted is None or reduced is None:
        return None
    weights, masked = weighted
    rank = len(dims(masked))
    axes = read_integers(reduced, 1, "axes") if rank else None
    if axes is None or [axis % rank for axis in axes] != [rank - 1]:
        return None
    weight = reduced.outputs[0]
    if not attribute(reduced, "keepdims", 1):
        unsqueeze = only_reader(weight, "Unsqueeze")
        if unsqueeze is None or [axis % rank for axis in read_integers(unsqueeze, 1, "axes") or ()] != [rank - 1]:
            return None
        weight = unsqueeze.outputs[0]
    times = only_reader(weight, "Mul")
    if times is None:
        return None
    computed = next(value for value, other in operand_orders(times) if other is weight)
    return weights, computed, times.outputs[0]


def _match_weights(match: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the weights, and the weights masked by a match, either times the match or by Where."""
    where = only_reader(match.outputs[0], "Where")
    if where is not None:
        return (operand(where, 1), where.outputs[0]) if read_number(operand(where, 2)) == 0 else None
    cast = only_reader(match.outputs[0], "Cast")
    times = only_reader(cast.outputs[0], "Mul") if cast is not None else None
    if cast is None or times is None:
        return None
    return next(value for value, other in operand_orders(times) if other is cast.outputs[0]), times.outputs[0]


def _group_terms(terms: list[ir.Value]) -> dict[ir.Value, list[ir.Value]]:
    """Return the maximal sums of these values and nothing else, with the terms of each."""
    terms_by_sum = {term: [term] for term in terms}
    while True:
        adds = (only_reader(value, "Add", "Sum") for value in terms_by_sum)
        add = next((add for add in adds if add is not None and _is_sum_of_terms(add, terms_by_sum)), None)
        if add is None:
            return terms_by_sum
        summands = [value for value in dict.fromkeys(add.inputs) if value is not None and value in terms_by_sum]
        terms_by_sum[add.outputs[0]] = [term for value in summands for term in terms_by_sum.pop(value)]


def _is_sum_of_terms(add: ir.Node, terms_by_sum: dict[ir.Value, list[ir.Value]]) -> bool:
    """Return whether a sum has only these terms, and zeros that a sum may begin with."""
    remaining = [value for value in add.inputs if value not in terms_by_sum]
    return all(value is not None and _is_zero(value) for value in remaining) and (
        len(remaining) == 0 or len(add.inputs) - len(remaining) == 1
    )


def _is_zero(value: ir.Value) -> bool:
    elements = read_array(value)
    if elements is not None:
        return not elements.any()
    node = value.producer()
    if node is not None and is_op(node, "Expand"):
        return read_number(operand(node, 0)) == 0
    fill = attribute(node, "value", None) if node is not None and is_op(node, "ConstantOfShape") else None
    return is_op(node, "ConstantOfShape") and (fill is None or not np.asarray(fill.numpy()).any())
