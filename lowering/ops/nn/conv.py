"""ONNX Conv over any number of spatial axes: [N, C, D1, ...] with [M, C / group, k1, ...] gives [N, M, ...].

All of it happens with channels last (ops/helpers/channels.py). The convolution is a matmul over padded data
(passes/graph/convolutions.py). With one channel per group it is a sum over windows
(schedules/cpu/elementwise/sliding.py).
"""

from __future__ import annotations

from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Size, Value, is_empty
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_divisible, assert_shape
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import Element, relax_call, require_numbers, unify_sizes, widen_dtype
from ..helpers.kernels import compute
from ..helpers.requirements import require_rank
from ..math.matmul import emit_matmul, permute_axes, round_to
from ..tensor.reshape import reshape_to
from .window import SpatialWindow, assert_window_fits

# Relax's convolutions, which packing and legalization support, by the number of spatial axes.
_CONVOLUTIONS = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
_AXES = "DHW"


@op("Conv", since=1)
def conv(node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    return channels_second(node, round_to(node, convolve(node, x, w, bias), x.dtype))


def convolve(node: Node, x: Value, w: Value, bias: Value | None) -> Value:
    """Emit Conv with channels last [N, D1, ..., M], in the type of the accumulator."""
    bias = None if bias is None else assert_bias_vector(node, bias, w.shape[0])
    y = emit_convolution(node, *read_conv_operands(node, x, w))
    return y if bias is None else relax_call(node, relax.op.add, y, round_to(node, bias, y.dtype))


def read_conv_operands(node: Node, x: Value, w: Value) -> tuple[Value, Value, SpatialWindow, int]:
    """Return data, weights, the window and the number of groups.

    X [N, C, D1, ...] becomes [N, D1, ..., C], and W [M, C / group, k1, ...] becomes [k1, ..., C / group, M]. Their
    sizes agree or are asserted to at run time.

    Raises:
        NodeError: The operands have another form.
    """
    kernel, group = read_kernel_shape(node, x, w, "[M, C / group, k1, ...]"), node.attr("group", 1)
    window = SpatialWindow.read(node, kernel)
    w = assert_divisible(node, w, 0, group, "group")
    x = assert_divisible(node, x, 1, group, "group")
    channels = unify_sizes(
        node, "the number of channels (C, and group times the second dimension of W)", x.shape[1], w.shape[1] * group
    )
    x = node.cast_shape(x, (x.shape[0], channels, *x.shape[2:]))
    w = assert_shape(node, w, (w.shape[0], symbolic.divide(node.symbols, channels, group), *kernel))
    return assert_window_fits(node, channels_last(node, x), window), transpose_weights(node, w), window, group


def read_kernel_shape(node: Node, x: Value, w: Value, form: str) -> list[int]:
    """Return the sizes k1, ... of the windows of the weights.

    Raises:
        NodeError: The operands do not have this form.
    """
    require_numbers(node, x, w)
    kernel = [k for k in w.shape[2:] if isinstance(k, int)]
    if x.rank < 3 or w.rank != x.rank or len(kernel) != x.rank - 2:
        raise node.error(
            "conv.shape_unsupported",
            f"X {list(x.shape)} and W {list(w.shape)} are not data and weights of a convolution.",
            f"Give X the shape [N, C, D1, ...], and W the shape {form} with static k1, ...",
        )
    attribute = node.attr("kernel_shape", None) or kernel
    if attribute != kernel:
        raise node.error(
            "conv.kernel_shape_mismatch",
            f"attribute kernel_shape is {attribute}, and W is {list(w.shape)}.",
            "Make them agree.",
        )
    return kernel


def assert_bias_vector(node: Node, bias: Value, outputs: Size) -> Value:
    """Return the bias, proved or asserted at run time to be [M]."""
    require_rank(node, "B", bias, "[M]", code="conv.bias_rank_unsupported")
    return assert_shape(node, bias, (outputs,))


def emit_convolution(node: Node, x: Value, w: Value, window: SpatialWindow, group: int) -> Value:
    """Emit x [N, D1, ..., C] with weights [k1, ..., C / group, M], in the accumulator type."""
    group_channels = w.shape[-2]
    is_matmul = len(window.kernel) in _CONVOLUTIONS and (group == 1 or (w.constant is not None and group_channels > 1))
    emit = _emit_matmul_conv if is_matmul and not is_empty((group_channels, w.shape[-1])) else accumulate_windows
    return emit(node, x, w, window, group)


def transpose_weights(node: Node, w: Value) -> Value:
    """Return W as [k1, ..., C / group, M]; a constant stays constant, so that it can be packed."""
    axes = [*range(2, w.rank), 1, 0]
    return permute_axes(node, w, axes) if w.constant is None else node.constant(w.constant.transpose(axes))


def _emit_matmul_conv(node: Node, x: Value, w: Value, window: SpatialWindow, group: int) -> Value:
    if group == 1 and window.elements == 1 and set(window.strides) == {1} and not window.can_exceed_data:
        shape = w.shape[-2:]
        matrix = reshape_to(node, w, shape) if w.constant is None else node.constant(w.constant.reshape(shape))
        return emit_matmul(node, x, matrix)
    axes = _AXES[-len(window.kernel) :]
    dtype = widen_dtype(x.dtype)
    y = _CONVOLUTIONS[len(window.kernel)](
        node.tensor(_emit_padded(node, x, window)),
        node.tensor(w),
        strides=list(window.strides),
        dilation=list(window.dilations),
        data_layout=f"N{axes}C",
        kernel_layout=f"{axes}IO",
        groups=group,
        out_dtype=dtype if dtype != x.dtype else None,
    )
    return node.emit(y)


def _emit_padded(node: Node, x: Value, window: SpatialWindow) -> Value:
    """Return x [N, D1, ..., C] with the zeros around it that windows reach."""
    if not window.can_exceed_data:
        return x
    n = len(window.kernel)
    sizes = x.shape[1:-1]
    before = [node.simplify(window.before(axis, size)) for axis, size in enumerate(sizes)]
    reached = [
        node.simplify((window.count(axis, size) - 1) * window.strides[axis] + window.reach(axis))
        for axis, size in enumerate(sizes)
    ]

    def element(index: tuple[Element, ...], x: Element, *numbers: Element) -> Element:
        starts, extents = numbers[:n], numbers[n:]
        position = [i - start for i, start in zip(index[1:-1], starts)]
        is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(position, extents)))
        value = x(index[0], *position, index[-1])
        return tirx.if_then_else(is_inside, value, tirx.const(0, value.ty))

    shape = (x.shape[0], *reached, x.shape[-1])
    return compute(node, "padded", element, [x], shape, sizes=[*before, *sizes])


