"""Evaluation in float64, which decides where two float32 evaluators disagree about an output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..errors import LoweringError
from ..graph.loading.legality import iterate_graphs
from .references import Against, Evaluate, Feeds, load_reference

_WIDENED = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_NARROW = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))

# Attributes that name an element type. Norms also have `stash_type`, which evaluators take for "as wide as X".
_TYPES = ("to", "dtype", "output_dtype", "output_datatype", "softmax_precision")

# Operators whose result is float32 by default, and the attribute that sets another type.
_FLOATS = {"ConstantOfShape": "value"} | dict.fromkeys(
    ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"), "output_datatype"
)


def compute_in_float64(model: ir.Model, against: Against, compute: Callable[[Evaluate], list[Any]]) -> list[Any] | None:
    """Return the result of `compute` with an evaluator of the widened model.

    The evaluator is that of `against`, or else onnx's own. Return None where the model has no floats to widen, or where
    no evaluator supports all of its operators in float64.
    """
    wide_model = widen_model(model)
    if wide_model is None:
        return None
    evaluators: tuple[Against, ...] = (against, "reference")
    for evaluator in dict.fromkeys(evaluators):
        with suppress(LoweringError):
            return compute(_widen_feeds(load_reference(wide_model, evaluator)))
    return None


def widen_model(model: ir.Model) -> ir.Model | None:
    """Return the model with float64 in place of all narrower floats, or None if it has none.

    Quantized values of 8 and 4 bits stay. Types of values, initializers, constants and type attributes are replaced, so
    that no intermediate is rounded.
    """
    model = model.clone()
    has_floats = False
    for graph in iterate_graphs(model):
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            has_floats |= _widen(value)
        for node in graph:
            _widen_attributes(node)
    return model if has_floats else None


def _widen(value: ir.Value) -> bool:
    if value.dtype not in _WIDENED:
        return False
    if value.const_value is not None and value.is_initializer():
        value.const_value = _wide_tensor(value.const_value)
    value.type = _wide_type(value.type)
    return True


def _wide_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol:
    """Return a new type: copies of a model share their types."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_wide_type(kind.elem_type))
    return ir.TensorType(ir.DataType.DOUBLE)


def _widen_attributes(node: ir.Node) -> None:
    if node.op_type == "Constant":
        for name in ("value_float", "value_floats"):
            if name in node.attributes:
                array = np.array(node.attributes.pop(name).value, np.float64)
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
    default = _FLOATS.get(node.op_type)
    if default is not None and default not in node.attributes:
        node.attributes[default] = (
            ir.AttrTensor(default, ir.tensor(np.zeros(1)))
            if default == "value"
            else ir.AttrInt64(default, int(ir.DataType.DOUBLE))
        )
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _WIDENED:
            node.attributes[name] = ir.AttrTensor(name, _wide_tensor(attribute.as_tensor()))
        elif name in _TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in _WIDENED:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float64), name=tensor.name)


def _widen_feeds(evaluate: Evaluate) -> Evaluate:
    """Return an evaluator of a widened model that takes the arrays of the original model."""

    def evaluate_wide(feeds: Feeds) -> list[Any]:
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        return evaluate({name: a.astype(np.float64) if a.dtype in _NARROW else a for name, a in arrays.items()})

    return evaluate_wide
