"""The parameters of the function under construction: what a problem's kernel is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .cache_layout import CacheLayout
from .expr.bound import BoundExpr
from .expr.emit import OfVectors, cast
from .expr.node import Expr as Expression
from .formula import Formula
from .problem import ATTRIBUTE, AttentionProblem

Size: TypeAlias = Any  # int | tirx.Var
Tensor: TypeAlias = tuple[list[Size], str]  # shape and element type


class Parameters:
    """The parameters `problem.parameters()` of the PrimFunc frame that is open in the IRBuilder, in that order.

    The constructor declares them, and the function's attributes. B, S and T are int where the problem's size is static,
    else the int64 variable that the shapes bind, or the scalar that tells the most rows or keys of a batch. buffers
    holds the tensors by name, scalars the int64 numbers. scope is the storage scope of small variables: "global" on a
    CPU, "local" in the threads of a GPU. of_vectors has a kernel's own functions of vectors, for expressions.
    """

    def __init__(self, problem: AttentionProblem, scope: str = "global", of_vectors: OfVectors | None = None) -> None:
        self.problem, self.scope, self.of_vectors = problem, scope, of_vectors
        self._sizes = Sizes()
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, **self.attributes()})
        names, scalars = self.names(), problem.scalars()
        arguments = {name: T.arg(name, T.int64() if name in scalars else T.handle()) for name in names}
        self.scalars = {name: arguments[name] for name in names if name in scalars}
        self.B = self._size("B", problem.batch)
        self.S = self.scalars.get("most_rows", self._size("S", problem.q_len))
        self.T = self.scalars.get("most_keys", self._size("T", problem.kv_len))
        tensors = self.tensors()
        self.buffers = {name: matched(name, arguments[name], *tensors[name]) for name in names if name not in scalars}

    def names(self) -> tuple[str, ...]:
        """Of all parameters, in order."""
        return self.problem.parameters()

    def attributes(self) -> dict[str, str]:
        """What the function says of itself."""
        return {ATTRIBUTE: self.problem.to_json()}

    def tensors(self) -> dict[str, Tensor]:
        """Shape and element type of all that may be among them."""
        return self._rows() | self._store() | self._mask() | self._tables() | self._tables_of(self.problem.score)

    def _rows(self) -> dict[str, Tensor]:
        """Tensors by query rows."""
        p = self.problem
        sizes = {"b": self.B, "h": p.q_heads, "t": self._size("tokens") if p.packed else self.S}

        def shape(dim: int) -> list[Size]:
            return [(sizes | {"d": dim, "e": p.q_heads * dim})[axis] for axis in p.row_axes]

        by_row = [sizes["t"], p.q_heads] if p.packed else [self.B, p.q_heads, self.S]
        return {
            "q": (shape(p.head_dim), p.dtype),
            "y": (shape(p.v_head_dim), p.dtype),
            "qk": ([self.B, p.q_heads, self.S, self.T], p.dtype),
            "lse": (by_row, p.acc_dtype),
            "max": (by_row, p.acc_dtype),
        }

    def _store(self) -> dict[str, Tensor]:
        """Keys and values, and their scales."""
        p = self.problem
        dims, types = (p.head_dim, p.v_head_dim), (p.dtype, p.v_dtype)
        return store_tensors(p.layout, p.kv_heads, dims, types, self.B, self.T, self._size)

    def _mask(self) -> dict[str, Tensor]:
        """The mask, or the tables of a formula."""
        mask, p = self.problem.mask, self.problem
        if mask is None:
            return {}
        if isinstance(mask, Formula):
            return self._tables_of(mask)
        rows = self._size("tokens") if p.packed else self.S
        full = (self.B, p.q_heads, rows, self._size("mask_len") if mask.pad or mask.starts else self.T)
        dims = [
            self._size(f"mask_{axis}") if axis in mask.broadcasts else size if known is None else known
            for axis, (size, known) in enumerate(zip(full, mask.dims, strict=True))
        ]
        return {"mask": (dims, mask.dtype)}

    def _tables(self) -> dict[str, Tensor]:
        """What else a kernel looks up, by head, by batch or by request."""
        return store_tables(self.problem.layout, self.B, self._size) | {
            "scale": ([1], self.problem.acc_dtype),
            "sink": ([self.problem.q_heads], self.problem.dtype),
            "lengths": ([self.B], "int64"),
            "lefts": ([self.B], "int64"),
            "sink_keys": ([self.B], "int64"),
            "row_starts": ([self.B + 1], "int64"),
            "key_starts": ([self.B], "int64"),
        }

    def _tables_of(self, formula: Formula | None) -> dict[str, Tensor]:
        return {
            name: ([self._size(f"{name}_len_{axis}") for axis in range(rank)], dtype)
            for name, (rank, dtype) in (formula.tables() if formula is not None else {}).items()
        }

    def _size(self, name: str, known: int | None = None) -> Size:
        """The number, or the variable of that name."""
        return self._sizes(name) if known is None else known

    def bind(self, value: Expression) -> BoundExpr:
        """The expression over these parameters."""
        return BoundExpr(value, self.buffers, self.scalars, self.scope, self.of_vectors)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        """Memory for a small variable of the thread that runs the code."""
        return T.alloc_buffer((size,), dtype, scope=self.scope)


class Sizes:
    """The int64 variables of the PrimFunc frame that is open in the IRBuilder, by name; made at first use."""

    def __init__(self) -> None:
        self._known: dict[str, tirx.Var] = {}

    def __call__(self, name: str) -> tirx.Var:
        if name not in self._known:
            self._known[name] = IRBuilder.name(name, T.int64())
        return self._known[name]


def store_tensors(
    layout: CacheLayout,
    heads: int,
    dims: tuple[int, int],
    types: tuple[str, str],
    batches: Size,
    keys: Size,
    size: Callable[[str], Size],
) -> dict[str, Tensor]:
    """The buffers of a cache of so many heads, with elements in a row of a head and types of keys and of values (those
    of codes where it has some), and their scales. size makes a variable of that name, once."""
    page = getattr(layout.slots, "size", None) if "p" in layout.axes else None
    sizes = {
        "b": size("cache_rows") if layout.looked_up else batches,
        "h": heads,
        "t": page or (size("slots") if layout.mapped else keys),
        "p": size("page_count"),
        "l": size("layers"),
        "c": 2,
    }

    def shape(dim: int) -> list[Size]:
        return [(sizes | {"d": dim, "e": heads * dim})[axis] for axis in layout.axes]

    each, codec = {"k": (dims[0], types[0]), "v": (dims[1], types[1]), "kv": (dims[0], types[0])}, layout.codec
    if codec is None:
        return {name: (shape(dim), dtype) for name, (dim, dtype) in each.items()}
    tensors: dict[str, Tensor] = {name: (shape(dim // codec.packing), codec.stored) for name, (dim, _) in each.items()}
    for name, (dim, _) in each.items():
        if codec.channels:
            scales: list[Size] = [*([2] if name == "kv" else []), heads, dim]
        else:
            scales = shape(dim // codec.group) if codec.group else [2 if name == "kv" else 1]
        tensors[f"{name}_scale"] = scales, codec.scale_dtype
    return tensors


def store_tables(layout: CacheLayout, batches: Size, size: Callable[[str], Size]) -> dict[str, Tensor]:
    """What says where a cache's slots are."""
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


def matched(name: str, argument: tirx.Var, shape: list[Size], dtype: str) -> tirx.Buffer:
    """The argument as a buffer aligned to its elements and no more, as callers' memory is."""
    align = max(1, DataType(dtype).bits // 8)
    return IRBuilder.name(name, T.match_buffer(argument, [int64(n) for n in shape], dtype, align=align))
