"""Inputs made up for a model, by what its graph does with them: what it looks up is in the table that it looks into."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..manifest import TensorSpec
from ..profiling.inputs import is_integer, random_input

# Operators that hand on the elements of their first input.
_THROUGH = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}


def made_up(graph: ir.Graph, spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """An array for an input; symbolic dimensions are 4 unless `sizes` says otherwise.

    Floats are standard normal. Integers that index a table are of all its rows, or count up where the input is named
    for positions; an integer mask of batches hides up to half of the tokens of each, from the left as padding does.
    All other integers are 0 or 1, which are legal indices of what is not empty.
    """
    array = random_input(spec, sizes, rng)
    if not is_integer(spec) or array.size == 0:
        return array
    rows = _rows(graph).get(spec.name)
    if "position" in spec.name:
        count = np.arange(array.shape[-1] if array.ndim else 1, dtype=array.dtype)
        return np.ascontiguousarray(np.broadcast_to(np.minimum(count, (rows or len(count)) - 1), array.shape))
    if rows is not None:
        return rng.integers(0, rows, array.shape).astype(array.dtype)
    if "mask" in spec.name and array.ndim == 2:
        hidden = rng.integers(0, array.shape[1] // 2 + 1, array.shape[0])
        return (np.arange(array.shape[1]) >= hidden[:, None]).astype(array.dtype)
    return array


def _rows(graph: ir.Graph) -> dict[str, int]:
    """For inputs that index constant or computed tables of a known size the rows of the smallest one."""
    found: dict[str, int] = {}
    for node in graph:
        for indices, table, axis in _lookups(node):
            name = _origin(indices)
            size = None if table is None or table.shape is None else table.shape[axis]
            if name is not None and isinstance(size, int) and size > 0:
                found[name] = min(size, found.get(name, size))
    return found


def _lookups(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None, int]]:
    """Indices, tables and the axis of a table that the indices are of."""
    if node.op_type in ("Gather", "GatherElements") and node.domain in ("", "ai.onnx"):
        return [(node.inputs[1], node.inputs[0], node.attributes.get_int("axis", 0))]
    if node.op_type in ("EmbedLayerNormalization", "QEmbedLayerNormalization"):
        return [(node.inputs[0], node.inputs[2], 0), (node.inputs[1], node.inputs[4], 0)]
    return []


def _origin(value: ir.Value | None) -> str | None:
    """The input of the model whose elements the value has, if there is one."""
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in _THROUGH and node.inputs else None
    return value.name if value is not None and value.is_graph_input() else None
