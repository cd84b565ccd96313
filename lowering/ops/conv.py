"""ONNX Conv over any number of spatial axes: [N, C, D1, ...] with weights [M, C / group, k1, ...] gives [N, M, ...].

Without groups it is a matrix product of patches (im2col) with the weights, so that it gets packed weights and the
matrix kernels; with groups it is a kernel of its own.
"""

from __future__ import annotations

from tvm import relax, te, tirx

from ..importing import symbolic
from ..importing.compute import Element, agreed, reduced, relax_call, require_numbers, total, widened, with_shape
from ..importing.node import Node
from ..importing.values import Value, product
from . import op
from .asserted import asserted, divisible
from .matmul import matrix_product, permuted, rounded
from .window import Window, fitting

# An element is in as many patches as windows overlap there: what computes it must not be fused into its copies.
_COPY = {"op_pattern": 8}


@op("Conv", since=1)
def conv(node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    require_numbers(node, x, w)
    kernel = [k for k in w.shape[2:] if isinstance(k, int)]
    if x.rank < 3 or w.rank != x.rank or len(kernel) != x.rank - 2:
        raise node.error(
            f"X {list(x.shape)} and W {list(w.shape)} are no data and weights of a convolution.",
            "X is [N, C, D1, ...] and W is [M, C / group, k1, ...] with numbers for k1, ...",
        )
    group = node.attr("group", 1)
    said = node.attr("kernel_shape", None) or kernel
    if said != kernel:
        raise node.error(f"attribute kernel_shape is {said}, and W is {list(w.shape)}.", "Make them agree.")
    window = Window.of(node, kernel)
    w = divisible(node, w, 0, group, "group")
    x = divisible(node, x, 1, group, "group")
    channels = agreed(
        node, "the number of channels (C, and group times the second dimension of W)", x.shape[1], w.shape[1] * group
    )
    x = with_shape(node, x, (x.shape[0], channels, *x.shape[2:]))
    w = asserted(node, w, (w.shape[0], symbolic.divide(node.symbols, channels, group), *kernel))
    if bias is not None:
        if bias.rank != 1:
            raise node.error(f"{node.name_of(bias, False)} has rank {bias.rank}.", "Make it [M].")
        bias = asserted(node, bias, w.shape[:1])
    x = fitting(node, x, window)
    if group == 1:
        return _as_product(node, x, w, bias, window)
    tensors = [node.tensor(v) for v in (x, w, bias) if v is not None]
    return node.emit_te(lambda *t: _grouped(window, group, *t), *tensors, primfunc_name_hint="conv")


def _as_product(node: Node, x: Value, w: Value, bias: Value | None, window: Window) -> Value:
    """[N, ..., C k1 k2 ...] patches times [C k1 k2 ..., M], with channels moved behind N at last."""
    rank = x.rank
    patches = node.emit_te(
        lambda t: _patches(window, t), node.tensor(x), primfunc_name_hint="patches", primfunc_attrs=_COPY
    )
    y = matrix_product(node, patches, permuted(node, _flat(node, w), [1, 0]))
    if bias is not None:
        y = relax_call(node, relax.op.add, y, rounded(node, bias, y.dtype))
    return permuted(node, rounded(node, y, x.dtype), [0, rank - 1, *range(1, rank - 1)])


def _flat(node: Node, w: Value) -> Value:
    """W as a matrix [M, C k1 k2 ...]; a constant stays one, so that it can be packed."""
    if w.constant is not None:
        return node.constant(w.constant.reshape(w.shape[0], product(w.constant.shape[1:])))
    shape = (w.shape[0], product(w.shape[1:]))
    return node.emit(relax.op.reshape(node.tensor(w), node.shape_expr(shape)), w.dtype)


def _read(x: te.Tensor, window: Window, n: Element, c: Element, windows: list[Element], ks: list[Element]) -> Element:
    """The element of x at positions ks of windows, 0 in the padding."""
    axes = range(len(ks))
    at = [window.position(axis, x.shape[2 + axis], windows[axis], ks[axis]) for axis in axes]
    if not window.leaves:
        return x(n, c, *at)
    inside = tirx.all(*(tirx.all(p >= 0, p < x.shape[2 + axis]) for axis, p in zip(axes, at)))
    return tirx.if_then_else(inside, x(n, c, *at), tirx.const(0, x.dtype))


def _patches(window: Window, x: te.Tensor) -> te.Tensor:
    counts = [window.count(axis, size) for axis, size in enumerate(x.shape[2:])]

    def element(n: Element, *index: Element) -> Element:
        *windows, entry = index
        ks: list[Element] = []
        for size in reversed(window.kernel):
            ks.insert(0, tirx.floormod(entry, tirx.const(size, "int64")))
            entry = tirx.floordiv(entry, tirx.const(size, "int64"))
        return _read(x, window, n, entry, windows, ks)

    return te.compute([x.shape[0], *counts, x.shape[1] * window.elements], element, name="patches")


def _grouped(window: Window, group: int, x: te.Tensor, w: te.Tensor, *bias: te.Tensor) -> te.Tensor:
    counts = [window.count(axis, size) for axis, size in enumerate(x.shape[2:])]
    n_axes, dtype = len(counts), widened(str(x.dtype))
    # Output channels of a group; TVM refuses to divide by a constant 0.
    outputs = tirx.max(tirx.floordiv(w.shape[0], tirx.const(group, "int64")), tirx.const(1, "int64"))
    space = [x.shape[0], w.shape[0], *counts, *w.shape[1:]]

    def element(n: Element, m: Element, *index: Element) -> Element:
        windows, c, ks = list(index[:n_axes]), index[n_axes], list(index[n_axes + 1 :])
        channel = tirx.floordiv(m, outputs) * w.shape[1] + c
        return _read(x, window, n, channel, windows, ks).astype(dtype) * w(m, c, *ks).astype(dtype)

    summed = range(2 + n_axes, len(space))
    sums = reduced(space, summed, total, element, "sums")
    zeros = [tirx.const(0, "int64")] * len(summed)

    def result(n: Element, m: Element, *windows: Element) -> Element:
        y = sums(n, m, *windows, *zeros)
        return (y + bias[0](m).astype(dtype) if bias else y).astype(x.dtype)

    return te.compute([x.shape[0], w.shape[0], *counts], result, name="conv")
