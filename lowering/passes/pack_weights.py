"""Packs weights for matrix kernels, once, while compiling: here for CPUs, and in weights_by_column.py for GPUs.

A product x W with a constant matrix W becomes a product with W stored in panels (schedules/cpu/matmul.py): panel p
holds columns p * nr .. p * nr + nr - 1, and the nr elements of each row are consecutive. Columns behind the last are
zeros. Transposes and casts between the weight and the product are done on the way. A weight that has other readers is
kept too. bfloat16 that meets bfloat16 is stored in pairs of successive rows where the machine multiplies such pairs.

Quantised matrices stay integers and scales (schedules/reading/codes.py), and float ones become so when a scheme is
asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cpu.panels import panel_width
from schedules.cpu.vector import Machine, machine
from schedules.reading.codes import NIBBLES, element, pack_nibbles

from ..importing.quantised import INT4_BLOCK, Quantised, Scheme, quantise
from .convolutions import (
    OUT_ELEMENTWISE_FUSABLE,
    Convolution,
    Groups,
    grouped_product,
    implicit_product,
    read_convolution,
)
from .weights_by_column import weights_by_column

Weights = dict[str, np.ndarray]

_FLOATS = ("float32", "float16", "bfloat16")
_MIN_COLUMNS = 4  # products with fewer are dot products: nothing to pack
_MIN_BLOCK = 8  # rows that share a scale; with fewer, scales would be as large as the matrix


def pack_weights(
    mod: tvm.IRModule,
    weights: dict[str, np.ndarray | Quantised],
    target: tvm.target.Target,
    scheme: Scheme | None = None,
    notes: list[str] | None = None,
) -> tuple[tvm.IRModule, Weights]:
    """The module with `main` multiplying by packed weights, and its weights in the order of its parameters.

    weights holds main's parameters behind the first `num_input`, by name; those that nobody reads any more are dropped.
    Only matrices of float32, float16 and bfloat16 on the right of a product are packed, and only for CPUs; sums are in
    float32. scheme says what float matrices become: int8 with a scale for each column, int4 with a scale for each
    column and 32 rows, or f16. What that cost is said in `notes`. Quantised weights with other readers become floats.
    """
    if target.kind.name != "llvm":
        return weights_by_column(mod, {name: _plain(weight) for name, weight in weights.items()})
    packer = _Packer(mod, weights, machine(target), scheme)
    main = mod["main"]
    body = packer.visit_expr(main.body)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    candidates = list(main.params[len(inputs) :]) + [var for parts in packer.packed.values() for var, _ in parts]
    arrays = {**weights, **{var.name: array for parts in packer.packed.values() for var, array in parts}}
    mod = packer.builder_.get()
    mod["main"] = relax.Function([*inputs, *candidates], body, main.ret_ty, main.is_pure, main.attrs)
    mod = relax.transform.DeadCodeElimination()(mod)
    if scheme is not None and notes is not None:
        notes.append(packer.cost())
    return _drop_unused(mod, len(inputs), arrays)


def _plain(weight: np.ndarray | Quantised) -> np.ndarray:
    return weight.array() if isinstance(weight, Quantised) else weight


def _drop_unused(
    mod: tvm.IRModule, inputs: int, arrays: dict[str, np.ndarray | Quantised]
) -> tuple[tvm.IRModule, Weights]:
    main = mod["main"]
    used = set(relax.analysis.free_vars(main.body))
    kept = [var for var in main.params[inputs:] if var in used]
    params = [*main.params[:inputs], *kept]
    mod["main"] = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    return mod, {var.name: _plain(arrays[var.name]) for var in kept}


@mutator
class _Packer(PyExprMutator):
    """Rewrites products; `packed` holds the new parameters and their contents, by weight and what was done to it."""

    def __init__(
        self, mod: tvm.IRModule, weights: dict[str, np.ndarray | Quantised], cpu: Machine, scheme: Scheme | None
    ) -> None:
        super().__init__(mod)
        self.weights = weights
        self.cpu = cpu
        self.scheme = scheme
        self.packed: dict[tuple[str, ...], list[tuple[relax.Var, np.ndarray]]] = {}
        self.element: dict[tuple[str, ...], Element] = {}
        self.parameters = set(mod["main"].params)
        self.compressed = 0
        self.left = 0
        self.bytes = [0, 0]  # of the compressed matrices: before and after
        self.squares = [0.0, 0.0]  # of their errors, and of their elements

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        convolution = read_convolution(call)
        if convolution is not None:
            return self.convolved(call, convolution)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constant(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or matrix.shape[1] < _MIN_COLUMNS or x.ty.ndim < 1:
            return call
        if not {*types, matrix.dtype.name} <= set(_FLOATS):
            return call
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        if pairs:
            steps = (*steps, "pairs")
        if steps not in self.packed:
            self.pack(steps, matrix, pairs)
        columns, dtype, element = matrix.shape[1], str(call.ty.dtype), self.element[steps]
        return self.builder_.call_te(
            lambda x, *parts: packed_matmul(x, list(parts), columns, dtype, element),
            x,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def convolved(self, call: relax.Call, convolution: Convolution) -> relax.Expr:
        """A convolution, by packed weights where they are constant; elements of theirs stay what they are."""
        x, (steps, weights) = call.args[0], self.constant(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if not isinstance(weights, np.ndarray) or not {*types, weights.dtype.name} <= set(_FLOATS):
            return call
        if convolution.groups > 1:
            return self.grouped(call, convolution, steps, weights)
        matrix = weights.reshape(-1, weights.shape[-1])
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        steps = (*steps, "patches", *(["pairs"] if pairs else []))
        if steps not in self.packed:
            self.store(steps, matrix, pairs)
        element = self.element[steps]
        return self.builder_.call_te(
            lambda x, shape, *parts: implicit_product(convolution, x, shape, functools.partial(element, list(parts))),
            x,
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def grouped(
        self, call: relax.Call, convolution: Convolution, steps: tuple[str, ...], weights: np.ndarray
    ) -> relax.Expr:
        groups = Groups.of(convolution.groups, weights.shape[-1] // convolution.groups, self.cpu.lanes("float32"))
        steps = (*steps, "groups")
        if steps not in self.packed:
            matrices = groups.matrices(weights)
            nr = panel_width(matrices[0].shape[1], self.cpu)
            self.keep(steps, {"packed": np.stack([pack(matrix, nr) for matrix in matrices])})
        products = self.builder_.call_te(
            lambda x, shape, panels: grouped_product(convolution, groups, x, shape, panels),
            call.args[0],
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )
        return relax.op.reshape(self.builder_.emit(products), call.ty.shape)

    def pack(self, steps: tuple[str, ...], matrix: np.ndarray | Quantised, pairs: bool) -> None:
        """Stores a matrix [K, N], compressed if asked for, in panels."""
        if isinstance(matrix, np.ndarray) and self.scheme is not None:
            matrix = self.compress(matrix)
        self.store(steps, matrix, pairs)

    def store(self, steps: tuple[str, ...], matrix: np.ndarray | Quantised, pairs: bool) -> None:
        """Stores a matrix [K, N] in panels, of pairs of rows if asked for."""
        if isinstance(matrix, Quantised) and min(matrix.block[0], matrix.shape[0]) < _MIN_BLOCK:
            matrix = matrix.array()
        nr = panel_width(matrix.shape[1], self.cpu)
        if isinstance(matrix, Quantised):
            parts, self.element[steps] = _codes(matrix, nr)
        elif pairs:
            parts, self.element[steps] = {"packed": pack_pairs(matrix, nr)}, _element_of_pair
        else:
            parts, self.element[steps] = {"packed": pack(matrix, nr)}, _plain_element
        self.keep(steps, parts)

    def keep(self, steps: tuple[str, ...], parts: Mapping[str, np.ndarray]) -> None:
        """Makes new parameters of arrays, by what they are of the weight that `steps` names."""
        self.packed[steps] = []
        for part, array in parts.items():
            name = "_".join((*steps, part))
            while name in self.weights:
                name += "_"
            var = relax.Var(name, relax.TensorType(array.shape, array.dtype.name))
            self.packed[steps].append((var, array))

    def compress(self, matrix: np.ndarray) -> np.ndarray | Quantised:
        """A float matrix [K, N] in the scheme; as it is where that is no smaller, or cannot hold it."""
        bits = {"f16": 16, "int8": 8, "int4": 4}[self.scheme or "f16"]
        if matrix.dtype.itemsize * 8 <= bits or not np.isfinite(matrix).all() or matrix.shape[0] < _MIN_BLOCK:
            self.left += 1
            return matrix
        with np.errstate(over="ignore"):
            smaller = matrix.astype(np.float16) if bits == 16 else quantise(matrix, bits)
        exact, array = matrix.astype(np.float32), _plain(smaller).astype(np.float32)
        if not np.isfinite(array).all():
            self.left += 1
            return matrix
        self.compressed += 1
        self.bytes[0] += matrix.nbytes
        self.bytes[1] += smaller.nbytes
        self.squares[0] += float(np.square(array - exact, dtype=np.float64).sum())
        self.squares[1] += float(np.square(exact, dtype=np.float64).sum())
        return smaller

    def cost(self) -> str:
        """What compression did, for the user."""
        how = {
            "f16": "f16",
            "int8": "int8 with a scale for each column",
            "int4": f"int4 with a scale for each column and {INT4_BLOCK} rows",
        }[self.scheme or "f16"]
        before, after = (size / 2**20 for size in self.bytes)
        error = (self.squares[0] / max(self.squares[1], np.finfo(np.float64).tiny)) ** 0.5
        left = f"; {self.left} could not be" if self.left else ""
        return (
            f"{self.compressed} constant matrices of products are {how}: {after:.1f} MiB instead of {before:.1f}, "
            f"root mean square error {error:.2g} of theirs{left}"
        )

    def constant(self, expr: relax.Expr) -> tuple[tuple[str, ...], np.ndarray | Quantised | None]:
        """The weight that `expr` is made from, with the name and what was done to it; None when there is more to it."""
        if isinstance(expr, relax.Var) and expr in self.parameters:
            name = expr.name
            return (name,), self.weights.get(name)
        bound = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, relax.Var):
            return self.constant(bound)
        if isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op):
            steps, array = self.constant(bound.args[0]) if bound.args else ((), None)
            if array is not None and bound.op.name == "relax.permute_dims" and array.ndim == 2:
                axes = bound.attrs.axes
                axes = (1, 0) if axes is None else tuple(int(axis) for axis in axes)
                return (*steps, f"permuted_{axes[0]}{axes[1]}"), array.transpose(axes)
            if array is not None and bound.op.name == "relax.astype" and str(bound.attrs.dtype) in _FLOATS:
                dtype = str(bound.attrs.dtype)
                if dtype == "float32" and array.dtype.name in _FLOATS:
                    return steps, array  # the kernel widens elements
                return (*steps, dtype), array.astype(np.dtype(dtype))
        return (), None


def pack(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), K, nr], zeros behind column N."""
    rows, columns = matrix.shape
    panels = -(-columns // nr)
    padded = np.zeros((rows, panels * nr), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(rows, panels, nr).transpose(1, 0, 2))


def pack_pairs(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), ceil(K / 2), nr, 2], zeros behind column N and row K."""
    even = np.zeros((-(-len(matrix) // 2) * 2, matrix.shape[1]), matrix.dtype)
    even[: len(matrix)] = matrix
    return np.stack([pack(even[half::2], nr) for half in (0, 1)], axis=-1)


# B[k, j] in float32, of its parts in panels.
Element: TypeAlias = Callable[..., tvm.ir.Expr]


def _plain_element(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = parts
    nr = panels.shape[-1]
    return panels(j // nr, k, j % nr).astype("float32")


def _element_of_pair(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = parts
    nr = panels.shape[-2]
    return panels(j // nr, k // 2, j % nr, k % 2).astype("float32")


def _codes(matrix: Quantised, nr: int) -> tuple[dict[str, np.ndarray], Element]:
    """The parts of a matrix [K, N], and its elements."""
    depth, columns = matrix.shape
    block = matrix.block[0] if matrix.block[0] < depth else 0
    nibbles = matrix.bits == 4 and block % NIBBLES == 0
    parts = {
        "codes": pack(pack_nibbles(matrix.codes) if nibbles else matrix.codes, nr),
        "scales": pack(matrix.scales.repeat(matrix.block[1], axis=1)[:, :columns], nr),
    }
    if matrix.zeros is not None:
        parts["zeros"] = pack(matrix.zeros.repeat(matrix.block[1], axis=1)[:, :columns], nr)

    def code(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
        codes, scales, *zeros = parts
        return element(codes, scales, zeros[0] if zeros else None, k, j, nr, block, nibbles)

    return parts, code


def packed_matmul(x: te.Tensor, parts: list[te.Tensor], columns: int, dtype: str, element: Element) -> te.Tensor:
    """x [..., K] times a matrix [K, columns] that is stored in panels, in `dtype`."""
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def sum_of_products(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *row, j = index
        return te.sum(x(*row, k).astype("float32") * element(parts, k, j), axis=k)

    total = te.compute((*x.shape[:-1], columns), sum_of_products, name="matmul")
    return total if dtype == "float32" else topi.cast(total, dtype)
