"""The parameters of the function under construction: what a problem's kernel is given."""

from __future__ import annotations

from typing import Any, TypeAlias

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .expr.emit import cast
from .formula import Formula
from .problem import ATTRIBUTE, AttentionProblem, Layout

Size: TypeAlias = Any  # int | tirx.Var


class Parameters:
    """The parameters `problem.parameters()` of the PrimFunc frame that is open in the IRBuilder, in that order.

    The constructor declares them, and the function's attributes. B, S and T are int where the problem's size is static,
    else the int64 variable that the shapes bind. buffers holds the tensors by name, scalars the int64 numbers. scope is
    the storage scope of small variables: "global" on a CPU, "local" in the threads of a GPU.
    """

    def __init__(self, problem: AttentionProblem, scope: str = "global") -> None:
        self.problem, self.scope = problem, scope
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: problem.to_json()})
        names, scalars = problem.parameters(), problem.scalars()
        arguments = {name: T.arg(name, T.int64() if name in scalars else T.handle()) for name in names}
        self.B: Size = _size("B", problem.batch)
        self.S: Size = _size("S", problem.q_len)
        self.T: Size = _size("T", problem.kv_len)
        self.scalars = {name: arguments[name] for name in names if name in scalars}
        shapes = self._shapes()
        self.buffers = {name: _match(name, arguments[name], *shapes[name]) for name in names if name not in scalars}

    def _shapes(self) -> dict[str, tuple[list[Size], str]]:
        """Shape and element type of every tensor that the problem has, and of some that it could have."""
        p = self.problem

        def rows(layout: Layout, heads: int, length: Size, dim: int) -> list[Size]:
            return [self.B, heads, length, dim] if layout == "bhsd" else [self.B, length, heads * dim]

        shapes = {
            "q": (rows(p.q_layout, p.q_heads, self.S, p.head_dim), p.dtype),
            "k": (rows(p.kv_layout, p.kv_heads, self.T, p.head_dim), p.dtype),
            "v": (rows(p.kv_layout, p.kv_heads, self.T, p.v_head_dim), p.v_dtype),
            "y": (rows(p.q_layout, p.q_heads, self.S, p.v_head_dim), p.dtype),
            "qk": ([self.B, p.q_heads, self.S, self.T], p.dtype),
            "lse": ([self.B, p.q_heads, self.S], p.acc_dtype),
            "sink": ([p.q_heads], p.dtype),
            "lengths": ([self.B], "int64"),
        }
        if isinstance(p.mask, Formula):
            shapes |= {name: ([_size(f"{name}_len", None)], dtype) for name, dtype in p.mask.tables().items()}
        elif p.mask is not None:
            full = (self.B, p.q_heads, self.S, _size("mask_len", None) if p.mask.pad else self.T)
            dims = [
                _size(f"mask_{axis}", None) if axis in p.mask.broadcasts else size if known is None else known
                for axis, (size, known) in enumerate(zip(full, p.mask.dims, strict=True))
            ]
            shapes["mask"] = (dims, p.mask.dtype)
        return shapes

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        """Memory for a small variable of the thread that runs the code."""
        return T.alloc_buffer((size,), dtype, scope=self.scope)


def int64(value: int | Expr) -> Expr:
    return tirx.const(value, "int64") if isinstance(value, int) else cast(value, "int64")


def _size(name: str, size: int | None) -> Size:
    if size is not None:
        return size
    return IRBuilder.name(name, T.int64())


def _match(name: str, argument: tirx.Var, shape: list[Size], dtype: str) -> tirx.Buffer:
    """The argument as a buffer aligned to its elements and no more, as callers' memory is."""
    align = max(1, DataType(dtype).bits // 8)
    return IRBuilder.name(name, T.match_buffer(argument, [int64(n) for n in shape], dtype, align=align))
