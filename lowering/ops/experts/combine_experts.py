"""CombineExperts: the weighted sum of each token's rows, at the positions that SortByExpert returns."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from tvm import ir

from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.compute import number, require_numbers, widen_dtype
from ..helpers.kernels import ElementReader, compute


@op("CombineExperts", since=1, domain=OWN_DOMAIN)
def combine_experts(node: Node, rows: Value, positions: Value, weights: Value) -> Value:
    """Combine rows [T * k, N] to [T, N]: row t is the sum over i of weights[t, i] * rows[positions[t * k + i]].

    weights is [T, k], positions int64 [T * k]. Accumulation is in float32, or in float64 for float64 rows.
    """
    require_numbers(node, rows)
    acc, per_token = widen_dtype(rows.dtype), number(node, "dimension 1 of the weights", weights.shape[1])

    def element(
        index: Sequence[ir.Expr], row: ElementReader, position: ElementReader, weight: ElementReader
    ) -> ir.Expr:
        token, column = index
        terms = (
            row(position(token * per_token + i), column).astype(acc) * weight(token, i).astype(acc)
            for i in range(per_token)
        )
        return functools.reduce(operator.add, terms).astype(rows.dtype)

    shape = (weights.shape[0], rows.shape[1])
    return compute(node, "combine_experts", element, [rows, positions, weights], shape)
