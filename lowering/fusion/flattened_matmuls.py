"""Matmuls whose rows are flattened before and unflattened after: MatMul takes them as they are."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.rewriting.matching import Rewrite, attribute, dims, only_reader, operand, producer
from ..graph.rewriting.opset import ATTENTION_OPSET
from .node_pass import NodePass


class UnflattenMatmulsPass(NodePass):
    """Rewrite of a Gemm between two Reshapes, X -> [M, K] and [M, N] -> Y [.., N], as MatMul and Add.

    The nodes before and after it, such as norms, activations and residuals, have all dimensions of Y. The matmul then
    has them too, so that these nodes can be fused with it. Gemm has a bias or none, and B [K, N] or, with transB, [N,
    K].

    1. X [.., K].
    2. X [.., H, D], heads of an attention, which the first Reshape merges.

    The match is rejected for factors alpha and beta, a bias that differs by row, dimensions that are not provably those
    of X, integers, and matmuls whose flat form another node reads.
    """

    since = ATTENTION_OPSET
    operators = ("Gemm",)

    def rewrite(self, node: ir.Node) -> bool:
        return _try_unflatten(node)


def _try_unflatten(gemm: ir.Node) -> bool:
    before, after = producer(operand(gemm, 0), "Reshape"), only_reader(gemm.outputs[0], "Reshape")
    if before is None or after is None or operand(after, 0) is not gemm.outputs[0]:
        return False
    x, b, y = operand(before, 0), operand(gemm, 1), after.outputs[0]
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    is_plain = attribute(gemm, "alpha", 1.0) == attribute(gemm, "beta", 1.0) == 1.0 and not attribute(gemm, "transA", 0)
    if not is_plain or x.dtype is None or not x.dtype.is_floating_point() or len(dims(b)) != 2:
        return False
    k, n = dims(b)[::-1] if attribute(gemm, "transB", 0) else dims(b)
    outer, inner = dims(x)[: len(dims(y)) - 1], dims(x)[len(dims(y)) - 1 :]
    if dims(y) != (*outer, n) or len(outer) < 2 or not isinstance(k, int) or dims(operand(gemm, 0))[1:] != (k,):
        return False
    if inner != (k,) and len(inner) < 2:
        return False
    if bias is not None and (bias.shape is None or any(size != 1 for size in dims(bias)[:-1])):
        return False
    new = Rewrite(after)
    if inner != (k,):
        x = new.emit("Reshape", [x, new.emit_integers(*[0] * len(outer), k)], shape=(*outer, k))
    matrix = new.emit_transpose(b, [1, 0]) if attribute(gemm, "transB", 0) else b
    matmul = new.emit("MatMul", [x, matrix], shape=dims(y))
    result = matmul if bias is None else new.emit("Add", [matmul, bias], shape=dims(y))
    new.replace([before, gemm, after], y, result)
    return True
