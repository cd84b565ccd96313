"""Operators of OpenPPL for in-flight batching of requests.

Their domain is opmx.dynamic_batching, or pmx.dynamic_batching in older exporters. Their semantics are those of
https://github.com/openppl-public/ppl.pmx (docs/operators/dynamic_batching, torch_function). Queries, keys and values of
all requests are packed, one request after the other. There is one file per operator.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import Lowering, op

DOMAINS = ("opmx.dynamic_batching", "pmx.dynamic_batching")


def ppl_op(name: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering of the operator `name` in both domains."""

    def register(function: Lowering) -> Lowering:
        for domain in DOMAINS:
            op(name, since=1, domain=domain)(function)
        return function

    return register
