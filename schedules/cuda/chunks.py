"""What a function computes along a row, by chunks of successive elements that a thread has.

A chunk is eight elements, where the row's length is a multiple of that: what is read and stored at successive places
goes in pieces of 16 bytes then. Otherwise it is one element, and neighbouring threads have neighbouring ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, children, is_int, loads, rewrite, substitute, uses
from lowering.tensorir.facts import Facts

from ..half_precision import HALF, is_half
from ..reading.values import Program
from .ptx import fixed, pack, put, registers, unrolled

CHUNK = 8

_PIECES = ((16, "uint4"), (8, "uint2"), (4, "uint"), (2, "ushort"), (1, "char"))
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

Element = Callable[[Expr], Expr]
"""Of a chunk, by its number there."""


class Row:
    """Elements 0 <= j < length of a row, whose other variables `facts` knows."""

    def __init__(self, facts: Facts, j: tirx.Var, length: Expr) -> None:
        self.facts, self.j, self.length = facts, j, length
        self.number = tirx.Var("chunk", "int64")
        facts.bind(self.number, 0, facts.simplify((length + CHUNK - 1) // CHUNK))

    @property
    def divides(self) -> bool:
        """Whether the row is whole chunks."""
        return isinstance(self.length, tirx.IntImm) and self.length.value % CHUNK == 0

    def is_chunk(self, place: Expr) -> bool:
        """Whether places of successive elements are successive, those of a chunk at a multiple of eight."""
        step = self.facts.simplify(substitute(place, {self.j: self.j + 1}) - place)
        begins = self.facts.simplify(substitute(place, {self.j: self.number * CHUNK}) % CHUNK)
        return is_int(step, 1) and is_int(begins, 0)

    def width(self, places: Sequence[Expr]) -> int:
        """Elements of a thread that stores to, or reads, these places."""
        return CHUNK if self.divides and any(map(self.is_chunk, places)) else 1


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
            here[var] = fixed(substitute(rewrite(expr, loaded), here))
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
    at = fixed(substitute(node.indices[0], {**values, row.j: first}))
    chunk = registers(width, str(node.ty))
    copy(chunk, 0, node.source, at, width)
    return chunk


def result_registers(program: Program, count: int, width: int) -> list[tirx.Buffer]:
    """Registers for the first results of a chunk: half precision is float32 there."""
    return [registers(width, "float32" if is_half(r.ty) else str(r.ty)) for r in program.results[:count]]


def store(memory: tirx.Buffer, at: Expr, values: tirx.Buffer) -> None:
    """memory[at + n] := the registers, rounded where the memory is half precision; `at` is that of a chunk."""
    width, dtype = int(values.shape[0]), str(memory.dtype)
    if width == 1:
        put(memory, at, values[0].astype(dtype) if dtype in HALF else values[0])
        return
    chunk = values
    if dtype in HALF:
        chunk = registers(width // 2, "uint32")
        with unrolled(width // 2) as n:
            pack(dtype, chunk[n], values[2 * n], values[2 * n + 1])
    copy(memory, at, chunk, 0, width * DataType(dtype).itemsize // DataType(chunk.dtype).itemsize)


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
