"""Submodels of a model, with the values that they read from the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.loading.legality import iterate_bodies
from ..graph.rewriting.sizes import InferSizesPass
from .references import Against, Feeds, load_reference

_MAX_SIZE_ELEMENTS = 64  # elements of an array that is taken for shape arithmetic


@dataclass(frozen=True)
class Submodel:
    """A model of some nodes of another model, given by their positions there, and arrays for its inputs.

    Constant nodes are included where they are read, and are not in `nodes`.
    """

    model: ir.Model
    feeds: dict[str, Any]
    nodes: tuple[int, ...]


class EvaluatedModel:
    """A model and all of its values for some inputs, as a reference computes them.

    Raises:
        LoweringError: The reference cannot run the model.
    """

    def __init__(self, model: ir.Model, feeds: Feeds, against: Against) -> None:
        self.nodes = list(model.graph)
        self._model = model
        self._values = _values(model, feeds, against)
        inferred = model.clone()
        InferSizesPass()(inferred)
        self._shapes = {value.name: value.shape for node in inferred.graph for value in node.outputs}
        self._sizes = {
            dim.value: size
            for value in model.graph.inputs
            for dim, size in zip(value.shape or (), np.shape(feeds.get(value.name or "", 0)))
            if isinstance(dim, ir.SymbolicDim)
        }
        self._constant_names = _find_constants(self.nodes, {*model.graph.initializers} - {*feeds})

    def extract_prefix(self, count: int) -> Submodel | None:
        """Return the model of the first nodes.

        Its outputs are the values that later nodes read, or outputs of the whole model.
        """
        read = {value for node in self.nodes[count:] for value in _list_read_values(node)} | set(
            self._model.graph.outputs
        )
        computed = [value for node in self.nodes[:count] for value in node.outputs if value in read]
        names = [value.name or "" for value in computed if value.name not in self._constant_names]
        return self.extract_submodel(range(count), [name for name in names if self._is_array(name)])

    def extract_submodel(self, nodes: Collection[int], outputs: Sequence[str]) -> Submodel | None:
        """Return the model of those nodes that lead to the outputs.

        Return None if there are none, or if a value that they read is not an array.
        """
        model = self._model.clone()
        graph = model.graph
        cloned_nodes, allowed = (
            list(graph),
            {*nodes, *(k for k, node in enumerate(self.nodes) if node.op_type == "Constant")},
        )
        positions = {node: position for position, node in enumerate(cloned_nodes)}
        values_by_name = {value.name: value for node in cloned_nodes for value in node.outputs}
        needed: set[int] = set()
        boundary: dict[ir.Value, None] = {}  # an ordered set
        pending = [values_by_name[name] for name in outputs]
        while pending:
            value = pending.pop()
            producer = value.producer()
            position = None if producer is None else positions.get(producer)
            if position is None or position in needed:
                continue
            if position in allowed:
                needed.add(position)
                pending += _list_read_values(cloned_nodes[position])
            elif value.name in outputs or not self._is_array(value.name or ""):
                return None
            else:
                boundary[value] = None
        included = tuple(sorted(needed & set(nodes)))
        if not included:
            return None
        graph.outputs[:] = [self._as_output(values_by_name[name]) for name in outputs]
        for value in boundary:
            self._cut_value(graph, value)
        _remove_nodes(graph, [node for node, position in positions.items() if position not in needed])
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        graph.inputs[:] = [value for value in graph.inputs if value.uses()]
        for value in [v for v in graph.inputs if v.name in self._values and not _can_be_file(self._values[v.name])]:
            graph.inputs.remove(value)
            self._make_constant(graph, value, self._values[value.name or ""])
        feeds = {value.name: self._values[value.name] for value in graph.inputs if value.name in self._values}
        return Submodel(model, feeds, included)

    def _is_array(self, name: str) -> bool:
        return isinstance(self._values.get(name), (np.ndarray, np.generic))

    def _as_output(self, value: ir.Value) -> ir.Value:
        array = np.asarray(self._values[value.name or ""])
        if value.type is None:
            value.type = ir.TensorType(_dtype(array))
        if value.shape is None:
            value.shape = ir.Shape([None] * array.ndim)
        return value

    def _cut_value(self, graph: ir.Graph, value: ir.Value) -> None:
        """Replace the value by an input of its name, or by a constant, for all of its readers."""
        name, array = value.name or "", np.asarray(self._values[value.name or ""])
        replacement = ir.Value(name=name, type=ir.TensorType(_dtype(array)), shape=self._shape(name, array))
        value.name = None
        ir.convenience.replace_all_uses_with(value, replacement)
        sizes = array.dtype.kind in "iub" and array.ndim < 2 and array.size <= _MAX_SIZE_ELEMENTS
        if name in self._constant_names or sizes:
            self._make_constant(graph, replacement, array)
        else:
            graph.inputs.append(replacement)

    def _make_constant(self, graph: ir.Graph, value: ir.Value, array: np.ndarray) -> None:
        strings = array.dtype.kind in "OUS"
        value.const_value = (
            ir.StringTensor([str(text).encode() for text in array.flat], shape=ir.Shape(array.shape), name=value.name)
            if strings
            else ir.tensor(array, name=value.name)
        )
        value.shape = ir.Shape(array.shape)
        graph.register_initializer(value)

    def _shape(self, name: str, array: np.ndarray) -> ir.Shape:
        """Return the shape of the array, with the model's symbolic dimensions where shape inference finds them."""
        inferred = self._shapes.get(name)
        if inferred is None or len(inferred) != array.ndim:
            return ir.Shape(array.shape)
        return ir.Shape(
            dim if isinstance(dim, ir.SymbolicDim) and self._sizes.get(dim.value) == size else size
            for dim, size in zip(inferred, array.shape)
        )


def _values(model: ir.Model, feeds: Feeds, against: Against) -> dict[str, Any]:
    """Return all values of the model's graph, and its inputs, by name."""
    exposed = model.clone()
    computed = [value for node in exposed.graph for value in node.outputs if value.name]
    exposed.graph.outputs[:] = computed
    return {
        **feeds,
        **{value.name or "": array for value, array in zip(computed, load_reference(exposed, against)(feeds))},
    }


def _find_constants(nodes: Sequence[ir.Node], initializers: set[str]) -> set[str | None]:
    """Return the values that depend on no input."""
    constant_names: set[str | None] = set(initializers)
    for node in nodes:
        if all(value.name in constant_names for value in _list_read_values(node)):
            constant_names |= {value.name for value in node.outputs}
    return constant_names


def _list_read_values(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node and its subgraphs read, from outside or of their own."""
    for current in (node, *_list_subgraph_nodes(node)):
        yield from (value for value in current.inputs if value is not None)


def _list_subgraph_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes of a node's subgraphs."""
    for body in iterate_bodies(node):
        yield from ir.traversal.RecursiveGraphIterator(body)


def _remove_nodes(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    for node in nodes:
        for subgraph_node in _list_subgraph_nodes(node):  # it would remain a user of outer values
            for position in range(len(subgraph_node.inputs)):
                subgraph_node.replace_input_with(position, None)
    graph.remove(nodes, safe=True)


def _can_be_file(array: Any) -> bool:
    """Return whether a .npy file can hold an array; it supports neither strings nor ml_dtypes' types."""
    return np.asarray(array).dtype.kind in "biufc"


def _dtype(array: np.ndarray) -> ir.DataType:
    return ir.DataType.STRING if array.dtype.kind in "OUS" else ir.DataType.from_numpy(array.dtype)
