"""Where elements lie, and what they hold."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .expr.emit import cast, widened
from .parameters import Parameters, Size, int64


class Places:
    """Elements of Q, K, V and the outputs. Indices may have any integer type; d may be a vector (`T.ramp`)."""

    def __init__(self, parameters: Parameters) -> None:
        self.problem, self.buffers = parameters.problem, parameters.buffers
        self.S, self.T = parameters.S, parameters.T

    def at(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of element d of that row of q, k, v or y; h is the query head for q and y."""
        layout, _, dim = self._about(name)
        return self.buffers[name], [b, h, row, d] if layout == "bhsd" else [b, row, h * dim + d]

    def strides(self, name: str) -> tuple[Size, Size, Size]:
        """Elements from one batch, head and row of q, k, v or y to the next."""
        layout, heads, dim = self._about(name)
        length = int64(self.S if name in ("q", "y") else self.T)
        batch = length * (heads * dim)
        return (batch, length * dim, int64(dim)) if layout == "bhsd" else (batch, int64(dim), int64(heads * dim))

    def _about(self, name: str) -> tuple[str, int, int]:
        """Layout, number of heads and elements of a row."""
        p = self.problem
        layout, heads = (p.q_layout, p.q_heads) if name in ("q", "y") else (p.kv_layout, p.kv_heads)
        return layout, heads, p.head_dim if name in ("q", "k") else p.v_head_dim

    def q(self, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
        """Element d of query row i, query head h, in acc_dtype."""
        return self._load("q", b, h, i, d)

    def k(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Element d of key j, key/value head hk, in acc_dtype."""
        return self._load("k", b, hk, j, d)

    def v(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Element d of value j, key/value head hk, in acc_dtype."""
        return self._load("v", b, hk, j, d)

    def _load(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> Expr:
        buffer, indices = self.at(name, b, h, row, d)
        return widened(buffer[tuple(indices)], self.problem.acc_dtype)

    def store_y(self, b: Expr, h: Expr, i: Expr, d: Expr, value: Expr) -> None:
        """Y at (b, h, i, d) := value, rounded to the type of Y."""
        buffer, indices = self.at("y", b, h, i, d)
        T.buffer_store(buffer, cast(value, buffer.dtype), indices)

    def store_qk(self, b: Expr, h: Expr, i: Expr, j: Expr, value: Expr) -> None:
        """The qk output at (b, h, i, j) := value, rounded to its type."""
        buffer = self.buffers["qk"]
        T.buffer_store(buffer, cast(value, buffer.dtype), [b, h, i, j])

    def store_lse(self, b: Expr, h: Expr, i: Expr, m: Expr, l: Expr) -> None:
        """The lse output of a row := m + log(l), from its final maximum and sum; nothing without that output."""
        if self.problem.lse:
            T.buffer_store(self.buffers["lse"], m + T.log(l), [b, h, i])