def accumulate_windows(node: Node, x: Value, w: Value, window: SpatialWindow, group: int) -> Value:
    """Accumulate over the windows of x [N, D1, ..., C] with the weights of their group.

    The weights are [k1, ..., C / group, M].
    """
    tensors = [node.tensor(v) for v in (x, w)]
    return node.emit_te(lambda x, w: _compute_windows(window, group, x, w), *tensors, primfunc_name_hint="conv")


def _compute_windows(window: SpatialWindow, group: int, x: te.Tensor, w: te.Tensor) -> te.Tensor:
    sizes, channels = x.shape[1:-1], w.shape[-2]
    counts = [window.count(axis, size) for axis, size in enumerate(sizes)]
    n_axes, dtype = len(counts), widen_dtype(str(x.dtype))
    # Output channels of a group; TVM rejects a division by a constant 0.
    outputs = tirx.max(tirx.floordiv(w.shape[-1], tirx.const(group, "int64")), tirx.const(1, "int64"))
    kernel = [te.reduce_axis((0, k), name=f"k{axis}") for axis, k in enumerate(window.kernel)]
    has_channels = not (isinstance(channels, tirx.IntImm) and channels.value == 1)
    inner = [te.reduce_axis((0, channels), name="c")] if has_channels else []

    def element(n: Element, *index: Element) -> Element:
        *windows, m = index
        ks, c = [k.var for k in kernel], inner[0].var if inner else tirx.const(0, "int64")
        position = [window.position(axis, sizes[axis], windows[axis], ks[axis]) for axis in range(n_axes)]
        value = x(n, *position, tirx.floordiv(m, outputs) * channels + c)
        if window.can_exceed_data:
            is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(position, sizes)))
            value = tirx.if_then_else(is_inside, value, tirx.const(0, x.dtype))
        return te.sum(value.astype(dtype) * w(*ks, c, m).astype(dtype), axis=[*kernel, *inner])

    return te.compute([x.shape[0], *counts, w.shape[-1]], element, name="conv")
