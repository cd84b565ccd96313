"""The cache update: ONNX TensorScatter, and every other write of new rows into a key/value cache.

A cache of any rank is [prefix, max_len, suffix] in memory: prefix are the axes before the scatter axis and suffix those
after it. The first prefix axis is the batch. Row s of an update of length L goes to position w + s, where w is the
batch's write index: (w + s) mod max_len if circular. Otherwise rows outside [0, max_len) are dropped.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..records import Record
from .regions import full_region

ATTRIBUTE = "lowering.scatter"

# Bytes that one thread copies in the time it takes to wake another.
_PARALLEL_BYTES = 1 << 18


@dataclass(frozen=True)
class CacheUpdate(Record):
    """The record of a cache update.

    dims are the cache's, length is L; None is symbolic. Bits are copied, dtype is the storage type.

    indices: an int64 [batch] parameter of write indices; without it they are 0. rows_first: the rows of the update come
    before the other axes of the prefix, [batch, length, heads, suffix].
    """

    dtype: str
    dims: tuple[int | None, ...]
    length: int | None
    axis: int  # 1 .. rank - 1
    circular: bool = False
    indices: bool = True
    rows_first: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.axis < len(self.dims):
            raise ValueError(f"axis {self.axis} is not in 1 .. {len(self.dims) - 1}")

    @property
    def row_axis(self) -> int:
        """The axis of the update's rows."""
        return 1 if self.rows_first else self.axis


def make_copying_update(update: CacheUpdate) -> tirx.PrimFunc:
    """Return a PrimFunc (cache, update[, write_indices], present): present := cache with the new rows."""
    return _make_prim_func(update, copy=True)


def make_in_place_update(update: CacheUpdate) -> tirx.PrimFunc:
    """Return a PrimFunc (cache, update[, write_indices]) that writes the new rows into cache."""
    return _make_prim_func(update, copy=False)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the in-place form of a copying cache update, recognized by its attribute `lowering.scatter`."""
    return make_in_place_update(CacheUpdate.from_json(str(function.attrs[ATTRIBUTE])))


class BoundUpdate:
    """A cache update with buffers for its parameters, by name; `target` names the written one.

    In memory the cache is [prefixes, max_len, suffix] and the update [prefixes, length, suffix], or with rows_first
    [batch, length, rest, suffix]; `rest` prefixes share a batch.
    """

    def __init__(
        self, update: CacheUpdate, buffers: dict[str, tirx.Buffer], length: Expr, target: str = "cache"
    ) -> None:
        self.update, self.buffers, self.length, self.target = update, buffers, length, target
        dims = list(buffers["cache"].shape)
        self.rest, self.max_len = _multiply(dims[1 : update.axis]), dims[update.axis]
        self.prefixes, self.suffix = dims[0] * self.rest, _multiply(dims[update.axis + 1 :])

    @staticmethod
    def declare(update: CacheUpdate, copy: bool) -> BoundUpdate:
        """Declare the parameters in the PrimFunc frame that is open in the IRBuilder.

        With copy a new array, "present", is written instead of the cache.
        """
        T.func_name("update_cache")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: update.to_json()})
        names = ("cache", "update") + ("write_indices",) * update.indices + ("present",) * copy
        arguments = {name: T.arg(name, T.handle()) for name in names}
        dims = [_size_or_symbol(f"d{axis}", d) for axis, d in enumerate(update.dims)]
        length = _size_or_symbol("length", update.length)
        shapes = {
            "cache": dims,
            "update": _update_shape(dims, update, length),
            "write_indices": dims[:1],
            "present": dims,
        }
        buffers = {}
        for name, argument in arguments.items():
            dtype = "int64" if name == "write_indices" else update.dtype
            matched = T.match_buffer(argument, shapes[name], dtype, align=_element_bytes(dtype))
            buffers[name] = IRBuilder.name(name, matched)
        return BoundUpdate(update, buffers, length, "present" if copy else "cache")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _element_bytes(self.update.dtype)

    def flat(self, name: str, dtype: str | None = None) -> tirx.Buffer:
        """Return the memory of a parameter as a vector, optionally of another element type."""
        buffer = self.buffers[name]
        dtype = dtype or str(buffer.dtype)
        return T.decl_buffer(
            [_multiply(buffer.shape) * _element_bytes(str(buffer.dtype)) // _element_bytes(dtype)],
            dtype,
            data=buffer.data,
        )

    def first_position(self, prefix: Expr) -> Expr:
        """Return the position of the update's row 0, before it is wrapped or dropped."""
        b = prefix // tirx.max(self.rest, 1)
        return self.flat("write_indices")[b] if self.update.indices else T.int64(0)

    def source_row(self, prefix: Expr, s: Expr) -> Expr:
        """Return the index of the update's row s of a prefix, in memory."""
        if not self.update.rows_first:
            return prefix * self.length + s
        b = prefix // tirx.max(self.rest, 1)
        return (b * self.length + s) * self.rest + (prefix - b * self.rest)

    def split_source_row(self, row: Expr) -> tuple[Expr, Expr]:
        """Return the prefix and s of row `row` of the update in memory: the inverse of source_row."""
        end = tirx.max(self.length, 1)
        if not self.update.rows_first:
            return row // end, row % end
        rest = tirx.max(self.rest, 1)
        return row // rest // end * rest + row % rest, row // rest % end

    @contextmanager
    def position(self, w: Expr, s: Expr) -> Iterator[Expr]:
        """Yield the position of row s if row 0 is at w; the body is skipped for a dropped row."""
        if self.update.circular:
            end = tirx.max(self.max_len, 1)
            yield T.bind(tirx.floormod(tirx.floormod(w, end) + s, end))
        else:
            position = T.bind(w + s)
            with T.If(tirx.all(position >= 0, position < self.max_len)), T.Then():
                yield position


