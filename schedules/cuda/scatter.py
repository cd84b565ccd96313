"""The cache update: new rows go to their places in a key/value cache, 16 bytes per thread where rows divide into them.

In place, nothing but the new rows is touched. A copy is made as one stream first, whatever its rows look like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr, prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.scatter import ATTRIBUTE, BoundUpdate, CacheUpdate

from ..tiles import Space, Tiles
from ..variant import Variant
from .device import Device, device
from .ptx import fixed

CHUNK = 16  # bytes that a thread moves at once

# By size in bytes: what is moved are bits.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32x2", 16: "uint32x4"}


@dataclass(frozen=True)
class ScatterTiles(Tiles):
    """Tiles of the cache update."""

    threads: int = 256
    """Per block."""

    @classmethod
    def default(cls, problem: CacheUpdate, device: Device) -> ScatterTiles:
        return ScatterTiles()

    @classmethod
    def space(cls, problem: CacheUpdate, device: Device) -> Space:
        return {"threads": (64, 128, 256, 512, 1024)}

    def rules(self, problem: CacheUpdate, device: Device) -> dict[str, bool]:
        return {f"threads = {self.threads} must be 32 to 1024, by 32": self.threads in range(32, 1025, 32)}


def cache_update(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """A cache update (lowering/tensorir/scatter.py), in place or not."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    update, gpu = CacheUpdate.from_json(str(func.attrs[ATTRIBUTE])), device(target)
    copy = len(func.params) > 2 + update.indices
    tiles = {"update": ScatterTiles.default(update, gpu)}
    return [Variant("rows", update, gpu, tiles, lambda tiles: _kernels(update, copy, tiles["update"]))]


def _kernels(update: CacheUpdate, copy: bool, tiles: ScatterTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundUpdate(update, copy)
        if copy:
            _copy(bound, tiles)
        size = Analyzer().simplify(bound.suffix * bound.itemsize)
        if isinstance(size, prim.IntImm):
            _write_rows(bound, tiles, math.gcd(size.value, CHUNK))
        else:
            with T.If(tirx.truncmod(size, T.int64(CHUNK)) == 0):
                with T.Then():
                    _write_rows(bound, tiles, CHUNK)
                with T.Else():
                    _write_rows(bound, tiles, bound.itemsize)
    return builder.get()


@contextmanager
def _threads(count: Expr, tiles: ScatterTiles) -> Iterator[Expr]:
    """A launch of threads that are numbered from 0 to count - 1; there may be none."""
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(count, tiles.threads), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
    ):
        number = fixed(block.astype("int64") * tiles.threads + thread)
        with T.If(number < count), T.Then():
            yield number


def _copy(bound: BoundUpdate, tiles: ScatterTiles) -> None:
    """present := cache, in chunks, and what is left behind the last chunk by elements."""
    elements = bound.prefixes * bound.max_len * bound.suffix
    per_chunk = CHUNK // bound.itemsize
    chunks = tirx.truncdiv(elements, T.int64(per_chunk))
    with _threads(chunks + per_chunk - 1, tiles) as thread, T.If(thread < chunks):
        with T.Then():
            _move(bound, CHUNK, "cache", thread, thread)
        with T.Else():
            element = fixed(chunks * per_chunk + thread - chunks)
            with T.If(element < elements), T.Then():
                _move(bound, bound.itemsize, "cache", element, element)


def _write_rows(bound: BoundUpdate, tiles: ScatterTiles, size: int) -> None:
    """The rows of the update to their positions, `size` bytes per thread."""
    per_row = tirx.truncdiv(bound.suffix * bound.itemsize, T.int64(size))
    with _threads(bound.prefixes * bound.length * per_row, tiles) as thread:
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
