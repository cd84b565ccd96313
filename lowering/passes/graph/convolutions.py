"""Convolutions as matmuls: a row is a patch of the data, read without a copy, times the weights [k1 ... C, M].

The matmul is implicit: k runs over a patch, and matrix kernels (schedules/cpu/matmul/blocked.py,
schedules/cuda/matmul/matmul_reader.py) find its contiguous runs. Constant weights are packed for CPUs
(pack_weights.py). On GPUs patches of types that tensor cores do not multiply are copied, for dlight's matmul schedule.
Groups are separate matmuls. Several groups are combined if each is narrower than a vector (`ConvolutionGroups`). Groups
without constant weights, and those on GPUs, are left to TVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import ir, relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...tensorir.expressions import Expr
from ..compile_state import CompileState
from ..main_function import rewrite_main
from .constants import FLOATS

OUT_ELEMENTWISE_FUSABLE = 4  # TVM's pattern kind of a matmul: it fuses with element-wise operations after it

# An element is in as many patches as windows overlap there: its computation must not be fused into the copies.
_OPAQUE = 8


@dataclass(frozen=True)
class Convolution:
    """A convolution over padded data [N, D1, ..., C]: the window's sizes, its dilations, and the strides of windows."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    dtype: str
    """The type of the result."""

    def read_element(
        self,
        x: te.Tensor,
        n: Expr,
        windows: list[Expr],
        k: Expr,
        channels: Expr | None = None,
        first: Expr | int = 0,
    ) -> Expr:
        """Return element k of a patch of `channels` channels from the first one on; all channels by default."""
        channels = x.shape[-1] if channels is None else channels
        taps: list[Expr] = []
        rest = k // channels
        for size in reversed(self.kernel):
            taps.insert(0, rest % size)
            rest = rest // size
        axes = zip(windows, taps, self.strides, self.dilations)
        return x(n, *(window * s + tap * d for window, tap, s, d in axes), first + k % channels)

    def patch_size(self, channels: Expr) -> Expr:
        """Return the number of elements of a patch."""
        return math.prod(self.kernel) * channels


def read_convolution(call: relax.Call) -> Convolution | None:
    """Return the convolution that a Relax call computes, None for other calls."""
    if not isinstance(call.op, ir.Op) or call.op.name not in ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"):
        return None
    strides, dilations = (tuple(int(n) for n in numbers) for numbers in (call.attrs.strides, call.attrs.dilation))
    kernel = tuple(int(size) for size in list(call.args[1].ty.shape.values)[:-2])
    return Convolution(kernel, strides, dilations, int(call.attrs.groups), str(call.ty.dtype))


def make_implicit_matmul(
    convolution: Convolution, x: te.Tensor, shape: Sequence[Expr], element: Callable[[Expr, Expr], Expr]
) -> te.Tensor:
    """Return the matmul, of that shape, with a matrix of float32 elements element(k, j); it accumulates in float32."""
    k = te.reduce_axis((0, convolution.patch_size(x.shape[-1])), name="k")

    def compute(n: Expr, *index: Expr) -> Expr:
        *windows, j = index
        patch = convolution.read_element(x, n, list(windows), k.var).astype("float32")
        return te.sum(patch * element(k.var, j), axis=k)

    total = te.compute(list(shape), compute, name="convolution")
    return total if convolution.dtype == "float32" else tvm.topi.cast(total, convolution.dtype)


