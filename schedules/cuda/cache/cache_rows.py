"""Element-wise functions whose result is the new rows of a cache: each thread stores its chunk directly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import walk
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from ...reading.stages import read_stages
from ...reading.values import flat_view
from ..elementwise.chunks import CHUNK, store_values
from ..elementwise.elementwise import launch
from ..primitives.ptx import let
from ..primitives.threads import ThreadTiles


def emit_cache_rows(func: tirx.PrimFunc, update: CacheUpdate, tiles: ThreadTiles) -> tirx.PrimFunc | None:
    """Return the function (*inputs, cache[, write_indices][, length]) that stores its result into the cache.

    Rows go to the positions of an in-place update. length (int64) is that of the update, unless it is constant. The
    result is None where chunks do not divide the rows of the cache, or the function has another form.
    """
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages) or str(func.params[-1].dtype) != update.dtype:
        return None
    *inputs, rows = func.params
    outputs = [stage for stage in stages if stage.output in set(func.params)]
    if row_size(update) is None or len(outputs) > 1 or not _can_derive_sizes(inputs, rows.shape):
        return None
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundUpdate.declare(update, copy=False)
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, inputs)}
        cache = CacheRows(bound)
        launch(func, stages, outputs, memory, tiles, lambda _, at, chunk: cache.store_chunk(at, chunk))
    kernel = builder.get()
    params = [
        param for n, param in enumerate(kernel.params) if n != 1
    ]  # parameter 1 is the update, which is never materialized
    length = [] if update.length is not None else [bound.length]
    return tirx.PrimFunc([*inputs, *params, *length], kernel.body).with_attr({"tirx.noalias": True, "op_pattern": 8})


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


def _can_derive_sizes(inputs: Sequence[tirx.Var], shape: Sequence[Expr]) -> bool:
    """Return whether all variables of a shape are parameters, or sizes of parameters."""
    available = {extent for param in inputs for extent in (param.shape if tirx.is_buffer_var(param) else [param])}
    return all(node in available for extent in shape for node in walk(extent) if isinstance(node, tirx.Var))
