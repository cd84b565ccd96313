"""ONNX function bodies of operators without a lowering: decompositions that the standard defines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from .values import SequenceValue, Value


def read_function_body(node: ir.Node, version: int, inputs: Sequence[Value | None]) -> ir.Function | None:
    """Return the function body of the node's operator with its attributes bound; None if the standard has none.

    Context-dependent bodies (Attention, RotaryEmbedding, ...) are specialized to the input types and ranks.
    """
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return None
    proto = ir.to_proto(node)
    if schema.has_context_dependent_function:
        types = [_type_proto(v).SerializeToString() if v is not None else b"" for v in inputs]
        body_version = max(v for v in schema.context_dependent_function_opset_versions if v <= version)
        text = schema.get_context_dependent_function_with_opset_version(body_version, proto.SerializeToString(), types)
    elif schema.has_function:
        text = schema.get_function_with_opset_version(max(v for v in schema.function_opset_versions if v <= version))
    else:
        return None
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    del body.output[len(proto.output) :]  # context-dependent bodies omit trailing outputs
    _bind_attributes(body, proto, schema)
    return ir.serde.deserialize_function(body)


def _bind_attributes(body: onnx.FunctionProto, node: onnx.NodeProto, schema: Any) -> None:
    """Replace references to the function's attributes by the node's values or the schema's defaults."""
    attributes = {a.name: a for a in node.attribute}
    for inner in body.node:
        bound = []
        for attribute in inner.attribute:
            source: onnx.AttributeProto | None = attribute
            if attribute.ref_attr_name:
                source = attributes.get(attribute.ref_attr_name)
                if source is None and attribute.ref_attr_name in schema.attributes:
                    default = schema.attributes[attribute.ref_attr_name].default_value
                    source = default if default.name else None
            if source is not None:
                value = onnx.AttributeProto()
                value.CopyFrom(source)
                value.name = attribute.name
                bound.append(value)
        del inner.attribute[:]
        inner.attribute.extend(bound)


def _type_proto(value: Value) -> onnx.TypeProto:
    element = (
        onnx.TensorProto.STRING
        if value.dtype == "string"
        else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    )
    if isinstance(value, SequenceValue):
        return onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(element, None))
    return onnx.helper.make_tensor_type_proto(element, [d if isinstance(d, int) else None for d in value.shape])
