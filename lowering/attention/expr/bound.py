"""An expression bound to a kernel's values for its scalars and tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .emit import EmitVectorCall, cast, combine, emit_expr, lanes, scalar_type, widen_to
from .emit_interval import Interval, compute_interval, find_table_range
from .node import INDICES, Expr, find_parameters, rewrite_expr


class BoundExpr:
    """`value` with buffers for its tables and TensorIR for its scalars, both by name.

    scope is the storage scope of its small variables: "global" on a CPU, "local" in the threads of a GPU.
    emit_vector_call emits a function such as exp for vectors. Without it, indices are scalars.
    """

    def __init__(
        self,
        value: Expr,
        tables: Mapping[str, tirx.Buffer],
        scalars: Mapping[str, ir.Expr],
        scope: str = "global",
        emit_vector_call: EmitVectorCall | None = None,
    ) -> None:
        self.value, self.scope, self.emit_vector_call = value, scope, emit_vector_call
        self.tables, self.scalars = tables, dict(scalars)
        # TensorIR takes a vector index on the last axis only: such a table is read through a flat view.
        ranks = {name: len(node.args) for name, node in find_parameters(value, "load").items()}
        self.flat = {
            name: _flat(tables[name]) for name, rank in ranks.items() if emit_vector_call is not None and rank > 1
        }
        if scope == "global":  # for GPUs the constructor runs in host code, which has no memory that a kernel can read
            self.value = rewrite_expr(self.value, functools.cache(self._compute_once))

    def _compute_once(self, node: Expr) -> Expr | None:
        """Compute a node that depends on scalars alone, once; return None for any other node.

        The code goes to the insertion point of the IRBuilder.
        """
        leaves = [n.op for n in node.walk() if n.op in ("index", "load", "scalar")]
        if not node.args or not leaves or set(leaves) != {"scalar"}:
            return None
        # In memory, because TVM substitutes the value of T.bind at every use.
        memory = self.scratch(1, node.dtype)
        T.buffer_store(memory, emit_expr(node, {}, self.scalars, self.load, lambda value: value), [0])
        name = f"once_{len(self.scalars)}"
        self.scalars[name] = T.bind(memory[0])
        return Expr("scalar", node.dtype, value=name)

    def __call__(self, *point: ir.Expr) -> ir.Expr:
        """Return its value at (batch, query head, query row, key[, score]), some of which may be vectors."""
        return emit_expr(
            self.value, dict(zip(INDICES, point)), self.scalars, self.load, self._materialize, self.emit_vector_call
        )

    def _materialize(self, value: ir.Expr) -> ir.Expr:
        """Store the value to memory, because TVM substitutes the value of T.bind at every use.

        Vectors of bool are returned as they are: TVM has no memory for them.
        """
        count, dtype = lanes(value), scalar_type(value)
        if count > 1 and dtype == "bool":
            return value
        index = 0 if count == 1 else T.ramp(0, 1, count)
        memory = self.scratch(count, dtype)
        T.buffer_store(memory, value, [index])
        return memory[index]

    def compute_interval(self, b: ir.Expr, h: ir.Expr, rows: Interval, keys: Interval) -> Interval | None:
        """Return its interval over rows and keys (ends included), for bool (true everywhere, true somewhere); None if
        unknown.

        Emits code at the insertion point of the IRBuilder.
        """
        bounds = dict(zip(INDICES, ((b, b), (h, h), rows, keys)))

        def read_range(table: str, positions: Sequence[Interval]) -> Interval:
            return find_table_range(
                lambda *indices: self.load(table, indices), self.tables[table].shape, positions, self.scratch
            )

        return compute_interval(self.value, bounds, self.scalars, read_range, self._materialize)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        return T.alloc_buffer((size,), dtype, scope=self.scope)

    def load(self, table: str, indices: Sequence[ir.Expr]) -> ir.Expr:
        """Return an element, or a vector of them; half precision as float32."""
        buffer = self.tables[table]
        if max(map(lanes, indices[:-1]), default=1) == 1:
            value = buffer[tuple(indices)]
        else:
            offset = indices[0]
            for index, size in zip(indices[1:], buffer.shape[1:]):
                offset = combine(prim.Add, combine(prim.Mul, offset, cast(size, scalar_type(offset))), index)
            value = self.flat[table][self._materialize(offset)]
        return widen_to(value, "float32") if str(buffer.dtype) in ("float16", "bfloat16") else value


def _flat(buffer: tirx.Buffer) -> tirx.Buffer:
    size = functools.reduce(lambda a, b: a * b, buffer.shape)
    return T.decl_buffer((size,), buffer.dtype, data=buffer.data, layout=None)
