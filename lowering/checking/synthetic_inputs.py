"""Inputs of a model: the user's arrays, and synthetic ones for the rest.

Synthetic inputs depend on their use in the graph: indices, for instance, are within the table that they index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.loading.model import dtype_name
from ..manifest import TensorSpec
from ..profiling.inputs import add_derived_sizes, is_integer, random_input
from ..runtime.arrays.elements import STORAGE_TYPES
from ..runtime.artifact.checks import check_fixed_dimensions
from .references import Feeds

_DEFAULT_SIZE = 4  # the size of unspecified symbolic dimensions

# Operators that return the elements of their first input.
_PASS_THROUGH = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}


def list_call_inputs(model: ir.Model) -> list[ir.Value]:
    """Return the inputs that a call provides: those without an initializer."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def read_input_specs(model: ir.Model) -> list[TensorSpec]:
    """Return the specs of the inputs of an uncompiled model."""
    specs = []
    for value in list_call_inputs(model):
        dtype = dtype_name(value.dtype)
        dims = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape or ())
        specs.append(TensorSpec(value.name or "", dtype, STORAGE_TYPES[dtype], dims))
    return specs


def build_feeds(
    model: ir.Model,
    specs: Sequence[TensorSpec],
    ranges: Mapping[str, tuple[int, int]],
    user_arrays: Feeds,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
    derived: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Return arrays for all inputs of the specs.

    A dimension has the size in `sizes`, or else that of a user's array. A dimension that is named as a sum of others,
    such as "past + tokens", or is in `derived` (Manifest.derived), has that value. All others are 4, clamped to their
    range.

    Raises:
        InputError: A size contradicts a static size of the artifact.
    """
    check_fixed_dimensions(sizes, ranges)
    bound_sizes = {
        str(dim): min(max(_DEFAULT_SIZE, low), high)
        for dim, (low, high) in ranges.items()
        if dim not in (derived or {})
    }
    for spec in specs:
        if spec.name in user_arrays:
            bound_sizes |= dict(zip(map(str, spec.dims), np.shape(user_arrays[spec.name])))
    bound_sizes |= sizes
    names = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
    for name in names - bound_sizes.keys() - (derived or {}).keys():
        terms = [term.strip() for term in name.split("+")]
        if len(terms) > 1 and all(term.isdecimal() or term in names | bound_sizes.keys() for term in terms):
            bound_sizes[name] = sum(
                int(term) if term.isdecimal() else bound_sizes.get(term, _DEFAULT_SIZE) for term in terms
            )
    add_derived_sizes(bound_sizes, derived or {}, _DEFAULT_SIZE)
    generated = generate_inputs(model.graph, [spec for spec in specs if spec.name not in user_arrays], bound_sizes, rng)
    return {s.name: np.asanyarray(user_arrays[s.name]) if s.name in user_arrays else generated[s.name] for s in specs}


def generate_inputs(
    graph: ir.Graph, specs: Iterable[TensorSpec], sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return an array for each of the inputs, by name; symbolic dimensions are 4 unless `sizes` says otherwise.

    Floats are standard normal. Integers that index a table are uniform over its rows, or count up where the input's
    name contains "position". An integer mask [batch, tokens] hides up to half of the tokens of each batch, from the
    left as padding does. All other integers are 0 or 1, which are legal indices of anything not empty.
    """
    rows = _find_table_rows(graph)
    return {spec.name: _generate_array(spec, rows.get(spec.name), sizes, rng) for spec in specs}


def _generate_array(
    spec: TensorSpec, rows: int | None, sizes: Mapping[str, int], rng: np.random.Generator
) -> np.ndarray:
    array = random_input(spec, sizes, rng)
    if not is_integer(spec) or array.size == 0:
        return array
    if "position" in spec.name:
        count = np.arange(array.shape[-1] if array.ndim else 1, dtype=array.dtype)
        return np.ascontiguousarray(np.broadcast_to(np.minimum(count, (rows or len(count)) - 1), array.shape))
    if rows is not None:
        return rng.integers(0, rows, array.shape).astype(array.dtype)
    if "mask" in spec.name and array.ndim == 2:
        padding = rng.integers(0, array.shape[1] // 2 + 1, array.shape[0])
        return (np.arange(array.shape[1]) >= padding[:, None]).astype(array.dtype)
    return array


def _find_table_rows(graph: ir.Graph) -> dict[str, int]:
    """Return, by the input that indexes them, the rows of the smallest constant or computed table of static size."""
    smallest: dict[str, int] = {}
    for node in graph:
        for indices, table, axis in _list_lookups(node):
            name = _trace_to_input(indices)
            size = None if table is None or table.shape is None else table.shape[axis]
            if name is not None and isinstance(size, int) and size > 0:
                smallest[name] = min(size, smallest.get(name, size))
    return smallest


def _list_lookups(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None, int]]:
    """Return indices, tables, and the indexed axis of each table."""
    if node.op_type in ("Gather", "GatherElements") and node.domain in ("", "ai.onnx"):
        return [(node.inputs[1], node.inputs[0], node.attributes.get_int("axis", 0))]
    if node.op_type in ("EmbedLayerNormalization", "QEmbedLayerNormalization"):
        return [(node.inputs[0], node.inputs[2], 0), (node.inputs[1], node.inputs[4], 0)]
    return []


def _trace_to_input(value: ir.Value | None) -> str | None:
    """Return the input of the model whose elements the value has, or None."""
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in _PASS_THROUGH and node.inputs else None
    return value.name if value is not None and value.is_graph_input() else None
