"""Types and shapes that inputs and outputs of a model do not declare: inferred, as in ONNX Runtime.

The model's functions are inlined before. Afterwards every input has a type and a shape, and so has every output for
which inference determines them. The importer computes those of all other outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from ...errors import ModelError
from ..rewriting.sizes import InferSizesPass
from .legality import iterate_graphs

_MAX_RANK = 8

# Initializers of at most this many elements are read by inference: axes, shapes, sizes of kernels.
_MAX_SMALL_ELEMENTS = 64


def is_incomplete(value: ir.Value) -> bool:
    """Return whether an input or output lacks a declaration that onnx's checker requires."""
    return value.type is None or value.shape is None or value.dtype == ir.DataType.UNDEFINED


def add_stand_ins(model: ir.Model) -> ir.Model:
    """Return a copy for onnx's checker, in which undeclared inputs and outputs are float scalars.

    Initializers from files are inputs, too, as the checker would look for the files in another folder.
    """
    copy = drop_data(model, lambda tensor: isinstance(tensor, ir.ExternalTensor))
    for value in (*copy.graph.inputs, *copy.graph.outputs):
        if value.type is None or value.dtype == ir.DataType.UNDEFINED:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.shape is None and isinstance(value.type, ir.TensorType):
            value.shape = ir.Shape([])
    return copy


def drop_data(model: ir.Model, is_dropped: Callable[[ir.TensorProtocol], bool]) -> ir.Model:
    """Return a copy in which initializers are inputs without data, if `is_dropped` holds for their tensors."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and is_dropped(tensor):
            del copy.graph.initializers[name]
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            value.const_value = None
            if value not in copy.graph.inputs:
                copy.graph.inputs.append(value)
    return copy


def forget_unknown_types(model: ir.Model) -> None:
    """Remove types of outputs without an element type, in place."""
    for graph in iterate_graphs(model):
        for value in graph.outputs:
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                value.type = value.shape = None


def declare_inputs(model: ir.Model) -> None:
    """Give inputs without a shape the number of dimensions that their uses require, in place.

    It is the only one of 0 to 8 with which ONNX's inference accepts the model. Sizes stay unknown.

    Raises:
        ModelError: Uses allow several numbers of dimensions, or none.
    """
    while missing := [value for value in model.graph.inputs if _lacks_shape(model, value)]:
        ranks = {value: _find_possible_ranks(model, str(value.name)) for value in missing}
        decided = {value: possible[0] for value, possible in ranks.items() if len(possible) == 1}
        for value, rank in decided.items():
            value.shape = ir.Shape([None] * rank)
        if not decided:
            name, possible = missing[0].name, ranks[missing[0]]
            allowed = ", ".join(map(str, possible)) or "none"
            raise ModelError(
                "model.input_shape_missing",
                f"Input '{name}' has no shape, and its uses do not determine how many dimensions it has (possible of "
                f"0 to {_MAX_RANK}: {allowed}). Declare its shape in the model, "
                "model.graph.input[...].type.tensor_type.shape; dimensions may be symbolic names, whose sizes dims= "
                "(--dim) can give.",
            )


def _lacks_shape(model: ir.Model, value: ir.Value) -> bool:
    return value.shape is None and isinstance(value.type, ir.TensorType) and value.name not in model.graph.initializers


def _find_possible_ranks(model: ir.Model, name: str) -> list[int]:
    """Return the numbers of dimensions of an input without contradictions."""
    proto = ir.to_proto(drop_data(model, lambda tensor: tensor.size > _MAX_SMALL_ELEMENTS))
    (info,) = (value for value in proto.graph.input if value.name == name)
    possible = []
    for rank in range(_MAX_RANK + 1):
        shape = info.type.tensor_type.shape
        shape.SetInParent()
        del shape.dim[:]
        for _ in range(rank):
            shape.dim.add()
        try:
            inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
        except onnx.shape_inference.InferenceError:
            continue
        if _has_legal_transposes(inferred):
            possible.append(rank)
    return possible


def _has_legal_transposes(graph: onnx.GraphProto) -> bool:
    """Return whether each Transpose has an axis for each dimension of its input.

    Inference does not check that.
    """
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    return all(
        len(attribute.ints) == ranks.get(node.input[0], len(attribute.ints))
        for node in graph.node
        if node.op_type == "Transpose"
        for attribute in node.attribute
        if attribute.name == "perm"
    )


def declare_outputs(model: ir.Model) -> None:
    """Give outputs without a type or a shape the inferred ones, in place."""
    missing = [k for k, value in enumerate(model.graph.outputs) if is_incomplete(value)]
    if not missing:
        return
    inferred = model.clone()
    InferSizesPass()(inferred)
    declared_symbols = {
        dim.value for value in model.graph.inputs for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)
    }
    for k in missing:
        value, inferred_value = model.graph.outputs[k], inferred.graph.outputs[k]
        value.type = value.type or inferred_value.type
        if value.shape is None and inferred_value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) or d.value in declared_symbols else None for d in inferred_value.shape]
            )
