"""What a function computes along a row, by chunks of successive elements that a thread has.

A chunk is eight elements, where the row's length is a multiple of that: what is read and stored at successive places
goes in pieces of 16 bytes then. Otherwise it is one element, and neighboring threads have neighboring ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import DataType, ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, children, is_int, loads, rewrite, substitute, uses
from lowering.tensorir.facts import Facts
from lowering.tensorir.moves import BITS

from ..half_precision import HALF
from ..reading.values import Program
from .ptx import let, pack, put, registers, unrolled

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
"""Statements that move a piece of so many bytes."""
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

Element = Callable[[Expr], Expr]
"""Of a chunk, by its number there."""


class Row:
    """Elements 0 <= j < length of a row, whose other variables `facts` knows."""

    def __init__(self, facts: Facts, j: tirx.Var, length: Expr) -> None:
        self.facts, self.j, self.length = facts, j, length
        self.number = tirx.Var("chunk", "int64")
        facts.bind(self.number, 0, facts.simplify((length + CHUNK - 1) // CHUNK))
        self.inside = tirx.Var("inside", "int64")
        facts.bind(self.inside, 0, tirx.const(CHUNK, "int64"))

    @property
    def divides(self) -> bool:
        """Whether the row is whole chunks."""
        return isinstance(self.length, tirx.IntImm) and self.length.value % CHUNK == 0

    def is_chunk(self, place: Expr) -> bool:
        """Whether the places of a chunk are successive, and begin at a multiple of eight."""
        start = substitute(place, {self.j: self.number * CHUNK})
        behind = self.facts.simplify(substitute(place, {self.j: self.number * CHUNK + self.inside}) - start)
        return behind.same_as(self.inside) and self._is_multiple(start)

    def _is_multiple(self, place: Expr) -> bool:
        """Whether the place is a multiple of eight, whichever it is of those that it selects from."""

        def either(node: Expr) -> Expr | None:
            """One of two values that differ by a multiple of eight."""
            if not isinstance(node, prim.Select):
                return None
            first, second = (rewrite(value, either) for value in (node.true_value, node.false_value))
            return first if is_int(self.facts.simplify((first - second) % CHUNK), 0) else None

        return is_int(self.facts.simplify(rewrite(self.facts.simplify(place), either) % CHUNK), 0)

    def width(self, places: Sequence[Expr]) -> int:
        """Elements of a thread that stores to these places."""
        return CHUNK if self.divides and all(map(self.is_chunk, places)) else 1


def evaluate(
    row: Row,
    program: Program,
    width: int,
    values: Mapping[tirx.Var, Expr],
    first: Expr,
    body: Callable[[Expr, list[Expr]], None],
    elements: Mapping[tirx.Var, Element] | None = None,
) -> None:
    """body(x, results) for each element `first` + x of a chunk, written where the IRBuilder stands.

    values are those of the program's free variables but j; elements those that differ within the chunk.
    """
    chunks = [(node, _load(node, row, values, first, width)) for node in _whole(row, program, width)]
    with unrolled(width) as x:
        here = {**values, row.j: first + x.astype("int64")}
        here |= {var: element(x) for var, element in (elements or {}).items()}

        def loaded(node: Expr, x: Expr = x) -> Expr | None:
            return next((chunk[x] for known, chunk in chunks if node.same_as(known)), None)

        for var, expr in program.bindings:
            here[var] = let(substitute(rewrite(expr, loaded), here))
        body(x, [substitute(rewrite(result, loaded), here) for result in program.results])


def _whole(row: Row, program: Program, width: int) -> list[ir.TensorLoad]:
    """Loads that give a chunk at once: unconditional, at successive places that nothing depends on but the row."""
    bound = {var for var, _ in program.bindings}
    found: list[ir.TensorLoad] = []
    for expr in program.expressions if width > 1 else ():
        for node in _unguarded(expr):
            (place,) = node.indices
            moving = any(uses(load, {row.j}) for load in loads(place))
            if node.ty == "bool" or moving or uses(place, bound) or not row.is_chunk(place):
                continue
            if not any(node.same_as(other) for other in found):
                found.append(node)
    return found


def _load(node: ir.TensorLoad, row: Row, values: Mapping[tirx.Var, Expr], first: Expr, width: int) -> tirx.Buffer:
    at = let(substitute(node.indices[0], {**values, row.j: first}))
    chunk = registers(width, str(node.ty))
    load(chunk, 0, node.source, at, width)
    return chunk


def result_registers(program: Program, count: int, width: int) -> list[tirx.Buffer]:
    """Registers for the first results of a chunk."""
    return [registers(width, str(result.ty)) for result in program.results[:count]]


def store(memory: tirx.Buffer, at: Expr, values: tirx.Buffer) -> None:
    """memory[at + n] := the registers; of half precision they are bits, or float32 to be rounded. `at` is that of a
    chunk."""
    width, dtype = int(values.shape[0]), str(memory.dtype)
    if width == 1:
        value = values[0]
        if dtype in HALF:
            value = tirx.reinterpret(dtype, value) if values.dtype == BITS else value.astype(dtype)
        put(memory, at, value)
        return
    chunk = pack_chunk(dtype, values) if dtype in HALF else values
    store_words(memory, at, chunk, width * DataType(dtype).itemsize // DataType(chunk.dtype).itemsize)


def pack_chunk(dtype: str, values: tirx.Buffer) -> tirx.Buffer:
    """Return the elements of half precision, two in a register; `values` are their bits, or float32 to be rounded."""
    count = int(values.shape[0]) // 2
    packed = registers(count, "uint32")
    with unrolled(count) as n:
        low, high = values[2 * n], values[2 * n + 1]
        if values.dtype == BITS:
            put(packed, n, low.astype("uint32") | (high.astype("uint32") << T.uint32(16)))
        else:
            pack(dtype, packed[n], low, high)
    return packed


def load(to: tirx.Buffer, at: Expr | int, source: tirx.Buffer, start: Expr | int, count: int) -> None:
    """to[at + n] := source[start + n], registers from memory, in pieces of 16 bytes, or less where that is all."""
    _move("load", to.ptr_to([at]), source.ptr_to([start]), DataType(source.dtype).itemsize * count, _LOAD)


def store_words(to: tirx.Buffer, at: Expr, chunk: tirx.Buffer, count: int) -> None:
    """to[at + n] := chunk[n], memory from registers. In PTX, as nvcc takes pieces of the language apart in loops."""
    size = DataType(chunk.dtype).itemsize * count
    _move("store", to.ptr_to([at]), chunk.ptr_to([0]), size, _STORE)


def _move(name: str, to: Expr, source: Expr, size: int, of: dict[int, str]) -> None:
    piece = next(n for n in of if size % n == 0)
    code = f"""
__forceinline__ __device__ void {name}_{size}(void* to, const void* from) {{
#pragma unroll
  for (int i = 0; i < {size}; i += {piece}) {{
    {of[piece]}
  }}
}}
"""
    T.evaluate(T.cuda.func_call(f"{name}_{size}", to, source, source_code=code))


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
