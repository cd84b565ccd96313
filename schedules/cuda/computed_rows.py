"""Element-wise functions whose result is the new rows of a cache, where each thread stores its chunk at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import walk
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from ..reading.stages import read_stages
from ..reading.values import flat_view
from .chunks import CHUNK, store
from .elementwise import launch
from .ptx import let
from .threads import ThreadTiles


def into_cache(func: tirx.PrimFunc, update: CacheUpdate, tiles: ThreadTiles) -> tirx.PrimFunc | None:
    """The function (*inputs, cache[, write_indices][, length]), whose result goes to the places that an update in place
    has for it; length (int64) is that of the update, if it is no constant. None where chunks do not divide the rows of
    the cache, or the function is no such one.
    """
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages) or str(func.params[-1].dtype) != update.dtype:
        return None
    *inputs, rows = func.params
    outputs = [stage for stage in stages if stage.output in set(func.params)]
    if row_size(update) is None or len(outputs) > 1 or not _tell(inputs, rows.shape):
        return None
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundUpdate.declared(update, copy=False)
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, inputs)}
        cache = CacheRows(bound)
        launch(func, stages, outputs, memory, tiles, lambda _, at, chunk: cache.put(at, chunk))
    made = builder.get()
    taken = [param for n, param in enumerate(made.params) if n != 1]  # that is the update, which is nowhere
    length = [] if update.length is not None else [bound.length]
    return tirx.PrimFunc([*inputs, *taken, *length], made.body).with_attr({"tirx.noalias": True, "op_pattern": 8})


def row_size(update: CacheUpdate) -> int | None:
    """Elements of a row of the cache, if that is whole chunks."""
    sizes = update.dims[update.axis + 1 :]
    size = None if None in sizes else math.prod(size for size in sizes if size is not None)
    return None if size is None or size % CHUNK else size


class CacheRows:
    """The places of new rows in a cache, written where the IRBuilder stands."""

    def __init__(self, bound: BoundUpdate) -> None:
        self.bound, self.cache = bound, bound.flat(bound.target)

    def put(self, at: Expr, chunk: tirx.Buffer) -> None:
        """Stores what is at this place of all new rows; registers."""
        bound, size = self.bound, row_size(self.bound.update)
        assert size is not None
        row, column = let(at // size), let(at % size)
        prefix, s = (let(place) for place in bound.of_source_row(row))
        with bound.position(let(bound.first_position(prefix)), s) as position:
            to = let((prefix * bound.max_len + position) * size + column)
            if not bound.update.circular:
                store(self.cache, to, chunk)
                return
            # Of rows that go to one place, the last one is to stay there.
            with T.If(s >= bound.length - bound.max_len), T.Then():
                store(self.cache, to, chunk)


def _tell(inputs: Sequence[tirx.Var], shape: Sequence[Expr]) -> bool:
    """Whether parameters are, or have, all sizes in a shape."""
    known = {extent for param in inputs for extent in (param.shape if tirx.is_buffer_var(param) else [param])}
    return all(node in known for extent in shape for node in walk(extent) if isinstance(node, tirx.Var))
