"""Which output takes over the memory of a donated input: the one that a chain of TensorScatter nodes leads to."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from .errors import InputError


def donated_pairs(graph: ir.Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Input name -> output name for every input whose whole name matches one of the regular expressions.

    Raises InputError for a pattern that is no regular expression or matches no input, and for a matched input from
    which no TensorScatter chain leads to an output.
    """
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    roots: dict[str, str] = {}
    for output in graph.outputs:
        root = _root(output)
        if root is not None and root.name is not None and output.name is not None:
            roots.setdefault(root.name, output.name)
    pairs: dict[str, str] = {}
    for pattern in patterns:
        try:
            matched = [v.name or "" for v in inputs if re.fullmatch(pattern, v.name or "")]
        except re.error as error:
            raise InputError(f"donate pattern '{pattern}' is no regular expression: {error}.") from error
        if not matched:
            names = ", ".join(v.name or "" for v in inputs)
            raise InputError(f"donate pattern '{pattern}' matches no input. The inputs are: {names}.")
        for name in matched:
            if name not in roots:
                raise InputError(
                    f"input '{name}' cannot be donated: no chain of TensorScatter nodes leads from it to an output, so "
                    f"no output can take over its memory. Narrow the donate pattern '{pattern}'."
                )
            pairs[name] = roots[name]
    return pairs


def _root(value: ir.Value) -> ir.Value | None:
    """The graph input that `value` updates: through the cache inputs of TensorScatter, and Identity."""
    node = value.producer()
    chained = False
    while node is not None:
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("TensorScatter", "Identity"):
            return None
        chained = True
        source = node.inputs[0]
        if source is None:
            return None
        value, node = source, source.producer()
    return value if chained and value.is_graph_input() else None
