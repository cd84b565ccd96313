"""Choice of the output that reuses the memory of a donated input: the end of its chain of cache updates.

Cache updates are TensorScatter, LinearAttention, attention operators of com.microsoft if the model declares one shape
for a cache before and after the call, and serving operators (written_inputs.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from ...errors import InputError
from ..loading.written_inputs import WRITES

_CACHES = {
    "GroupQueryAttention": {1: 3, 2: 4},
    "MultiHeadAttention": {1: 6, 2: 7},
    "DecoderMaskedMultiHeadAttention": {1: 5, 2: 6},
}
"""Operators of com.microsoft, with the cache input of each cache output."""


def find_donated_pairs(graph: ir.Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Return output name by input name for every input whose whole name matches a regular expression.

    Raises:
        InputError: A pattern is not a regular expression or matches no input, or no chain of cache updates leads from a
            matched input to an output.
    """
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    roots: dict[str, str] = {}
    for output in graph.outputs:
        root = _find_root(output)
        if root is not None and root.name is not None and output.name is not None:
            roots.setdefault(root.name, output.name)
    pairs: dict[str, str] = {}
    for pattern in patterns:
        try:
            matched = [v.name or "" for v in inputs if re.fullmatch(pattern, v.name or "")]
        except re.error as error:
            raise InputError(
                "donate.pattern_invalid", f"donate pattern '{pattern}' is not a regular expression: {error}."
            ) from error
        if not matched:
            names = ", ".join(v.name or "" for v in inputs)
            raise InputError(
                "donate.pattern_unmatched", f"donate pattern '{pattern}' matches no input. The inputs are: {names}."
            )
        for name in matched:
            if name not in roots:
                raise InputError(
                    "donate.output_missing",
                    f"input '{name}' cannot be donated, as no output can reuse its memory: no chain of TensorScatter "
                    "or LinearAttention nodes leads from it to an output, nor of serving operators that return "
                    "their cache, nor of com.microsoft attention nodes for which the model declares past and "
                    f"present with the same shape. Narrow the donate pattern '{pattern}'.",
                )
            pairs[name] = roots[name]
    return pairs


def _find_root(value: ir.Value) -> ir.Value | None:
    """Return the graph input that `value` updates: through the cache inputs of cache updates, and Identity."""
    updated = value
    while True:
        node = updated.producer()
        if node is None:
            return updated if updated is not value and updated.is_graph_input() else None
        source = _find_cache_input(node, updated)
        if source is None:
            return None
        updated = source


def _find_cache_input(node: ir.Node, output: ir.Value) -> ir.Value | None:
    """Return the input of the node whose memory that output can reuse."""
    if node.domain in ("", "ai.onnx") and node.op_type in ("TensorScatter", "Identity"):
        return node.inputs[0]
    if node.op_type == "LinearAttention" and node.outputs.index(output) == 1:
        return node.inputs[3] if len(node.inputs) > 3 else None
    for write in WRITES.get((node.domain, node.op_type), ()):
        if write.output == node.outputs.index(output):
            return write.find_input(node)
    if node.domain == "com.microsoft" and node.op_type in _CACHES:
        position = _CACHES[node.op_type].get(node.outputs.index(output))
        past = node.inputs[position] if position is not None and position < len(node.inputs) else None
        return past if past is not None and has_same_declared_shape(past, output) else None
    return None


def has_same_declared_shape(first: ir.Value, second: ir.Value) -> bool:
    """Return whether the model declares both values with one shape, of numbers and names."""
    if first.shape is None or second.shape is None:
        return False
    return list(first.shape) == list(second.shape) and all(isinstance(d, int) or d.value for d in first.shape)
