"""Concatenation on GPUs: a cache that grows by a token is copied at the rate of memory.

Each tensor has a launch. A thread copies a vector of 16 bytes where all vectors are aligned to that, else one element.
"""

from __future__ import annotations

import functools

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr, is_int

from ...reading.concat import Concatenation, read_concatenation
from ...reading.values import flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.host import bind_on_host
from ..primitives.ptx import CHUNK_BYTES, alloc_registers, let
from ..primitives.threads import ThreadTiles, launch_threads
from .chunks import load_vector, store_vector


def concat(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return copies for a concatenation; None for anything else."""
    concatenation = read_concatenation(func)
    if concatenation is None:
        return None
    tiles = {"copies": ThreadTiles()}
    return [
        Variant("copies", None, device(target), tiles, lambda tiles: _kernels(func, concatenation, tiles["copies"]))
    ]


def _kernels(func: tirx.PrimFunc, concatenation: Concatenation, tiles: ThreadTiles) -> tirx.PrimFunc:
    size = DataType(concatenation.output.dtype).itemsize
    vector = CHUNK_BYTES // size if size in (1, 2, 4, 8) else 1
    offsets = [concatenation.row, *(offset for _, *rest in concatenation.sources for offset in rest)]
    is_aligned = Analyzer().simplify(
        functools.reduce(tirx.And, (tirx.EQ(offset % vector, tirx.const(0, "int64")) for offset in offsets))
    )
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

        def emit_copies(count: int) -> None:
            for tensor in concatenation.sources:
                _copy(concatenation, tensor, memory, count, tiles)

        if is_int(is_aligned, 1) or is_int(is_aligned, 0):
            emit_copies(vector if is_int(is_aligned, 1) else 1)
        else:
            with T.If(is_aligned):
                with T.Then():
                    emit_copies(vector)
                with T.Else():
                    emit_copies(1)
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def _copy(
    concatenation: Concatenation,
    tensor: tuple[tirx.Buffer, Expr, Expr],
    memory: dict[tirx.Buffer, tirx.Buffer],
    count: int,
    tiles: ThreadTiles,
) -> None:
    """Launch the copy of one tensor, with `count` elements per thread."""
    source, start, length = tensor
    vectors = bind_on_host(tirx.truncdiv(length, T.int64(count)))
    total = bind_on_host(concatenation.rows * vectors)
    row_length, start, length = bind_on_host(concatenation.row), bind_on_host(start), bind_on_host(length)
    with launch_threads(total, tiles) as number:
        row, column = let(tirx.truncdiv(number, vectors)), let(tirx.truncmod(number, vectors) * count)
        vector = alloc_registers(count, str(source.dtype))
        load_vector(vector, 0, memory[source], let(row * length + column), count)
        store_vector(memory[concatenation.output], let(row * row_length + start + column), vector, count)
