"""Which output takes over the memory of a donated input: the one that a chain of cache updates leads to.

Cache updates are TensorScatter, LinearAttention, attention operators of com.microsoft where the model declares one
shape for a cache before and behind it, and serving operators (written_inputs.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from ..errors import InputError
from .written_inputs import WRITES

_CACHES = {
    "GroupQueryAttention": {1: 3, 2: 4},
    "MultiHeadAttention": {1: 6, 2: 7},
    "DecoderMaskedMultiHeadAttention": {1: 5, 2: 6},
}
"""Operators of com.microsoft, and which of their outputs are which input behind the call."""


def donated_pairs(graph: ir.Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Input name -> output name for every input whose whole name matches one of the regular expressions.

    Raises InputError for a pattern that is no regular expression or matches no input, and for a matched input from
    which no chain of cache updates leads to an output.
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
                    f"input '{name}' cannot be donated: no chain of TensorScatter or LinearAttention nodes leads from "
                    "it to an output, nor of serving operators that give their cache out, nor of com.microsoft "
                    "attention nodes for which the model declares past and present with one shape, "
                    f"so no output can take over its memory. Narrow the donate pattern '{pattern}'."
                )
            pairs[name] = roots[name]
    return pairs


def _root(value: ir.Value) -> ir.Value | None:
    """The graph input that `value` updates: through the cache inputs of cache updates, and Identity."""
    updated = value
    while True:
        node = updated.producer()
        if node is None:
            return updated if updated is not value and updated.is_graph_input() else None
        source = _cache(node, updated)
        if source is None:
            return None
        updated = source


def _cache(node: ir.Node, output: ir.Value) -> ir.Value | None:
    """The input of the node whose memory that output can take over."""
    if node.domain in ("", "ai.onnx") and node.op_type in ("TensorScatter", "Identity"):
        return node.inputs[0]
    if node.op_type == "LinearAttention" and node.outputs.index(output) == 1:
        return node.inputs[3] if len(node.inputs) > 3 else None
    for write in WRITES.get((node.domain, node.op_type), ()):
        if write.output == node.outputs.index(output):
            return write.input_of(node)
    if node.domain == "com.microsoft" and node.op_type in _CACHES:
        place = _CACHES[node.op_type].get(node.outputs.index(output))
        past = node.inputs[place] if place is not None and place < len(node.inputs) else None
        return past if past is not None and declared_alike(past, output) else None
    return None


def declared_alike(one: ir.Value, other: ir.Value) -> bool:
    """Whether the model declares both values with one shape, of numbers and names."""
    if one.shape is None or other.shape is None:
        return False
    return list(one.shape) == list(other.shape) and all(isinstance(d, int) or d.value for d in one.shape)