@dataclass(frozen=True)
class ConvolutionGroups:
    """`count` matmuls of `groups_per_matmul` groups each: weights between different groups are 0."""

    count: int
    groups_per_matmul: int

    @staticmethod
    def choose(groups: int, outputs: int, lanes: int) -> ConvolutionGroups:
        """Return the fewest groups of `outputs` channels each with which a matmul fills a vector, all if none do."""
        groups_per_matmul = next((n for n in range(1, groups + 1) if groups % n == 0 and n * outputs >= lanes), groups)
        return ConvolutionGroups(groups // groups_per_matmul, groups_per_matmul)

    def make_matrices(self, weights: np.ndarray) -> list[np.ndarray]:
        """Return the weights [k1, ..., C / group, M] as matrices [k1 ... n C / group, n M / group] of n groups each."""
        *kernel, inputs, outputs = weights.shape
        width = outputs // (self.count * self.groups_per_matmul)
        matrices = []
        for first in range(0, outputs, self.groups_per_matmul * width):
            matrix = np.zeros((*kernel, self.groups_per_matmul * inputs, self.groups_per_matmul * width), weights.dtype)
            for n in range(self.groups_per_matmul):
                rows, columns = slice(n * inputs, (n + 1) * inputs), slice(n * width, (n + 1) * width)
                matrix[..., rows, columns] = weights[..., first + n * width : first + (n + 1) * width]
            matrices.append(matrix.reshape(-1, self.groups_per_matmul * width))
        return matrices


def make_grouped_convolution(
    convolution: Convolution,
    groups: ConvolutionGroups,
    x: te.Tensor,
    shape: Sequence[Expr],
    element: Callable[..., Expr],
) -> te.Tensor:
    """Return the matmuls [N, windows, count, M / count] with `count` matrices of elements element(group, k, j).

    shape is that of the convolution.
    """
    channels = x.shape[-1] // groups.count
    k = te.reduce_axis((0, convolution.patch_size(channels)), name="k")

    def compute(n: Expr, *index: Expr) -> Expr:
        *windows, group, j = index
        patch = convolution.read_element(x, n, list(windows), k.var, channels, group * channels).astype("float32")
        return te.sum(patch * element(group, k, j), axis=k)

    *windows, columns = shape
    total = te.compute([*windows, groups.count, columns // groups.count], compute, name="convolution")
    return total if convolution.dtype == "float32" else tvm.topi.cast(total, convolution.dtype)


def lower_convolutions(state: CompileState) -> CompileState:
    """Lower Relax's convolutions in `main` to matmuls."""
    implicit = FLOATS if state.target.tvm.kind.name == "llvm" else state.tensor_core_dtypes
    return replace(state, module=rewrite_main(state.module, _ConvolutionLowerer(state.module, implicit)))


@mutator
class _ConvolutionLowerer(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, implicit: Sequence[str]) -> None:
        super().__init__(mod)
        self.implicit = implicit

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        convolution = read_convolution(call)
        if convolution is None or convolution.groups > 1:
            return call
        x, w = call.args
        emit = self.builder_.emit
        *_, channels, columns = w.ty.shape.values
        matrix = emit(relax.op.reshape(w, relax.ShapeExpr([convolution.patch_size(channels), columns])))
        if str(x.ty.dtype) not in self.implicit or convolution.dtype == "float64":
            patches = self.builder_.call_te(
                lambda x, shape: _make_patches(convolution, x, shape[:-1]),
                x,
                call.ty.shape,
                primfunc_name_hint="patches",
                primfunc_attrs={"op_pattern": _OPAQUE},
            )
            out_dtype = None if convolution.dtype == str(x.ty.dtype) else convolution.dtype
            return relax.op.matmul(emit(patches), matrix, out_dtype=out_dtype)
        return self.builder_.call_te(
            lambda x, shape, b: make_implicit_matmul(convolution, x, shape, lambda k, j: b(k, j).astype("float32")),
            x,
            call.ty.shape,
            matrix,
            primfunc_name_hint="convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )


def _make_patches(convolution: Convolution, x: te.Tensor, windows: Sequence[Expr]) -> te.Tensor:
    def element(n: Expr, *index: Expr) -> Expr:
        *windows, k = index
        return convolution.read_element(x, n, list(windows), k)

    return te.compute([*windows, convolution.patch_size(x.shape[-1])], element, name="patches")
