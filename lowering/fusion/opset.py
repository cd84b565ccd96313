"""The opset in which the fused operators exist."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import version_converter

from ..graph.legality import remember_opset
from .sizes import InferSizesPass

# Before 13, a Softmax flattens what is behind its axis; which is the last axis, the converter sees from the rank.
_ONE_AXIS = 13

# Attention and RotaryEmbedding came with 23, Swish with 24. From 23 on a model stays as it is: in 24 an attention mask
# that is shorter than the keys, or of one key, means something else.
FIRST, TARGET = 23, 24

# Initialisers up to this many elements go through the converter, which reads some: axes, shapes, scales.
_SMALL = 64


class UpgradeOpsetPass(ir.passes.InPlacePass):
    """Brings ai.onnx to opset 24, by onnx's version converter.

    1. Below opset 23: converted. Initialisers are set aside, so that weights are neither copied nor serialised.
    2. From opset 23 on: left alone.
    3. Where the converter refuses an operator: left alone, and passes that need newer operators do nothing.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        version = opset(model)
        if not 0 < version < FIRST:
            return ir.passes.PassResult(model, modified=False)
        if version < _ONE_AXIS:
            InferSizesPass()(model)
        converted = _converted(model)
        if converted is None:
            return ir.passes.PassResult(model, modified=False)
        weights = dict(model.graph.initializers)
        graph = converted.graph
        defaults = {value.name for value in model.graph.inputs}  # initialisers that are inputs stay inputs
        for value in [v for v in graph.inputs if v.name in weights]:
            assert value.name is not None
            if value.name not in defaults:
                graph.inputs.remove(value)
            value.const_value = weights[value.name].const_value
            graph.register_initializer(value)
        remember_opset(model)
        model.graph, model.ir_version = graph, converted.ir_version
        return ir.passes.PassResult(model, modified=True)


def opset(model: ir.Model) -> int:
    """The version of ai.onnx that the model imports; 0 if it does not."""
    return next((v for d, v in model.opset_imports.items() if d in ("", "ai.onnx")), 0)


def _converted(model: ir.Model) -> ir.Model | None:
    """A copy in the target opset, in which large initialisers are inputs without data; None if that cannot be."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.size <= _SMALL:
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.tensor(tensor.numpy(), name=name)  # a file is found from the model's folder only
            continue
        if tensor is None:
            continue
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        del copy.graph.initializers[name]
        value.const_value = None
        if value not in copy.graph.inputs:
            copy.graph.inputs.append(value)
    try:
        proto = version_converter.convert_version(ir.to_proto(copy), TARGET)
    except (version_converter.ConvertError, onnx.shape_inference.InferenceError, RuntimeError):
        return None  # an operator without an adapter, or declarations that contradict: compiled as it is
    imports = [onnx.helper.make_opsetid("", TARGET)]
    proto.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(imports))
    return ir.from_proto(proto)
