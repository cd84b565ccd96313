"""Concatenations on GPUs: a cache that grows by a token is copied at the rate of memory.

A launch for each tensor, a thread for each piece of 16 bytes, where all pieces lie at multiples of that; else for each
element.
"""

from __future__ import annotations

import functools

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr, is_int

from ..reading.concat import Concatenation, read_concatenation
from ..reading.values import flat_view
from ..variant import Variant
from .chunks import load, store_words
from .device import device
from .host import on_host
from .ptx import CHUNK_BYTES, let, registers
from .threads import ThreadTiles, each


def concat(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Copies for a concatenation; None for anything else."""
    joined = read_concatenation(func)
    if joined is None:
        return None
    tiles = {"copies": ThreadTiles()}
    return [Variant("copies", None, device(target), tiles, lambda tiles: _kernels(func, joined, tiles["copies"]))]


def _kernels(func: tirx.PrimFunc, joined: Concatenation, tiles: ThreadTiles) -> tirx.PrimFunc:
    size = DataType(joined.output.dtype).itemsize
    piece = CHUNK_BYTES // size if size in (1, 2, 4, 8) else 1
    places = [joined.row, *(place for _, *rest in joined.parts for place in rest)]
    whole = Analyzer().simplify(
        functools.reduce(tirx.And, (tirx.EQ(place % piece, tirx.const(0, "int64")) for place in places))
    )
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

        def copies(count: int) -> None:
            for part in joined.parts:
                _copy(joined, part, memory, count, tiles)

        if is_int(whole, 1) or is_int(whole, 0):
            copies(piece if is_int(whole, 1) else 1)
        else:
            with T.If(whole):
                with T.Then():
                    copies(piece)
                with T.Else():
                    copies(1)
    return func.with_body(builder.get().body).without_attr(FORM)


def _copy(
    joined: Concatenation,
    part: tuple[tirx.Buffer, Expr, Expr],
    memory: dict[tirx.Buffer, tirx.Buffer],
    count: int,
    tiles: ThreadTiles,
) -> None:
    """The launch that copies a tensor, so many elements per thread."""
    source, start, length = part
    pieces = on_host(tirx.truncdiv(length, T.int64(count)))
    total = on_host(joined.rows * pieces)
    row_length, start, length = on_host(joined.row), on_host(start), on_host(length)
    with each(total, tiles) as number:
        row, column = let(tirx.truncdiv(number, pieces)), let(tirx.truncmod(number, pieces) * count)
        chunk = registers(count, str(source.dtype))
        load(chunk, 0, memory[source], let(row * length + column), count)
        store_words(memory[joined.output], let(row * row_length + start + column), chunk, count)
