"""An expression bound to what a kernel has for its scalars and tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .emit import OfVectors, cast, combined, emit, lanes, scalar_type, widened
from .interval import Interval, extremes, interval
from .node import INDICES, Expr, parameters, rewritten


class BoundExpr:
    """`value` with buffers for its tables and TensorIR for its scalars, both by name.

    scope is the storage scope of its small variables: "global" on a CPU, "local" in the threads of a GPU. of_vectors
    has a kernel's own functions of vectors; with it indices may be vectors.
    """

    def __init__(
        self,
        value: Expr,
        tables: Mapping[str, tirx.Buffer],
        scalars: Mapping[str, ir.Expr],
        scope: str = "global",
        of_vectors: OfVectors | None = None,
    ) -> None:
        self.value, self.scope, self.of_vectors = value, scope, of_vectors
        self.tables, self.scalars = tables, dict(scalars)
        # TensorIR takes a vector index in the last axis only: such a table is read as the vector that it is in memory.
        ranks = {name: len(node.args) for name, node in parameters(value, "load").items()}
        self.flat = {name: _flat(tables[name]) for name, rank in ranks.items() if of_vectors is not None and rank > 1}
        if scope == "global":  # else the IRBuilder stands in host code, which has no memory that a kernel can read
            self.value = rewritten(self.value, functools.cache(self._once))

    def _once(self, node: Expr) -> Expr | None:
        """What depends on nothing but scalars, computed here, where the IRBuilder stands; None for anything else."""
        leaves = [n.op for n in node.walk() if n.op in ("index", "load", "scalar")]
        if not node.args or not leaves or set(leaves) != {"scalar"}:
            return None
        # In memory, as TVM puts the definition of a plain binding wherever it is used.
        place = self.scratch(1, node.dtype)
        T.buffer_store(place, emit(node, {}, self.scalars, self.load, lambda value: value), [0])
        name = f"once_{len(self.scalars)}"
        self.scalars[name] = T.bind(place[0])
        return Expr("scalar", node.dtype, value=name)

    def __call__(self, *point: ir.Expr) -> ir.Expr:
        """Its value at (b, h, i, j[, s]), some of which may be vectors."""
        return emit(self.value, dict(zip(INDICES, point)), self.scalars, self.load, self._keep, self.of_vectors)

    def _keep(self, value: ir.Expr) -> ir.Expr:
        """The value, in memory, as TVM puts the definition of a plain binding wherever it is used. Vectors of truth
        values stay: TVM has no memory for them."""
        count, dtype = lanes(value), scalar_type(value)
        if count > 1 and dtype == "bool":
            return value
        at = 0 if count == 1 else T.ramp(0, 1, count)
        place = self.scratch(count, dtype)
        T.buffer_store(place, value, [at])
        return place[at]

    def extremes(self, b: ir.Expr, h: ir.Expr, rows: Interval, keys: Interval) -> Interval | None:
        """Its interval over rows and keys (ends included), for bool (surely, possibly); None if unknown.

        Emits code where the IRBuilder stands.
        """
        bounds = dict(zip(INDICES, ((b, b), (h, h), rows, keys)))

        def look(table: str, places: Sequence[Interval]) -> Interval:
            return extremes(lambda *at: self.load(table, at), self.tables[table].shape, places, self.scratch)

        return interval(self.value, bounds, self.scalars, look, self._keep)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        return T.alloc_buffer((size,), dtype, scope=self.scope)

    def load(self, table: str, indices: Sequence[ir.Expr]) -> ir.Expr:
        """An element, or a vector of them; half precision as float32."""
        buffer = self.tables[table]
        if max(map(lanes, indices[:-1]), default=1) == 1:
            value = buffer[tuple(indices)]
        else:
            place = indices[0]
            for index, size in zip(indices[1:], buffer.shape[1:]):
                place = combined(prim.Add, combined(prim.Mul, place, cast(size, scalar_type(place))), index)
            value = self.flat[table][self._keep(place)]
        return widened(value, "float32") if str(buffer.dtype) in ("float16", "bfloat16") else value


def _flat(buffer: tirx.Buffer) -> tirx.Buffer:
    size = functools.reduce(lambda a, b: a * b, buffer.shape)
    return T.decl_buffer((size,), buffer.dtype, data=buffer.data, layout=None)
