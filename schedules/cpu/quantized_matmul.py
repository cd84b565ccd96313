"""The micro-kernel of a matmul whose matrix is of codes: integers in blocks, each with a scale (codes.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ..reading.codes import Codes
from .vector import LINE, Machine, Register, cast, convert, element_type, let, like, load, prefetch, splat, store

if TYPE_CHECKING:
    from .blocked import Blocked


def accumulate_codes(
    b: Blocked, codes: Codes, a: tirx.Buffer, starts: list[Expr], row: Expr, k0: Expr, depth: Expr, tile: tirx.Buffer
) -> None:
    """tile[row + i, c] += scale * (sum of A times code - zero) for each block of steps from k0 on, as
    `Blocked.micro_kernel` does for numbers; row i of A begins at starts[i] of `a`."""
    cpu = b.cpu
    vectors, group = range(0, b.nr, b.lanes), codes.group
    panel = let(substitute(codes.first_panel(b.matmul.j.var), b.values) + b.values[b.results.panel])
    stored, blocks = codes.load.source.shape[1], codes.scale.source.shape[1]
    memory = b.operands.memory
    whole = codes.block or b.kc  # the length of a block

    waiting = len(starts) <= b.tiles.waiting_rows

    def block(start: Expr, length: int) -> None:
        """The block from k0 + start on."""
        place = let((panel * blocks + ((k0 + start) // codes.block if codes.block else 0)) * b.nr)
        if codes.block and waiting:
            _ask(memory[codes.scale.source], place, b.nr, b.tiles.ahead // 4)
        zeros = [
            T.bind(_widened(memory[codes.zero.source], b.lanes, place + v, cpu)) if codes.zero is not None else None
            for v in vectors
        ]
        c = [[Register(splat(0.0, b.lanes, "float32")) for _ in vectors] for _ in starts]

        with T.serial((length + group - 1) // group) as g:
            first = let((panel * stored + (k0 + start) // group + g) * b.nr)
            if waiting:
                _ask(b.operands.b, first, b.nr, b.tiles.ahead)
            codes_of_step = [Register(load(b.operands.b, b.lanes, first + v)) for v in vectors]
            with T.serial(group if length % group == 0 else tirx.min(group, length - g * group)) as k:
                for n, zero in enumerate(zeros):
                    code = _next(codes, codes_of_step[n], cpu)
                    b_v = let(code if zero is None else code - zero)
                    for row_start, accumulators in zip(starts, c):
                        a_ik = splat(a[row_start + start + g * group + k], b.lanes, "float32")
                        accumulators[n].value += a_ik * b_v
        for n, v in enumerate(vectors):
            scale = T.bind(_widened(memory[codes.scale.source], b.lanes, place + v, cpu))
            for i, accumulators in enumerate(c):
                at = (row + i) * b.nr + v
                store(tile, load(tile, b.lanes, at) + scale * accumulators[n].value, at)

    with T.serial(depth // whole) as n:
        block(n * whole, whole)
    rest = b.matmul.k.extent.value % whole
    if rest:
        with T.If(depth % whole != 0), T.Then():
            block(depth - rest, rest)


def _ask(buffer: tirx.Buffer, start: Expr, elements: int, ahead: int) -> None:
    """Prefetches a row of a panel, so many bytes ahead. Processors do so themselves, up to the end of a page."""
    size = DataType(buffer.dtype).itemsize
    for line in range(0, elements * size, LINE):
        prefetch(buffer, start + (ahead + line) // size, level=1)


def _next(codes: Codes, stored: Register, cpu: Machine) -> Expr:
    """The code of the lowest k in a vector of stored integers, as a float32 vector; the integers move on."""
    if codes.group == 1:
        return cast(stored.value, "float32")
    bits = let(stored.value)
    stored.value = T.shift_right(bits, like(4, bits))
    if cpu.vector_bytes == 64:
        # A table of 16 floats in one register, looked up by the lowest four bits of each lane.
        table = tirx.Shuffle([T.float32(code if code < 8 else code - 16) for code in range(16)], list(range(16)))
        return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, bits)
    return cast(T.shift_right(T.shift_left(bits, like(28, bits)), like(28, bits)), "float32")


def _widened(memory: tirx.Buffer, lanes: int, start: Expr, cpu: Machine) -> Expr:
    """A vector of scales or zeros in float32."""
    vector = load(memory, lanes, start)
    return cast(vector, "float32") if element_type(vector) == "int8" else convert(vector, "float32", cpu)