def _update_shape(dims: Sequence[Expr], update: CacheUpdate, length: Expr) -> list[Expr]:
    inner, suffix = dims[1 : update.axis], dims[update.axis + 1 :]
    return [dims[0], length, *inner, *suffix] if update.rows_first else [dims[0], *inner, length, *suffix]


def _make_prim_func(update: CacheUpdate, copy: bool) -> tirx.PrimFunc:
    # Private: a module gives each function a unique name.
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        emit_update(BoundUpdate.declare(update, copy))
    return builder.get()


def emit_update(bound: BoundUpdate) -> None:
    """Emit a block that does the update at the current position of the IRBuilder."""
    length, max_len, suffix, target = bound.length, bound.max_len, bound.suffix, bound.target
    copy = target != "cache"
    with T.sblock("update_cache"):
        T.reads([full_region(buffer) for name, buffer in bound.buffers.items() if name != target])
        T.writes([full_region(bound.buffers[target])])
        flat = {name: bound.flat(name) for name in bound.buffers}

        def write_rows(prefix: Expr) -> None:
            if copy:
                size = max_len * suffix
                _copy(flat["present"], prefix * size, flat["cache"], prefix * size, size)
            w = T.bind(bound.first_position(prefix))
            with T.serial(length) as s, bound.position(w, s) as position:
                to, source = (prefix * max_len + position) * suffix, bound.source_row(prefix, s) * suffix
                _copy(flat[target], to, flat["update"], source, suffix)

        written = bound.prefixes * (max_len if copy else length) * suffix * bound.itemsize
        with T.If(written >= _PARALLEL_BYTES):
            with T.Then(), T.parallel(bound.prefixes) as prefix:
                write_rows(prefix)
            with T.Else(), T.serial(bound.prefixes) as prefix:
                write_rows(prefix)


def _copy(to: tirx.Buffer, to_start: Expr, source: tirx.Buffer, start: Expr, size: Expr) -> None:
    """Emit a loop that LLVM turns into a memcpy."""
    with T.serial(size) as element:
        T.buffer_store(to, source[start + element], [to_start + element])


def _size_or_symbol(name: str, size: int | None) -> Expr:
    return T.int64(size) if size is not None else IRBuilder.name(name, T.int64())


def _element_bytes(dtype: str) -> int:
    return max(1, DataType(dtype).bits * DataType(dtype).lanes // 8)


def _multiply(sizes: Sequence[Expr]) -> Expr:
    return functools.reduce(operator.mul, sizes, tirx.const(1, "int64"))
