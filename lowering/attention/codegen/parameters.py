"""The parameters of the function under construction: the inputs and outputs of a problem's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..expr.bound import BoundExpr
from ..expr.emit import EmitVectorCall, cast
from ..expr.node import Expr as Expression
from ..record.cache_layout import CacheLayout
from ..record.formula import Formula
from ..record.problem import ATTRIBUTE, AttentionProblem

Size: TypeAlias = Any  # int | tirx.Var
TensorSpec: TypeAlias = tuple[list[Size], str]  # shape and element type


class AttentionParameters:
    """The parameters `problem.parameters()` of the PrimFunc frame that is open in the IRBuilder, in that order.

    The constructor declares them and the function's attributes. B, S and T are int if the problem's size is static.
    Else they are the int64 variable bound by the shapes, or the scalar with the maximum rows or keys of a batch.
    buffers are the tensors by name, scalars the int64 numbers. scope is the storage scope of small variables: "global"
    on a CPU, "local" in the threads of a GPU. emit_vector_call emits a kernel's own functions of vectors, for
    expressions.
    """

    def __init__(
        self, problem: AttentionProblem, scope: str = "global", emit_vector_call: EmitVectorCall | None = None
    ) -> None:
        self.problem, self.scope, self.emit_vector_call = problem, scope, emit_vector_call
        self._sizes = SymbolicSizes()
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, **self.attributes()})
        names, scalars = self.names(), problem.scalars()
        arguments = {name: T.arg(name, T.int64() if name in scalars else T.handle()) for name in names}
        self.scalars = {name: arguments[name] for name in names if name in scalars}
        self.B = self._size("B", problem.batch)
        self.S = self.scalars.get("most_rows", self._size("S", problem.q_len))
        self.T = self.scalars.get("most_keys", self._size("T", problem.kv_len))
        tensors = self.tensors()
        self.buffers = {
            name: declare_buffer(name, arguments[name], *tensors[name]) for name in names if name not in scalars
        }

    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters, in order."""
        return self.problem.parameters()

    def attributes(self) -> dict[str, str]:
        """Return the attributes of the function that describe it."""
        return {ATTRIBUTE: self.problem.to_json()}

    def tensors(self) -> dict[str, TensorSpec]:
        """Return shape and element type of all tensors that may be among the parameters."""
        return (
            self._describe_rows()
            | self._describe_cache()
            | self._describe_mask()
            | self._describe_tables()
            | self._describe_formula_tables(self.problem.score)
        )

    def _describe_rows(self) -> dict[str, TensorSpec]:
        """Return the tensors by query rows."""
        p = self.problem
        sizes = {"b": self.B, "h": p.q_heads, "t": self._size("tokens") if p.is_ragged else self.S}

        def shape(dim: int) -> list[Size]:
            return [(sizes | {"d": dim, "e": p.q_heads * dim})[axis] for axis in p.row_axes]

        by_row = [sizes["t"], p.q_heads] if p.is_ragged else [self.B, p.q_heads, self.S]
        return {
            "q": (shape(p.head_dim), p.dtype),
            "y": (shape(p.v_head_dim), p.dtype),
            "qk": ([self.B, p.q_heads, self.S, self.T], p.dtype),
            "lse": (by_row, p.acc_dtype),
            "max": (by_row, p.acc_dtype),
        }

    def _describe_cache(self) -> dict[str, TensorSpec]:
        """Return keys and values, and their scales."""
        p = self.problem
        dims, types = (p.head_dim, p.v_head_dim), (p.dtype, p.v_dtype)
        return describe_cache_tensors(p.layout, p.kv_heads, dims, types, self.B, self.T, self._size)

    def _describe_mask(self) -> dict[str, TensorSpec]:
        """Return the mask, or the tables of a formula."""
        mask, p = self.problem.mask, self.problem
        if mask is None:
            return {}
        if isinstance(mask, Formula):
            return self._describe_formula_tables(mask)
        rows = self._size("tokens") if p.is_ragged else self.S
        full = (self.B, p.q_heads, rows, self._size("mask_len") if mask.pad or mask.starts else self.T)
        dims = [
            self._size(f"mask_{axis}") if axis in mask.broadcasts else size if dim is None else dim
            for axis, (size, dim) in enumerate(zip(full, mask.dims, strict=True))
        ]
        return {"mask": (dims, mask.dtype)}

    def _describe_tables(self) -> dict[str, TensorSpec]:
        """Return the other tables that a kernel reads, by head, by batch or by request."""
        return describe_cache_tables(self.problem.layout, self.B, self._size) | {
            "scale": ([1], self.problem.acc_dtype),
            "sink": ([self.problem.q_heads], self.problem.dtype),
            "lengths": ([self.B], "int64"),
            "lefts": ([self.B], "int64"),
            "sink_keys": ([self.B], "int64"),
            "row_starts": ([self.B + 1], "int64"),
            "key_starts": ([self.B], "int64"),
        }

    def _describe_formula_tables(self, formula: Formula | None) -> dict[str, TensorSpec]:
        return {
            name: ([self._size(f"{name}_len_{axis}") for axis in range(rank)], dtype)
            for name, (rank, dtype) in (formula.tables() if formula is not None else {}).items()
        }

    def _size(self, name: str, constant: int | None = None) -> Size:
        """Return the number, or the variable of that name."""
        return self._sizes(name) if constant is None else constant

    def bind(self, value: Expression) -> BoundExpr:
        """Return the expression over these parameters."""
        return BoundExpr(value, self.buffers, self.scalars, self.scope, self.emit_vector_call)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        """Allocate memory for a small variable of the thread that runs the code."""
        return T.alloc_buffer((size,), dtype, scope=self.scope)


