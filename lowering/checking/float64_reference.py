"""A model in float64: how far its outputs in float32 can be trusted, where two evaluators disagree about them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..errors import LoweringError
from ..graph.legality import graphs
from .references import Against, Evaluate, Feeds, reference

_WIDENED = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_NARROW = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))

# Attributes that name an element type. Norms have `stash_type` as well, which evaluators take for "as wide as X".
_TYPES = ("to", "dtype", "output_dtype", "output_datatype", "softmax_precision")

# Operators whose result is float32 where an attribute does not say otherwise, and what says so.
_FLOATS = {"ConstantOfShape": "value"} | dict.fromkeys(
    ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"), "output_datatype"
)


def in_float64(model: ir.Model, against: Against, compute: Callable[[Evaluate], list[Any]]) -> list[Any] | None:
    """What `compute` finds with an evaluator of the widened model: `against`'s, or else onnx's own.

    None where the model has no floats to widen, or no evaluator knows all of its operators in float64.
    """
    wide = widened(model)
    if wide is None:
        return None
    whose: tuple[Against, ...] = (against, "reference")
    for one in dict.fromkeys(whose):
        with suppress(LoweringError):
            return compute(_of_narrow(reference(wide, one)))
    return None


def widened(model: ir.Model) -> ir.Model | None:
    """The model with float64 in place of all narrower floats, but for codes of 8 and 4 bits; None if it has none.

    Types of values, initializers, constants and what names a type are replaced, so that nothing is rounded on the way.
    """
    model = model.clone()
    found = False
    for graph in graphs(model):
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            found |= _widen(value)
        for node in graph:
            _widen_attributes(node)
    return model if found else None


def _widen(value: ir.Value) -> bool:
    if value.dtype not in _WIDENED:
        return False
    if value.const_value is not None and value.is_initializer():
        value.const_value = _wide_tensor(value.const_value)
    value.type = _wide_type(value.type)
    return True


def _wide_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol:
    """A new type: copies of a model share theirs."""
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


def _of_narrow(evaluate: Evaluate) -> Evaluate:
    """An evaluator of a widened model that takes the arrays of the model as it was."""

    def wide(feeds: Feeds) -> list[Any]:
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        return evaluate({name: a.astype(np.float64) if a.dtype in _NARROW else a for name, a in arrays.items()})

    return wide
