"""Sparse initializers and sparse Constants become dense ones, which is what nodes read of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import ModelError

_MOST = 2**31  # bytes of a tensor that is written out


def make_dense(model: onnx.ModelProto, folder: str = "") -> onnx.ModelProto:
    """Return the model without sparse tensors; itself, if it has none.

    Args:
        model: It stays as it is.
        folder: Where tensors with external data have their files.

    Raises:
        ModelError: Indices lie outside of their tensor, or a tensor would take more than 2 GiB.
    """
    if not any(graph.sparse_initializer for graph in _graphs(model)) and not any(_sparse(model)):
        return model
    dense = onnx.ModelProto()
    dense.CopyFrom(model)
    for graph in _graphs(dense):
        graph.initializer.extend(_dense(tensor, tensor.values.name, folder) for tensor in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    for attribute in _sparse(dense):
        value = _dense(attribute.sparse_tensor, "", folder)
        attribute.CopyFrom(onnx.helper.make_attribute("value", value))
    return dense


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """All graphs, bodies of nodes too."""
    pending = [model.graph]
    for function in model.functions:
        pending += _bodies(function.node)
    while pending:
        graph = pending.pop()
        yield graph
        pending += _bodies(graph.node)


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from ([attribute.g] if attribute.HasField("g") else attribute.graphs)


def _sparse(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """The attributes of all Constants, in functions too, that hold sparse tensors."""
    for part in (*_graphs(model), *model.functions):
        for node in part.node:
            yield from (a for a in node.attribute if node.op_type == "Constant" and a.name == "sparse_value")


def _dense(tensor: onnx.SparseTensorProto, name: str, folder: str) -> onnx.TensorProto:
    """Indices are [n], of the flattened tensor, or [n, rank]."""
    dims = tuple(tensor.dims)
    values = numpy_helper.to_array(tensor.values, folder)
    indices = numpy_helper.to_array(tensor.indices, folder)
    if min(dims, default=0) < 0 or math.prod(dims) * values.itemsize > _MOST:
        raise ModelError(f"sparse tensor '{name}' of dims {list(dims)} would take more than 2 GiB: store it dense.")
    flat = indices
    if indices.ndim == 2:
        inside = ((indices >= 0) & (indices < np.array(dims))).all()
        flat = np.ravel_multi_index(tuple(indices.T), dims) if inside and len(dims) else np.full(1, -1)
    if values.ndim != 1 or flat.shape != values.shape or ((flat < 0) | (flat >= math.prod(dims))).any():
        raise ModelError(f"sparse tensor '{name}' of dims {list(dims)} has indices that are none of its elements.")
    dense = np.zeros(math.prod(dims), values.dtype)
    dense[flat] = values
    return numpy_helper.from_array(dense.reshape(dims), name)
