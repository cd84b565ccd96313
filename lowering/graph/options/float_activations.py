"""Replacement of dynamic quantization of activations by float32, on request.

DynamicQuantizeLSTM becomes LSTM. DynamicQuantizeLinear before MatMulInteger and ConvInteger, and DynamicQuantizeMatMul,
become MatMul and Conv of the activations themselves. Weights are dequantized. Such a model is larger and slower than
the quantized one, and has no rounding errors of activations.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..rewriting.matching import Rewrite, dims, is_op, operand, read_array, remove_unused

_MICROSOFT = "com.microsoft"
_FLOAT = ir.DataType.FLOAT
_MATMULS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def use_float_activations(model: ir.Model) -> str:
    """Rewrite a model of inferred types in place; return a description for the manifest."""
    count = 0
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain == _MICROSOFT and node.op_type == "DynamicQuantizeLSTM":
            _replace_lstm(node)
        elif node.domain == _MICROSOFT and node.op_type == "DynamicQuantizeMatMul":
            _replace_matmul(node)
        elif is_op(node, "DynamicQuantizeLinear") and _is_multiplied(node):
            _replace_quantization(node)
        else:
            continue
        count += 1
    return f"precision: {count} nodes compute in float32 what the model quantizes while it runs"


def _replace_lstm(node: ir.Node) -> None:
    rewrite = Rewrite(node)
    x, w, r, *states, w_scale, w_zero, r_scale, r_zero = node.inputs
    assert w is not None and r is not None
    matrices = [
        rewrite.emit_transpose(_dequantize(rewrite, weights, scale, zero, (0, 1, -1)), [0, 2, 1])
        for weights, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero))
    ]
    inputs = [x, *matrices, *states]
    rewrite.replace_anchor(rewrite.emit_node("LSTM", inputs, node.attributes, node.outputs, name=node.name))


def _replace_matmul(node: ir.Node) -> None:
    rewrite = Rewrite(node)
    a, b, scale, zero, bias = (*node.inputs, None, None)[:5]
    assert b is not None
    y = rewrite.emit("MatMul", [a, _dequantize(rewrite, b, scale, zero)], dtype=_FLOAT)
    if bias is not None:
        y = rewrite.emit("Add", [y, bias], dtype=_FLOAT)
    rewrite.replace([node], node.outputs[0], y)


def _is_multiplied(node: ir.Node) -> bool:
    """Return whether only matmuls read a DynamicQuantizeLinear, and their accumulators are cast and scaled."""
    quantized, scale, zero = node.outputs
    if quantized.is_graph_output() or zero.is_graph_output() or not quantized.uses():
        return False
    for matmul, position in quantized.uses():
        if not is_op(matmul, *_MATMULS) or position != 0 or len(matmul.inputs) < 3 or matmul.inputs[2] is not zero:
            return False
        accumulators = matmul.outputs[0]
        if accumulators.is_graph_output() or not all(_is_float_cast(reader) for reader, _ in accumulators.uses()):
            return False
    return all(is_op(reader, *_MATMULS) for reader, _ in zero.uses()) and all(
        is_op(reader, "Mul") for reader, _ in scale.uses()
    )


def _is_float_cast(node: ir.Node) -> bool:
    return is_op(node, "Cast") and node.attributes["to"].as_int() == _FLOAT


def _replace_quantization(node: ir.Node) -> None:
    """Multiply the activations instead of their quantized values, whose scale becomes 1."""
    quantized, scale, _ = node.outputs
    for matmul in [reader for reader, _ in quantized.uses()]:
        rewrite = Rewrite(matmul)
        weights, zero = operand(matmul, 1), matmul.inputs[3] if len(matmul.inputs) > 3 else None
        channel_shape = (-1, *[1] * (len(dims(weights)) - 1)) if matmul.op_type == "ConvInteger" else None
        matrix = _dequantize(rewrite, weights, None, zero, channel_shape)
        y = rewrite.emit(_MATMULS[matmul.op_type], [node.inputs[0], matrix], matmul.attributes, _FLOAT)
        rewrite.replace([matmul], matmul.outputs[0], y)
    rewrite = Rewrite(node)
    scale.replace_all_uses_with(rewrite.emit_constant(np.array(1, np.float32), _FLOAT), replace_graph_outputs=False)
    rewrite.insert()
    remove_unused([node])


def _dequantize(
    rewrite: Rewrite,
    quantized: ir.Value,
    scale: ir.Value | None,
    zero: ir.Value | None,
    spread: tuple[int, ...] | None = None,
) -> ir.Value:
    """Return (quantized - zero) * scale; spread is the shape to which Reshape brings scale and zero."""
    elements, *parameters = (read_array(value) for value in (quantized, scale, zero))
    if elements is not None and all(
        (parameter is None) == (value is None) for parameter, value in zip(parameters, (scale, zero))
    ):
        scale_array, zero_array = (
            parameter if parameter is None or spread is None else _reshape_array(parameter, spread)
            for parameter in parameters
        )
        floats_array = elements.astype(np.float32)
        floats_array = floats_array if zero_array is None else floats_array - zero_array.astype(np.float32)
        return rewrite.emit_constant(floats_array if scale_array is None else floats_array * scale_array, _FLOAT)
    floats = rewrite.emit_cast(quantized, _FLOAT)
    for operator, value in (("Sub", zero), ("Mul", scale)):
        if value is not None:
            parameter = rewrite.emit_cast(value, _FLOAT)
            parameter = (
                parameter if spread is None else rewrite.emit("Reshape", [parameter, rewrite.emit_integers(*spread)])
            )
            floats = rewrite.emit(operator, [floats, parameter], shape=dims(quantized))
    return floats


def _reshape_array(elements: np.ndarray, spread: tuple[int, ...]) -> np.ndarray:
    return elements.reshape([elements.shape[axis] if size == 0 else size for axis, size in enumerate(spread)])
