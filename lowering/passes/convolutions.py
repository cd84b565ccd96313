"""Convolutions as matmuls: a row is a patch of the data, read where it is, and the matrix that of the
weights [k1 ... C, M].

The matmul is implicit: k runs over a patch, and matrix kernels (schedules/cpu/blocked.py,
schedules/cuda/matmul_reader.py) find the runs of it that are consecutive. Constant weights are packed for CPUs
(pack_weights.py). On GPUs patches of types that tensor cores do not multiply are copied, for dlight's schedule of
matmuls. Groups are products of their own, several at a time where each is narrower than a vector (`Groups`); those
without constant weights, and those on GPUs, are left to TVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import ir, relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.half_precision import HALF

from ..tensorir.expressions import Expr
from .constants import FLOATS
from .main_function import rewritten

OUT_ELEMENTWISE_FUSABLE = 4  # TVM's pattern kind of a matmul: element-wise operations behind it fuse with it

# An element is in as many patches as windows overlap there: what computes it must not be fused into its copies.
_OPAQUE = 8


@dataclass(frozen=True)
class Convolution:
    """One over padded data [N, D1, ..., C]: the window's sizes, and how far its places, and windows, are apart."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    dtype: str
    """Of the result."""

    def element(
        self,
        x: te.Tensor,
        n: Expr,
        windows: list[Expr],
        k: Expr,
        channels: Expr | None = None,
        first: Expr | int = 0,
    ) -> Expr:
        """Element k of a patch, of so many channels from the first one on; all of them by default."""
        channels = x.shape[-1] if channels is None else channels
        places: list[Expr] = []
        rest = k // channels
        for size in reversed(self.kernel):
            places.insert(0, rest % size)
            rest = rest // size
        parts = zip(windows, places, self.strides, self.dilations)
        return x(n, *(window * s + place * d for window, place, s, d in parts), first + k % channels)

    def depth(self, channels: Expr) -> Expr:
        """Elements of a patch."""
        return math.prod(self.kernel) * channels


def read_convolution(call: relax.Call) -> Convolution | None:
    """What a call of a Relax operator computes, if it is a convolution."""
    if not isinstance(call.op, ir.Op) or call.op.name not in ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"):
        return None
    strides, dilations = (tuple(int(n) for n in numbers) for numbers in (call.attrs.strides, call.attrs.dilation))
    kernel = tuple(int(size) for size in list(call.args[1].ty.shape.values)[:-2])
    return Convolution(kernel, strides, dilations, int(call.attrs.groups), str(call.ty.dtype))


def implicit_matmul(
    convolution: Convolution, x: te.Tensor, shape: Sequence[Expr], element: Callable[[Expr, Expr], Expr]
) -> te.Tensor:
    """The matmul, of that shape, with a matrix whose float32 elements are element(k, j); sums are in float32."""
    k = te.reduce_axis((0, convolution.depth(x.shape[-1])), name="k")

    def sum_of_products(n: Expr, *index: Expr) -> Expr:
        *windows, j = index
        patch = convolution.element(x, n, list(windows), k.var).astype("float32")
        return te.sum(patch * element(k.var, j), axis=k)

    total = te.compute(list(shape), sum_of_products, name="convolution")
    return total if convolution.dtype == "float32" else tvm.topi.cast(total, convolution.dtype)


@dataclass(frozen=True)
class Groups:
    """`count` matmuls of `together` groups each: what one group has of the weights of another is 0."""

    count: int
    together: int

    @staticmethod
    def of(groups: int, outputs: int, lanes: int) -> Groups:
        """So many groups of so many channels each that a matmul fills a vector, if any do."""
        together = next((n for n in range(1, groups + 1) if groups % n == 0 and n * outputs >= lanes), groups)
        return Groups(groups // together, together)

    def matrices(self, weights: np.ndarray) -> list[np.ndarray]:
        """The weights [k1, ..., C / group, M] as matrices [k1 ... together C / group, together M / group]."""
        *kernel, inputs, outputs = weights.shape
        width = outputs // (self.count * self.together)
        found = []
        for first in range(0, outputs, self.together * width):
            matrix = np.zeros((*kernel, self.together * inputs, self.together * width), weights.dtype)
            for n in range(self.together):
                rows, columns = slice(n * inputs, (n + 1) * inputs), slice(n * width, (n + 1) * width)
                matrix[..., rows, columns] = weights[..., first + n * width : first + (n + 1) * width]
            found.append(matrix.reshape(-1, self.together * width))
        return found


def grouped_matmul(
    convolution: Convolution, groups: Groups, x: te.Tensor, shape: Sequence[Expr], panels: te.Tensor
) -> te.Tensor:
    """The matmuls [N, windows, count, M / count] with matrices [K, M / count] that are stored as panels
    [count, panels, K, nr]; shape is that of the convolution."""
    *_, depth, nr = panels.shape
    channels = x.shape[-1] // groups.count
    k = te.reduce_axis((0, depth), name="k")

    def sum_of_products(n: Expr, *index: Expr) -> Expr:
        *windows, group, j = index
        patch = convolution.element(x, n, list(windows), k.var, channels, group * channels).astype("float32")
        return te.sum(patch * panels(group, j // nr, k, j % nr).astype("float32"), axis=k)

    *windows, columns = shape
    total = te.compute([*windows, groups.count, columns // groups.count], sum_of_products, name="convolution")
    return total if convolution.dtype == "float32" else tvm.topi.cast(total, convolution.dtype)


def lower_convolutions(
    mod: tvm.IRModule, target: tvm.target.Target, on_tensor_cores: Sequence[str] = HALF
) -> tvm.IRModule:
    """The module with matmuls in place of Relax's convolutions in `main`. on_tensor_cores are the types of elements
    that a GPU's multiply."""
    return rewritten(mod, _Lowerer(mod, FLOATS if target.kind.name == "llvm" else on_tensor_cores))


@mutator
class _Lowerer(PyExprMutator):
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
        matrix = emit(relax.op.reshape(w, relax.ShapeExpr([convolution.depth(channels), columns])))
        if str(x.ty.dtype) not in self.implicit or convolution.dtype == "float64":
            patches = self.builder_.call_te(
                lambda x, shape: _patches(convolution, x, shape[:-1]),
                x,
                call.ty.shape,
                primfunc_name_hint="patches",
                primfunc_attrs={"op_pattern": _OPAQUE},
            )
            out_dtype = None if convolution.dtype == str(x.ty.dtype) else convolution.dtype
            return relax.op.matmul(emit(patches), matrix, out_dtype=out_dtype)
        return self.builder_.call_te(
            lambda x, shape, b: implicit_matmul(convolution, x, shape, lambda k, j: b(k, j).astype("float32")),
            x,
            call.ty.shape,
            matrix,
            primfunc_name_hint="convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )


def _patches(convolution: Convolution, x: te.Tensor, windows: Sequence[Expr]) -> te.Tensor:
    def element(n: Expr, *index: Expr) -> Expr:
        *windows, k = index
        return convolution.element(x, n, list(windows), k)

    return te.compute([*windows, convolution.depth(x.shape[-1])], element, name="patches")
