"""Element-wise computation along a row, by chunks of successive elements per thread.

A chunk has eight elements where these divide the row's length; successive addresses are then read and stored as vectors
of 16 bytes. Otherwise a chunk is one element, and neighboring threads have neighboring elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import DataType, ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, children, is_int, loads, rewrite, substitute, uses
from lowering.tensorir.facts import Facts
from lowering.tensorir.moves import BITS

from ...half_precision import HALF
from ...reading.values import Program
from ..primitives.ptx import alloc_registers, let, pack, store_element, unrolled

CHUNK = 8

_LOAD = {
    size: f"*({kind}*)((char*)to + i) = *(const {kind}*)((const char*)from + i);"
    for size, kind in ((16, "uint4"), (8, "uint2"), (4, "uint"), (2, "ushort"), (1, "char"))
}
_STORE = _LOAD | {
    16: 'uint4 v = *(const uint4*)((const char*)from + i); asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" '
    ':: "l"((char*)to + i), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");',
    8: 'uint2 v = *(const uint2*)((const char*)from + i); asm volatile("st.global.v2.b32 [%0], {%1, %2};" '
    ':: "l"((char*)to + i), "r"(v.x), "r"(v.y) : "memory");',
}
"""Statements that move a vector, by its size in bytes."""
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

ChunkElement = Callable[[Expr], Expr]
"""An element of a chunk, by its index there."""


class ChunkedRow:
    """Elements 0 <= j < length of a row. `facts` bounds the other variables of the row."""

    def __init__(self, facts: Facts, j: tirx.Var, length: Expr) -> None:
        self.facts, self.j, self.length = facts, j, length
        self.number = tirx.Var("chunk", "int64")
        facts.bind(self.number, 0, facts.simplify((length + CHUNK - 1) // CHUNK))
        self.inside = tirx.Var("inside", "int64")
        facts.bind(self.inside, 0, tirx.const(CHUNK, "int64"))

    @property
    def divides(self) -> bool:
        """Whether chunks divide the row."""
        return isinstance(self.length, tirx.IntImm) and self.length.value % CHUNK == 0

    def is_chunk(self, offset: Expr) -> bool:
        """Return whether the offsets of a chunk are successive and begin at a multiple of eight."""
        start = substitute(offset, {self.j: self.number * CHUNK})
        distance = self.facts.simplify(substitute(offset, {self.j: self.number * CHUNK + self.inside}) - start)
        return distance.same_as(self.inside) and self._is_multiple(start)

    def _is_multiple(self, offset: Expr) -> bool:
        """Return whether the offset is a multiple of eight, for every alternative that it selects from."""

        def select_first(node: Expr) -> Expr | None:
            """Return one of two alternatives that differ by a multiple of eight."""
            if not isinstance(node, prim.Select):
                return None
            first, second = (rewrite(value, select_first) for value in (node.true_value, node.false_value))
            return first if is_int(self.facts.simplify((first - second) % CHUNK), 0) else None

        return is_int(self.facts.simplify(rewrite(self.facts.simplify(offset), select_first) % CHUNK), 0)

    def width(self, offsets: Sequence[Expr]) -> int:
        """Return the number of elements per thread for stores to these offsets."""
        return CHUNK if self.divides and all(map(self.is_chunk, offsets)) else 1


def evaluate_chunk(
    row: ChunkedRow,
    program: Program,
    width: int,
    values: Mapping[tirx.Var, Expr],
    first: Expr,
    body: Callable[[Expr, list[Expr]], None],
    elements: Mapping[tirx.Var, ChunkElement] | None = None,
) -> None:
    """Emit body(x, results) for each element `first` + x of a chunk, at the position of the IRBuilder.

    `values` binds the program's free variables except j. `elements` binds those that vary within the chunk.
    """
    chunks = [(node, _load_chunk(node, row, values, first, width)) for node in _find_vector_loads(row, program, width)]
    with unrolled(width) as x:
        bindings = {**values, row.j: first + x.astype("int64")}
        bindings |= {var: element(x) for var, element in (elements or {}).items()}

        def replace_load(node: Expr, x: Expr = x) -> Expr | None:
            return next((chunk[x] for load, chunk in chunks if node.same_as(load)), None)

        for var, expr in program.bindings:
            bindings[var] = let(substitute(rewrite(expr, replace_load), bindings))
        body(x, [substitute(rewrite(result, replace_load), bindings) for result in program.results])


def _find_vector_loads(row: ChunkedRow, program: Program, width: int) -> list[ir.TensorLoad]:
    """Return the loads that one vector load serves.

    They are unconditional, their addresses are successive, and they depend on nothing but the row.
    """
    bound = {var for var, _ in program.bindings}
    vector_loads: list[ir.TensorLoad] = []
    for expr in program.expressions if width > 1 else ():
        for node in _find_unguarded_loads(expr):
            (offset,) = node.indices
            is_indirect = any(uses(load_vector, {row.j}) for load_vector in loads(offset))
            if node.ty == "bool" or is_indirect or uses(offset, bound) or not row.is_chunk(offset):
                continue
            if not any(node.same_as(other) for other in vector_loads):
                vector_loads.append(node)
    return vector_loads


def _load_chunk(
    node: ir.TensorLoad, row: ChunkedRow, values: Mapping[tirx.Var, Expr], first: Expr, width: int
) -> tirx.Buffer:
    at = let(substitute(node.indices[0], {**values, row.j: first}))
    chunk = alloc_registers(width, str(node.ty))
    load_vector(chunk, 0, node.source, at, width)
    return chunk


def alloc_result_registers(program: Program, count: int, width: int) -> list[tirx.Buffer]:
    """Allocate registers for the first `count` results of a chunk."""
    return [alloc_registers(width, str(result.ty)) for result in program.results[:count]]


def store_values(memory: tirx.Buffer, at: Expr, values: tirx.Buffer) -> None:
    """Emit memory[at + n] := the registers; `at` is the offset of the chunk.

    Registers of half precision are bits, or float32 to be rounded.
    """
    width, dtype = int(values.shape[0]), str(memory.dtype)
    if width == 1:
        value = values[0]
        if dtype in HALF:
            value = tirx.reinterpret(dtype, value) if values.dtype == BITS else value.astype(dtype)
        store_element(memory, at, value)
        return
    chunk = pack_chunk(dtype, values) if dtype in HALF else values
    store_vector(memory, at, chunk, width * DataType(dtype).itemsize // DataType(chunk.dtype).itemsize)


def pack_chunk(dtype: str, values: tirx.Buffer) -> tirx.Buffer:
    """Return the elements of half precision, two in a register. `values` are their bits, or float32 to be rounded."""
    count = int(values.shape[0]) // 2
    packed = alloc_registers(count, "uint32")
    with unrolled(count) as n:
        low, high = values[2 * n], values[2 * n + 1]
        if values.dtype == BITS:
            store_element(packed, n, low.astype("uint32") | (high.astype("uint32") << T.uint32(16)))
        else:
            pack(dtype, packed[n], low, high)
    return packed


def load_vector(to: tirx.Buffer, at: Expr | int, source: tirx.Buffer, start: Expr | int, count: int) -> None:
    """Emit to[at + n] := source[start + n], memory to registers, by vectors of up to 16 bytes."""
    _emit_move("load", to.ptr_to([at]), source.ptr_to([start]), DataType(source.dtype).itemsize * count, _LOAD)


def store_vector(to: tirx.Buffer, at: Expr, chunk: tirx.Buffer, count: int) -> None:
    """Emit to[at + n] := chunk[n], registers to memory.

    The stores are PTX, because nvcc splits vectors of CUDA C++ in loops.
    """
    size = DataType(chunk.dtype).itemsize * count
    _emit_move("store", to.ptr_to([at]), chunk.ptr_to([0]), size, _STORE)


def _emit_move(name: str, to: Expr, source: Expr, size: int, statements: dict[int, str]) -> None:
    vector = next(n for n in statements if size % n == 0)
    code = f"""
__forceinline__ __device__ void {name}_{size}(void* to, const void* from) {{
#pragma unroll
  for (int i = 0; i < {size}; i += {vector}) {{
    {statements[vector]}
  }}
}}
"""
    T.evaluate(T.cuda.func_call(f"{name}_{size}", to, source, source_code=code))


def _find_unguarded_loads(expr: Expr) -> list[ir.TensorLoad]:
    """Return the loads that happen whatever the data is."""
    unguarded, pending = [], [expr]
    while pending:
        node = pending.pop()
        if isinstance(node, ir.TensorLoad):
            unguarded.append(node)
        elif isinstance(node, ir.Call) and node.op.same_as(_IF_THEN_ELSE):
            pending.append(node.args[0])
        else:
            pending += children(node)
    return unguarded