class SymbolicSizes:
    """The int64 variables of the PrimFunc frame that is open in the IRBuilder, by name; created at first use."""

    def __init__(self) -> None:
        self._variables: dict[str, tirx.Var] = {}

    def __call__(self, name: str) -> tirx.Var:
        if name not in self._variables:
            self._variables[name] = IRBuilder.name(name, T.int64())
        return self._variables[name]


def describe_cache_tensors(
    layout: CacheLayout,
    heads: int,
    dims: tuple[int, int],
    types: tuple[str, str],
    batches: Size,
    keys: Size,
    size: Callable[[str], Size],
) -> dict[str, TensorSpec]:
    """Return the buffers of a cache, and their scales if it is quantized.

    Args:
        layout: the layout of the cache.
        heads: number of key/value heads.
        dims: elements in a row of a head of keys and of values.
        types: element types of keys and of values, unless the cache is quantized.
        batches: number of batches.
        keys: keys of a batch, unless slots are mapped.
        size: returns the variable of a name, created once.
    """
    page = getattr(layout.slots, "size", None) if "p" in layout.axes else None
    sizes = {
        "b": size("cache_rows") if layout.has_lookup else batches,
        "h": heads,
        "t": page or (size("slots") if layout.is_mapped else keys),
        "p": size("page_count"),
        "l": size("layers"),
        "c": 2,
    }

    def shape(dim: int) -> list[Size]:
        return [(sizes | {"d": dim, "e": heads * dim})[axis] for axis in layout.axes]

    elements, quantization = (
        {"k": (dims[0], types[0]), "v": (dims[1], types[1]), "kv": (dims[0], types[0])},
        layout.quantization,
    )
    if quantization is None:
        return {name: (shape(dim), dtype) for name, (dim, dtype) in elements.items()}
    tensors: dict[str, TensorSpec] = {
        name: (shape(dim // quantization.packing), quantization.storage_dtype) for name, (dim, _) in elements.items()
    }
    for name, (dim, _) in elements.items():
        if quantization.channels:
            scales: list[Size] = [*([2] if name == "kv" else []), heads, dim]
        else:
            scales = shape(dim // quantization.group) if quantization.group else [2 if name == "kv" else 1]
        tensors[f"{name}_scale"] = scales, quantization.scale_dtype
    return tensors


def describe_cache_tables(layout: CacheLayout, batches: Size, size: Callable[[str], Size]) -> dict[str, TensorSpec]:
    """Return the tables that locate a cache's slots."""
    planes = [2] if getattr(layout.slots, "apart", False) else []
    count, requests = layout.beams.count if layout.beams is not None else 1, size("requests")
    return {
        "slot_starts": ([batches], "int64"),
        "pages": ([batches, *planes, size("pages_each")], "int64"),
        "ring": ([3], "int64"),
        "prompts": ([requests], "int64"),
        "beam_of": ([requests, count, size("beam_slots")], "int64"),
    }


def int64(value: int | Expr) -> Expr:
    return tirx.const(value, "int64") if isinstance(value, int) else cast(value, "int64")


def declare_buffer(name: str, argument: tirx.Var, shape: list[Size], dtype: str) -> tirx.Buffer:
    """Declare the argument as a buffer aligned to its elements and no more, as callers' memory is."""
    align = max(1, DataType(dtype).bits // 8)
    return IRBuilder.name(name, T.match_buffer(argument, [int64(n) for n in shape], dtype, align=align))
