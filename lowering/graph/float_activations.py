"""What a model quantizes while it runs, in float32 on request.

DynamicQuantizeLSTM becomes LSTM; DynamicQuantizeLinear in front of MatMulInteger and ConvInteger, and
DynamicQuantizeMatMul, become MatMul and Conv of the numbers themselves. Weights are what their codes stand for. Such a
model is larger and slower than the one that quantizes, and free of the rounding of its activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..fusion.matching import Rewrite, array, dims, is_op, operand, remove_unused

_MICROSOFT = "com.microsoft"
_FLOAT = ir.DataType.FLOAT
_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def keep_floats(model: ir.Model) -> str:
    """Rewrite a model of inferred types in place; return what was done, for the reader of the manifest."""
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
        rewrite.transpose(_floats(rewrite, codes, scale, zero, (0, 1, -1)), [0, 2, 1])
        for codes, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero))
    ]
    made = ir.node("LSTM", [x, *matrices, *states], node.attributes, num_outputs=len(node.outputs), name=node.name)
    rewrite.nodes.append(made)
    _give_out(rewrite, made.outputs)


def _replace_matmul(node: ir.Node) -> None:
    rewrite = Rewrite(node)
    a, b, scale, zero, bias = (*node.inputs, None, None)[:5]
    assert b is not None
    y = rewrite.emit("MatMul", [a, _floats(rewrite, b, scale, zero)], dtype=_FLOAT)
    if bias is not None:
        y = rewrite.emit("Add", [y, bias], dtype=_FLOAT)
    _give_out(rewrite, [y])


def _is_multiplied(node: ir.Node) -> bool:
    """Whether bytes of a DynamicQuantizeLinear go into products alone, whose sums become floats."""
    codes, _, zero = node.outputs
    if codes.is_graph_output() or zero.is_graph_output() or not codes.uses():
        return False
    for product, place in codes.uses():
        if not is_op(product, *_PRODUCTS) or place != 0 or len(product.inputs) < 3 or product.inputs[2] is not zero:
            return False
        sums = product.outputs[0]
        if sums.is_graph_output() or not all(is_op(reader, "Cast") for reader, _ in sums.uses()):
            return False
    return all(is_op(reader, *_PRODUCTS) for reader, _ in zero.uses())


def _replace_quantization(node: ir.Node) -> None:
    """The numbers are multiplied in place of their codes, and their scale is 1."""
    codes, scale, _ = node.outputs
    for product in [reader for reader, _ in codes.uses()]:
        rewrite = Rewrite(product)
        weights, zero = operand(product, 1), product.inputs[3] if len(product.inputs) > 3 else None
        of_channels = (-1, *[1] * (len(dims(weights)) - 1)) if product.op_type == "ConvInteger" else None
        matrix = _floats(rewrite, weights, None, zero, of_channels)
        made = ir.node(
            _PRODUCTS[product.op_type], [node.inputs[0], matrix], product.attributes, num_outputs=1, name=product.name
        )
        made.outputs[0].type = ir.TensorType(_FLOAT)
        rewrite.nodes.append(made)
        _give_out(rewrite, made.outputs)
    rewrite = Rewrite(node)
    scale.replace_all_uses_with(rewrite.constant(np.array(1, np.float32), _FLOAT), replace_graph_outputs=False)
    rewrite.insert()
    remove_unused([node])


def _floats(
    rewrite: Rewrite,
    codes: ir.Value,
    scale: ir.Value | None,
    zero: ir.Value | None,
    spread: tuple[int, ...] | None = None,
) -> ir.Value:
    """(codes - zero) scale; spread is the shape of scale and zero that broadcasts to codes, as Reshape takes it."""
    known, *parts = (array(value) for value in (codes, scale, zero))
    if known is not None and all((part is None) == (value is None) for part, value in zip(parts, (scale, zero))):
        given, middle = (part if part is None or spread is None else _reshaped(part, spread) for part in parts)
        numbers = known.astype(np.float32)
        numbers = numbers if middle is None else numbers - middle.astype(np.float32)
        return rewrite.constant(numbers if given is None else numbers * given, _FLOAT)
    floats = rewrite.cast(codes, _FLOAT)
    for operator, value in (("Sub", zero), ("Mul", scale)):
        if value is not None:
            part = rewrite.cast(value, _FLOAT)
            part = part if spread is None else rewrite.emit("Reshape", [part, rewrite.integers(*spread)])
            floats = rewrite.emit(operator, [floats, part], shape=dims(codes))
    return floats


def _reshaped(part: np.ndarray, spread: tuple[int, ...]) -> np.ndarray:
    return part.reshape([part.shape[axis] if size == 0 else size for axis, size in enumerate(spread)])


def _give_out(rewrite: Rewrite, values: Sequence[ir.Value]) -> None:
    """Put values in the places of the outputs of the anchor, which goes."""
    node = rewrite.anchor
    rewrite.insert()
    for old, new in zip(node.outputs, values):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.type, new.shape, new.name, old.name = new.type or old.type, old.shape, old.name, None
    remove_unused([node])
