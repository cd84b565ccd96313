"""Conversion of models to the opset in which the fused operators exist."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import version_converter

from ..loading.legality import record_opset
from ..loading.module_paths import MODULE_PATHS, read_module_paths
from .sizes import InferSizesPass

# Before 13, a Softmax flattens its axis and all following ones. The converter needs the rank to find the last axis.
_SINGLE_AXIS_SOFTMAX = 13

# Attention and RotaryEmbedding came with 23, Swish with 24. From 23 on a model stays as it is: in 24 an attention mask
# that is shorter than the keys, or has one key, has another meaning.
ATTENTION_OPSET, TARGET_OPSET = 23, 24

MIN_LOWERED_OPSET = 7
"""The first opset whose operators have lowerings. Before, arithmetic and Gemm had an attribute for broadcasting."""

# Initializers of at most this many elements are passed to the converter, which reads some: axes, shapes, scales.
_MAX_SMALL_ELEMENTS = 64


class UpgradeOpsetPass(ir.passes.InPlacePass):
    """Conversion of ai.onnx to opset 24, by onnx's version converter.

    1. Below opset 23: converted. Initializers are set aside, so that weights are neither copied nor serialized. Below
       opset 7 second operands are reshaped before, so that they broadcast as in NumPy.
    2. From opset 23 on: unchanged.
    3. If the converter rejects an operator: unchanged, and passes that need newer operators do nothing.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        version = opset(model)
        if not 0 < version < ATTENTION_OPSET:
            return ir.passes.PassResult(model, modified=False)
        if version < _SINGLE_AXIS_SOFTMAX:
            InferSizesPass()(model)
        if version < MIN_LOWERED_OPSET and not _align_operands(model):
            return ir.passes.PassResult(model, modified=False)
        converted = _convert(model)
        if converted is None:
            return ir.passes.PassResult(model, modified=False)
        weights = dict(model.graph.initializers)
        graph = converted.graph
        defaults = {value.name for value in model.graph.inputs}  # initializers that are inputs stay inputs
        for value in [v for v in graph.inputs if v.name in weights]:
            assert value.name is not None
            if value.name not in defaults:
                graph.inputs.remove(value)
            value.const_value = weights[value.name].const_value
            graph.register_initializer(value)
        paths = {node.outputs[0].name: read_module_paths(node) for node in model.graph.all_nodes() if node.outputs}
        for node in graph.all_nodes():  # the converter drops properties
            if node.outputs and paths.get(node.outputs[0].name):
                node.metadata_props[MODULE_PATHS] = repr(paths[node.outputs[0].name])
        record_opset(model)
        model.graph, model.ir_version = graph, converted.ir_version
        return ir.passes.PassResult(model, modified=True)


def _align_operands(model: ir.Model) -> bool:
    """Give second operands the dimensions of size 1 by which they broadcast as in NumPy.

    Return whether that is possible. Before opset 7 an attribute names the axis of the first operand at which the second
    one begins. The converter reads some of these attributes. Slopes of PRelu begin at the channels.
    """
    for node in list(model.graph.all_nodes()):
        axis = _read_second_axis(node)
        if axis is None:
            continue
        first, second = node.inputs
        if first is None or first.shape is None or second is None or second.shape is None:
            return False
        rank = len(second.shape)
        trailing = len(first.shape) - axis - rank
        if trailing > 0:
            sizes = ir.tensor(np.array([0] * rank + [1] * trailing, np.int64))
            constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", sizes)])
            aligned = ir.Node("", "Reshape", [second, constant.outputs[0]])
            assert node.graph is not None
            node.graph.insert_before(node, [constant, aligned])
            node.replace_input_with(1, aligned.outputs[0])
            node.attributes.pop("axis", None)
    return True


def _read_second_axis(node: ir.Node) -> int | None:
    """Return the axis of the first operand at which the second one begins, if the node has it."""
    if node.domain not in ("", "ai.onnx") or len(node.inputs) != 2:
        return None
    if node.op_type == "PRelu":
        return 1
    has_axis = node.attributes.get_int("broadcast", 0) and "axis" in node.attributes
    return node.attributes.get_int("axis", 0) if has_axis else None


def opset(model: ir.Model) -> int:
    """Return the version of ai.onnx that the model imports; 0 if it does not."""
    return next((v for d, v in model.opset_imports.items() if d in ("", "ai.onnx")), 0)


def _convert(model: ir.Model) -> ir.Model | None:
    """Return a copy in the target opset, or None if the conversion fails.

    Large initializers are inputs without data in the copy.
    """
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.size <= _MAX_SMALL_ELEMENTS:
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.tensor(
                    tensor.numpy(), name=name
                )  # relative to the model's folder, which the copy does not know
            continue
        if tensor is None:
            continue
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        del copy.graph.initializers[name]
        value.const_value = None
        if value not in copy.graph.inputs:
            copy.graph.inputs.append(value)
    try:
        proto = version_converter.convert_version(ir.to_proto(copy), TARGET_OPSET)
    except (version_converter.ConvertError, onnx.shape_inference.InferenceError, RuntimeError):
        return None  # an operator without an adapter, or declarations that contradict: compiled as it is
    imports = [onnx.helper.make_opsetid("", TARGET_OPSET)]
    proto.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(imports))
    return ir.from_proto(proto)
