"""The cache update: new rows are written to their slots in a key/value cache, 16 bytes per thread where rows divide so.

In place, only the new rows are written. A copy is made first as one stream, whatever the shape of its rows.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx
from tvm.ir import Expr, prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import is_int
from lowering.tensorir.scatter import ATTRIBUTE, BoundUpdate, CacheUpdate

from ...variant import Variant
from ..primitives.device import device
from ..primitives.ptx import let
from ..primitives.threads import ThreadTiles, launch_threads
from .cache_rows import emit_computed_rows, read_computed_rows

CHUNK = 16  # bytes that a thread moves at once

# Bit types by size in bytes.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32x2", 16: "uint32x4"}


def cache_update(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return the variant for a cache update (lowering/tensorir/scatter.py), in place or not; None for anything else.

    An in-place update may have an element-wise function that computes its rows (cache_rows.py).
    """
    gpu = device(target)
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        computed = read_computed_rows(func)
        if computed is None:
            return None
        return [
            Variant(
                "chunks",
                None,
                gpu,
                {"chunks": ThreadTiles()},
                lambda tiles: emit_computed_rows(func, computed, tiles["chunks"]),
            )
        ]
    update = CacheUpdate.from_json(str(func.attrs[ATTRIBUTE]))
    copy = len(func.params) > 2 + update.indices
    tiles = {"update": ThreadTiles.default(update, gpu)}
    return [Variant("rows", update, gpu, tiles, lambda tiles: _kernels(update, copy, tiles["update"]))]


def _kernels(update: CacheUpdate, copy: bool, tiles: ThreadTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundUpdate.declare(update, copy)
        if copy:
            _copy(bound, tiles)
        size = Analyzer().simplify(bound.suffix * bound.itemsize)
        rows = Analyzer().simplify(bound.prefixes * bound.length * bound.max_len * bound.suffix)
        if is_int(rows, 0):
            T.evaluate(0)  # There is nothing to write, or no slot to write to.
        elif isinstance(size, prim.IntImm):
            _write_rows(bound, tiles, math.gcd(size.value, CHUNK))
        else:
            with T.If(tirx.truncmod(size, T.int64(CHUNK)) == 0):
                with T.Then():
                    _write_rows(bound, tiles, CHUNK)
                with T.Else():
                    _write_rows(bound, tiles, bound.itemsize)
    return builder.get()


def _copy(bound: BoundUpdate, tiles: ThreadTiles) -> None:
    """Copy present := cache, in chunks, and the elements after the last chunk one by one."""
    elements = Analyzer().simplify(bound.prefixes * bound.max_len * bound.suffix)
    per_chunk = CHUNK // bound.itemsize
    if isinstance(elements, prim.IntImm) and elements.value < per_chunk:
        _copy_elements(bound, tiles, elements)
        return
    chunks = tirx.truncdiv(elements, T.int64(per_chunk))
    with launch_threads(chunks + per_chunk - 1, tiles) as thread, T.If(thread < chunks):
        with T.Then():
            _move(bound, CHUNK, "cache", thread, thread)
        with T.Else():
            element = let(chunks * per_chunk + thread - chunks)
            with T.If(element < elements), T.Then():
                _move(bound, bound.itemsize, "cache", element, element)


def _copy_elements(bound: BoundUpdate, tiles: ThreadTiles, elements: Expr) -> None:
    """Copy present := cache, whose elements are provably fewer than those of a chunk.

    TVM would divide by the number of chunks of such an array.
    """
    if is_int(elements, 0):
        return
    with launch_threads(elements, tiles) as element:
        _move(bound, bound.itemsize, "cache", element, element)


def _write_rows(bound: BoundUpdate, tiles: ThreadTiles, size: int) -> None:
    """Write the rows of the update to their positions, `size` bytes per thread."""
    per_row = tirx.truncdiv(bound.suffix * bound.itemsize, T.int64(size))
    with launch_threads(bound.prefixes * bound.length * per_row, tiles) as thread:
        row, column = let(tirx.truncdiv(thread, per_row)), let(tirx.truncmod(thread, per_row))
        prefix, s = let(tirx.truncdiv(row, bound.length)), let(tirx.truncmod(row, bound.length))
        with bound.position(let(bound.first_position(prefix)), s) as position:
            target = (prefix * bound.max_len + position) * per_row + column
            source = let(bound.source_row(prefix, s) * per_row + column)
            if not bound.update.circular:
                _move(bound, size, "update", target, source)
                return
            # Where several rows have one slot, the last one must win.
            with T.If(s >= bound.length - bound.max_len), T.Then():
                _move(bound, size, "update", target, source)


def _move(bound: BoundUpdate, size: int, source: str, target: Expr, start: Expr) -> None:
    """Copy vector number `start` of the source to vector number `target` of the written array."""
    written, read = (bound.flat(name, _BITS[size]) for name in (bound.target, source))
    T.buffer_store(written, read[start], [target])
