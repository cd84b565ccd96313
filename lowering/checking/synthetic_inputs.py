"""Inputs of a model: those that are given, and others made up by what its graph does with them.

What it looks up, for instance, is in the table that it looks into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.model import dtype_name
from ..manifest import TensorSpec
from ..profiling.inputs import add_derived, is_integer, random_input
from ..runtime.checks import check_fixed_dimensions
from ..runtime.elements import STORAGE_TYPES
from .references import Feeds

_SIZE = 4  # of symbolic dimensions of which nothing is said

# Operators that hand on the elements of their first input.
_THROUGH = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}


def taken(model: ir.Model) -> list[ir.Value]:
    """The inputs that a call gives."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def specs_of(model: ir.Model) -> list[TensorSpec]:
    """The inputs of a model that is not compiled."""
    found = []
    for value in taken(model):
        dtype = dtype_name(value.dtype)
        dims = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape or ())
        found.append(TensorSpec(value.name or "", dtype, STORAGE_TYPES[dtype], dims))
    return found


def feeds_of(
    model: ir.Model,
    specs: Sequence[TensorSpec],
    ranges: Mapping[str, tuple[int, int]],
    given: Feeds,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    derived: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Arrays for all inputs of the specs. A dimension has the size that `sizes` says, or else that of an array that is
    given; one that is named as a sum of others, such as "past + tokens", or `derived` (Manifest.derived), is that; all
    others are 4, or as near to it as their range allows. Raises InputError for a size that the artifact has fixed
    otherwise.
    """
    check_fixed_dimensions(sizes, ranges)
    known = {str(dim): min(max(_SIZE, low), high) for dim, (low, high) in ranges.items() if dim not in (derived or {})}
    for spec in specs:
        if spec.name in given:
            known |= dict(zip(map(str, spec.dims), np.shape(given[spec.name])))
    known |= sizes
    names = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
    for name in names - known.keys() - (derived or {}).keys():
        terms = [term.strip() for term in name.split("+")]
        if len(terms) > 1 and all(term.isdecimal() or term in names | known.keys() for term in terms):
            known[name] = sum(int(term) if term.isdecimal() else known.get(term, _SIZE) for term in terms)
    add_derived(known, derived or {}, _SIZE)
    made = generate_inputs(model.graph, [spec for spec in specs if spec.name not in given], known, rng)
    return {s.name: np.asanyarray(given[s.name]) if s.name in given else made[s.name] for s in specs}


def generate_inputs(
    graph: ir.Graph, specs: Iterable[TensorSpec], sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """An array for each of the inputs, by name; symbolic dimensions are 4 unless `sizes` says otherwise.

    Floats are standard normal. Integers that index a table are of all its rows, or count up where the input is named
    for positions; an integer mask of batches hides up to half of the tokens of each, from the left as padding does.
    All other integers are 0 or 1, which are legal indices of what is not empty.
    """
    rows = _rows(graph)
    return {spec.name: _array(spec, rows.get(spec.name), sizes, rng) for spec in specs}


def _array(spec: TensorSpec, rows: int | None, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    array = random_input(spec, sizes, rng)
    if not is_integer(spec) or array.size == 0:
        return array
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
