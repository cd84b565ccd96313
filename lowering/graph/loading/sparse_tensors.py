"""Conversion of sparse initializers and sparse Constants to dense ones, which the nodes read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from ...errors import ModelError

_MAX_BYTES = 2**31  # bytes of a dense tensor


def make_dense(model: onnx.ModelProto, folder: str = "") -> onnx.ModelProto:
    """Return the model without sparse tensors, or the model itself if it has none.

    Args:
        model: The model, which is not modified.
        folder: The folder of files of external data.

    Raises:
        ModelError: Indices lie outside of their tensor, or a tensor would take more than 2 GiB.
    """
    if not any(graph.sparse_initializer for graph in _iterate_graphs(model)) and not any(
        _iterate_sparse_attributes(model)
    ):
        return model
    dense = onnx.ModelProto()
    dense.CopyFrom(model)
    for graph in _iterate_graphs(dense):
        graph.initializer.extend(
            _make_dense_tensor(tensor, tensor.values.name, folder) for tensor in graph.sparse_initializer
        )
        del graph.sparse_initializer[:]
    for attribute in _iterate_sparse_attributes(dense):
        value = _make_dense_tensor(attribute.sparse_tensor, "", folder)
        attribute.CopyFrom(onnx.helper.make_attribute("value", value))
    return dense


def _iterate_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield all graphs, including bodies of nodes."""
    pending = [model.graph]
    for function in model.functions:
        pending += _iterate_bodies(function.node)
    while pending:
        graph = pending.pop()
        yield graph
        pending += _iterate_bodies(graph.node)


def _iterate_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from ([attribute.g] if attribute.HasField("g") else attribute.graphs)


def _iterate_sparse_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Yield the sparse attributes of all Constants, including those in functions."""
    for graph in (*_iterate_graphs(model), *model.functions):
        for node in graph.node:
            yield from (a for a in node.attribute if node.op_type == "Constant" and a.name == "sparse_value")


def _make_dense_tensor(tensor: onnx.SparseTensorProto, name: str, folder: str) -> onnx.TensorProto:
    """Return a dense tensor; indices are [n], of the flattened tensor, or [n, rank]."""
    dims = tuple(tensor.dims)
    values = numpy_helper.to_array(tensor.values, folder)
    indices = numpy_helper.to_array(tensor.indices, folder)
    if min(dims, default=0) < 0 or math.prod(dims) * values.itemsize > _MAX_BYTES:
        raise ModelError(
            "model.sparse_tensor_too_large",
            f"sparse tensor '{name}' of dims {list(dims)} would take more than 2 GiB. Store it as a dense tensor.",
        )
    flat = indices
    if indices.ndim == 2:
        is_inside = ((indices >= 0) & (indices < np.array(dims))).all()
        flat = np.ravel_multi_index(tuple(indices.T), dims) if is_inside and len(dims) else np.full(1, -1)
    if values.ndim != 1 or flat.shape != values.shape or ((flat < 0) | (flat >= math.prod(dims))).any():
        raise ModelError(
            "model.sparse_indices_invalid",
            f"sparse tensor '{name}' of dims {list(dims)} has indices that do not each select one of its elements.",
        )
    dense = np.zeros(math.prod(dims), values.dtype)
    dense[flat] = values
    return numpy_helper.from_array(dense.reshape(dims), name)
