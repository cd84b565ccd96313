"""The cache update: new rows go to their places in a key/value cache, 16 bytes per thread where rows divide into them.

In place, nothing but the new rows is touched. A copy is made as one stream first, whatever its rows look like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.ir import Expr, prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.scatter import ATTRIBUTE, BoundUpdate, CacheUpdate

from .ptx import fixed

THREADS = 256  # per block
CHUNK = 16  # bytes that a thread moves at once

# By size in bytes: what is moved are bits.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32x2", 16: "uint32x4"}


def cache_update(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """The kernel for a cache update of `lowering.scatter`, in place or not."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    update = CacheUpdate.from_json(str(func.attrs[ATTRIBUTE]))
    copy = len(func.params) > 2 + update.indices
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundUpdate(update, copy)
        if copy:
            _copy(bound)
        size = Analyzer().simplify(bound.suffix * bound.itemsize)
        if isinstance(size, prim.IntImm):
            _write_rows(bound, math.gcd(size.value, CHUNK))
        else:
            with T.If(tirx.truncmod(size, T.int64(CHUNK)) == 0):
                with T.Then():
                    _write_rows(bound, CHUNK)
                with T.Else():
                    _write_rows(bound, bound.itemsize)
    return builder.get()


@contextmanager
def _threads(count: Expr) -> Iterator[Expr]:
    """A launch of threads that are numbered from 0 to count - 1; there may be none."""
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(count, THREADS), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", THREADS) as thread,
    ):
        number = fixed(block.astype("int64") * THREADS + thread)
        with T.If(number < count), T.Then():
            yield number


def _copy(bound: BoundUpdate) -> None:
    """present := cache, in chunks, and what is left behind the last chunk by elements."""
    elements = bound.prefixes * bound.max_len * bound.suffix
    per_chunk = CHUNK // bound.itemsize
    chunks = tirx.truncdiv(elements, T.int64(per_chunk))
    with _threads(chunks + per_chunk - 1) as thread, T.If(thread < chunks):
        with T.Then():
            _move(bound, CHUNK, "cache", thread, thread)
        with T.Else():
            element = fixed(chunks * per_chunk + thread - chunks)
            with T.If(element < elements), T.Then():
                _move(bound, bound.itemsize, "cache", element, element)


def _write_rows(bound: BoundUpdate, size: int) -> None:
    """The rows of the update to their positions, `size` bytes per thread."""
    per_row = tirx.truncdiv(bound.suffix * bound.itemsize, T.int64(size))
    with _threads(bound.prefixes * bound.length * per_row) as thread:
        row, column = fixed(tirx.truncdiv(thread, per_row)), fixed(tirx.truncmod(thread, per_row))
        prefix, s = fixed(tirx.truncdiv(row, bound.length)), fixed(tirx.truncmod(row, bound.length))
        with bound.position(fixed(bound.first_position(prefix)), s) as position:
            to = (prefix * bound.max_len + position) * per_row + column
            if not bound.update.circular:
                _move(bound, size, "update", to, thread)
                return
            # Of rows that go to one place, the last one is to stay there.
            with T.If(s >= bound.length - bound.max_len), T.Then():
                _move(bound, size, "update", to, thread)


def _move(bound: BoundUpdate, size: int, source: str, to: Expr, start: Expr) -> None:
    """The piece number `to` of the array that is written := piece number `start` of the source."""
    written, read = (bound.flat(name, _BITS[size]) for name in (bound.target, source))
    T.buffer_store(written, read[start], [to])
