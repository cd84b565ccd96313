"""Parts of a model as models of their own, with the values that they read from the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion.sizes import InferSizesPass
from .references import Against, Feeds, reference

_FEW = 64  # elements of an array that is taken for arithmetic of sizes


@dataclass(frozen=True)
class Part:
    """A model of some nodes of another one, numbered by their places there, and arrays for its inputs.

    Constant nodes, which are there where they are read, are not numbered.
    """

    model: ir.Model
    feeds: dict[str, Any]
    nodes: tuple[int, ...]


class Whole:
    """A model and all of its values for some inputs, as a reference computes them.

    Raises LoweringError if the reference cannot run the model.
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
        self._constant = _constants(self.nodes, {*model.graph.initializers} - {*feeds})

    def beginning(self, count: int) -> Part | None:
        """The model of the first nodes; its outputs are what they give to those behind them, or the whole model's."""
        read = {value for node in self.nodes[count:] for value in _read(node)} | set(self._model.graph.outputs)
        made = [value for node in self.nodes[:count] for value in node.outputs if value in read]
        names = [value.name or "" for value in made if value.name not in self._constant]
        return self.part(range(count), [name for name in names if self._is_array(name)])

    def part(self, nodes: Collection[int], outputs: Sequence[str]) -> Part | None:
        """The model of those nodes that lead to the outputs; None if there are none, or if something that they read is
        no array."""
        model = self._model.clone()
        graph = model.graph
        mine, allowed = list(graph), {*nodes, *(k for k, node in enumerate(self.nodes) if node.op_type == "Constant")}
        places = {node: place for place, node in enumerate(mine)}
        named = {value.name: value for node in mine for value in node.outputs}
        needed: set[int] = set()
        cut: dict[ir.Value, None] = {}  # a set that keeps its order
        todo = [named[name] for name in outputs]
        while todo:
            value = todo.pop()
            producer = value.producer()
            place = None if producer is None else places.get(producer)
            if place is None or place in needed:
                continue
            if place in allowed:
                needed.add(place)
                todo += _read(mine[place])
            elif value.name in outputs or not self._is_array(value.name or ""):
                return None
            else:
                cut[value] = None
        kept = tuple(sorted(needed & set(nodes)))
        if not kept:
            return None
        graph.outputs[:] = [self._as_output(named[name]) for name in outputs]
        for value in cut:
            self._cut(graph, value)
        _remove(graph, [node for node, place in places.items() if place not in needed])
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        graph.inputs[:] = [value for value in graph.inputs if value.uses()]
        for value in [v for v in graph.inputs if v.name in self._values and not _can_be_file(self._values[v.name])]:
            graph.inputs.remove(value)
            self._make_constant(graph, value, self._values[value.name or ""])
        feeds = {value.name: self._values[value.name] for value in graph.inputs if value.name in self._values}
        return Part(model, feeds, kept)

    def _is_array(self, name: str) -> bool:
        return isinstance(self._values.get(name), (np.ndarray, np.generic))

    def _as_output(self, value: ir.Value) -> ir.Value:
        array = np.asarray(self._values[value.name or ""])
        if value.type is None:
            value.type = ir.TensorType(_dtype(array))
        if value.shape is None:
            value.shape = ir.Shape([None] * array.ndim)
        return value

    def _cut(self, graph: ir.Graph, value: ir.Value) -> None:
        """What has read the value reads an input of its name, or a constant."""
        name, array = value.name or "", np.asarray(self._values[value.name or ""])
        new = ir.Value(name=name, type=ir.TensorType(_dtype(array)), shape=self._shape(name, array))
        value.name = None
        ir.convenience.replace_all_uses_with(value, new)
        sizes = array.dtype.kind in "iub" and array.ndim < 2 and array.size <= _FEW
        if name in self._constant or sizes:
            self._make_constant(graph, new, array)
        else:
            graph.inputs.append(new)

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
        """The sizes of the array, by the names of the model's inputs where it is inferred that they are these."""
        inferred = self._shapes.get(name)
        if inferred is None or len(inferred) != array.ndim:
            return ir.Shape(array.shape)
        return ir.Shape(
            dim if isinstance(dim, ir.SymbolicDim) and self._sizes.get(dim.value) == size else size
            for dim, size in zip(inferred, array.shape)
        )


def _values(model: ir.Model, feeds: Feeds, against: Against) -> dict[str, Any]:
    """All values of the model's graph, and its inputs, by name."""
    every = model.clone()
    made = [value for node in every.graph for value in node.outputs if value.name]
    every.graph.outputs[:] = made
    return {**feeds, **{value.name or "": array for value, array in zip(made, reference(every, against)(feeds))}}


def _constants(nodes: Sequence[ir.Node], initializers: set[str]) -> set[str | None]:
    """The values that depend on no input."""
    found: set[str | None] = set(initializers)
    for node in nodes:
        if all(value.name in found for value in _read(node)):
            found |= {value.name for value in node.outputs}
    return found


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What the node reads, and what its bodies read, from outside or of their own."""
    for each in (node, *_inside(node)):
        yield from (value for value in each.inputs if value is not None)


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of its bodies."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from ir.traversal.RecursiveGraphIterator(attribute.as_graph())


def _remove(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    for node in nodes:
        for inner in _inside(node):  # which would go on to use what is outside
            for place in range(len(inner.inputs)):
                inner.replace_input_with(place, None)
    graph.remove(nodes, safe=True)


def _can_be_file(array: Any) -> bool:
    """Whether a .npy file can hold it, which knows neither strings nor ml_dtypes' types."""
    return np.asarray(array).dtype.kind in "biufc"


def _dtype(array: np.ndarray) -> ir.DataType:
    return ir.DataType.STRING if array.dtype.kind in "OUS" else ir.DataType.from_numpy(array.dtype)
