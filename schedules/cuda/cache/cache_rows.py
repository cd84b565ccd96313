"""Element-wise functions whose result is the new rows of a cache: each thread stores its chunk directly."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from ...reading.epilogues import FusedEpilogue, read_epilogues
from ...reading.values import flat_view
from ..elementwise.chunks import CHUNK, store_values
from ..elementwise.elementwise import launch
from ..primitives.ptx import let
from ..primitives.threads import ThreadTiles


def read_computed_rows(func: tirx.PrimFunc) -> FusedEpilogue | None:
    """Return the stages and the in-place update of a function (reading/epilogues.py) of nothing else.

    None for any other function, and where chunks do not divide the rows of the cache.
    """
    segments, epilogues = read_epilogues(func) or ([], [])
    if segments or len(epilogues) != 1:
        return None
    (epilogue,) = epilogues
    if epilogue.update is None or any(stage.reduce for stage in epilogue.stages):
        return None
    record = epilogue.update.record
    return epilogue if str(epilogue.rows.dtype) == record.dtype and row_size(record) is not None else None


def emit_computed_rows(func: tirx.PrimFunc, epilogue: FusedEpilogue, tiles: ThreadTiles) -> tirx.PrimFunc:
    """Return the function, each thread of which stores a chunk of the result into the cache."""
    assert epilogue.update is not None
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        cache = CacheRows(epilogue.update.bound())
        launch(
            func,
            epilogue.stages,
            epilogue.stages[-1:],
            memory,
            tiles,
            lambda _, at, chunk: cache.store_chunk(at, chunk),
        )
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def row_size(update: CacheUpdate) -> int | None:
    """Return the elements of a row of the cache, if they are whole chunks."""
    sizes = update.dims[update.axis + 1 :]
    size = None if None in sizes else math.prod(size for size in sizes if size is not None)
    return None if size is None or size % CHUNK else size


class CacheRows:
    """The new rows in a cache, written at the position of the IRBuilder."""

    def __init__(self, bound: BoundUpdate) -> None:
        self.bound, self.cache = bound, bound.flat(bound.target)

    def store_chunk(self, at: Expr, chunk: tirx.Buffer) -> None:
        """Store a chunk of registers; `at` is its offset among all new rows."""
        bound, size = self.bound, row_size(self.bound.update)
        assert size is not None
        row, column = let(at // size), let(at % size)
        prefix, s = (let(index) for index in bound.split_source_row(row))
        with bound.position(let(bound.first_position(prefix)), s) as position:
            target = let((prefix * bound.max_len + position) * size + column)
            if not bound.update.circular:
                store_values(self.cache, target, chunk)
                return
            # Where several rows have one slot, the last one must win.
            with T.If(s >= bound.length - bound.max_len), T.Then():
                store_values(self.cache, target, chunk)
