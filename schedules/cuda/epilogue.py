"""What becomes of the sums of products: bias, activation, residual, casts, at chunks of a row of C, stored.

A thread has `width` successive columns of a row: eight, where the row's length lets all that is read and stored be
whole chunks of 16 bytes, or one, where neighbouring threads have neighbouring columns instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, children, is_int, loads, offset, rewrite, substitute, uses

from ..half_precision import HALF, is_half
from ..reading.values import Evaluator, View, flat_view
from .products import CHUNK, Products
from .ptx import fixed, pack, put, registers, unrolled

Memory = Mapping[tirx.Buffer, tirx.Buffer]
Sum = Callable[[Expr], Expr]
"""Of a product, at a column of the chunk."""

_PIECES = ((16, "uint4"), (8, "uint2"), (4, "uint"), (2, "ushort"), (1, "char"))
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")


class Epilogue:
    """Written where the IRBuilder stands, for the function's tensors in `memory`."""

    def __init__(self, products: Products) -> None:
        self.products, self.facts = products, products.facts
        self.chunk = tirx.Var("chunk", "int64")
        self.facts.bind(self.chunk, 0, self.facts.simplify((products.columns + CHUNK - 1) // CHUNK))
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, products.func.params)}
        group = products.group
        point = [self.facts.simplify(substitute(i, products.point)) for i in group.products[0].stage.indices]
        self.sums = [tirx.Var(f"sum{n}", product.acc) for n, product in enumerate(group.products)]
        known = {product.stage.output: [(point, var)] for product, var in zip(group.products, self.sums)}
        made = {stage.output for stage in products.stages}
        views = {buffer: View(flat) for buffer, flat in self.memory.items() if buffer not in made}
        wanted = [tirx.BufferLoad(output, point) for output in group.outputs]
        self.places = [self.facts.simplify(offset(output.shape, point)) for output in group.outputs]
        self.program = Evaluator(products.stages, views).program(wanted, self.facts, known)
        chunked = isinstance(products.columns, tirx.IntImm) and products.columns.value % CHUNK == 0
        self.width = CHUNK if chunked and all(map(self._is_chunk, self.places)) else 1

    def _is_chunk(self, place: Expr) -> bool:
        """Whether places of successive columns are successive, those of a chunk at a multiple of eight."""
        begins = self.facts.simplify(substitute(place, {self.products.j: self.chunk * CHUNK}) % CHUNK)
        return self._step(place) == 1 and is_int(begins, 0)

    def _step(self, place: Expr) -> int | None:
        """Elements between those of successive columns, if they are equally far apart."""
        j = self.products.j
        step = self.facts.simplify(substitute(place, {j: j + 1}) - place)
        return step.value if isinstance(step, tirx.IntImm) else None

    def store(self, where: Mapping[tirx.Var, Expr], row: Expr, column: Expr, sums: Sequence[Sum]) -> None:
        """C at a row and `width` columns from that one on, all of which exist. where: the batch axes."""
        values = {**where, self.products.m: fixed(row.astype("int64"))}
        first = fixed(column.astype("int64"))
        chunks = {node: self._chunk_of(node, values, first) for node in self._chunk_loads()}
        results = [registers(self.width, _register_type(result)) for result in self.program.results]
        with unrolled(self.width) as x:
            here = {**values, self.products.j: first + x.astype("int64"), **dict(zip(self.sums, (s(x) for s in sums)))}

            def loaded(node: Expr, x: Expr = x) -> Expr | None:
                for known, chunk in chunks.items():
                    if node.same_as(known):
                        return chunk[x]
                return None

            for var, expr in self.program.bindings:
                here[var] = fixed(substitute(rewrite(expr, loaded), here))
            for register, result in zip(results, self.program.results):
                put(register, x, substitute(rewrite(result, loaded), here))
        for output, place, register in zip(self.products.group.outputs, self.places, results):
            at = fixed(substitute(place, {**values, self.products.j: first}))
            self._store(self.memory[output], at, register)

    def _chunk_loads(self) -> list[ir.TensorLoad]:
        """Loads that give a chunk at once: unconditional, at successive places that depend on no data."""
        if self.width == 1:
            return []
        data = {var for var, _ in self.program.bindings}
        found: list[ir.TensorLoad] = []
        for expr in self.program.expressions:
            for node in _unguarded(expr):
                (place,) = node.indices
                if node.ty == "bool" or loads(place) or uses(place, data) or not self._is_chunk(place):
                    continue
                if not any(node.same_as(other) for other in found):
                    found.append(node)
        return found

    def _chunk_of(self, node: ir.TensorLoad, values: Mapping[tirx.Var, Expr], first: Expr) -> tirx.Buffer:
        at = fixed(substitute(node.indices[0], {**values, self.products.j: first}))
        chunk = registers(self.width, str(node.ty))
        copy(chunk, 0, node.source, at, self.width)
        return chunk

    def _store(self, memory: tirx.Buffer, at: Expr, values: tirx.Buffer) -> None:
        dtype = str(memory.dtype)
        if dtype not in HALF:
            chunk = values
        elif self.width == 1:
            chunk = registers(1, dtype)
            put(chunk, 0, values[0].astype(dtype))
        else:
            chunk = registers(self.width // 2, "uint32")
            with unrolled(self.width // 2) as n:
                pack(dtype, chunk[n], values[2 * n], values[2 * n + 1])
        if self.width == 1:
            put(memory, at, chunk[0])
        else:
            copy(memory, at, chunk, 0, self.width * DataType(dtype).itemsize // DataType(chunk.dtype).itemsize)


def row_of(sums: tirx.Buffer, start: Expr | int) -> Sum:
    """Sums that lie one behind the other."""
    return lambda x: sums[start + x]


def copy(to: tirx.Buffer, at: Expr | int, source: tirx.Buffer, start: Expr | int, count: int) -> None:
    """to[at + n] := source[start + n] in pieces of 16 bytes, or less where that is all; addresses are multiples."""
    size = DataType(source.dtype).itemsize * count
    piece, kind = next((n, kind) for n, kind in _PIECES if size % n == 0)
    name = f"copy_{size}"
    code = f"""
__forceinline__ __device__ void {name}(void* to, const void* from) {{
#pragma unroll
  for (int i = 0; i < {size // piece}; ++i) (({kind}*)to)[i] = ((const {kind}*)from)[i];
}}
"""
    T.evaluate(T.cuda.func_call(name, to.ptr_to([at]), source.ptr_to([start]), source_code=code))


def _register_type(result: Expr) -> str:
    return "float32" if is_half(result.ty) else str(result.ty)


def _unguarded(expr: Expr) -> list[ir.TensorLoad]:
    """Loads that are done whatever the data is."""
    found, todo = [], [expr]
    while todo:
        node = todo.pop()
        if isinstance(node, ir.TensorLoad):
            found.append(node)
        elif isinstance(node, ir.Call) and node.op.same_as(_IF_THEN_ELSE):
            todo.append(node.args[0])
        else:
            todo += children(node)
    return found
