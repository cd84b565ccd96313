"""The cache update: ONNX TensorScatter, and every other write of new rows into a key/value cache.

Whatever its rank, a cache is [prefix, max_len, suffix] in memory, prefix being the axes before the scatter
axis and suffix those behind it; the first prefix axis is the batch. Row s of an update of length L goes to
position w + s, w being the batch's write index: (w + s) mod max_len if circular; otherwise rows outside [0,
max_len) are dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

ATTRIBUTE = "lowering.scatter"

# Bytes that one thread copies before another is awake.
_PARALLEL_BYTES = 1 << 18


@dataclass(frozen=True)
class CacheUpdate:
    """What one cache update does. dims are the cache's, length is L; None is symbolic. Bits are copied, dtype
    is storage.

    indices: an int64 [batch] parameter of write indices; without it they are 0.
    """

    dtype: str
    dims: tuple[int | None, ...]
    length: int | None
    axis: int  # 1 .. rank - 1
    circular: bool = False
    indices: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.axis < len(self.dims):
            raise ValueError(f"axis {self.axis} is not in 1 .. {len(self.dims) - 1}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> CacheUpdate:
        data = json.loads(text)
        return CacheUpdate(**{**data, "dims": tuple(data["dims"])})


def copy_and_update(update: CacheUpdate) -> tirx.PrimFunc:
    """PrimFunc (cache, update[, write_indices], present): present := cache with the new rows."""
    return _prim_func(update, copy=True)


def update_in_place(update: CacheUpdate) -> tirx.PrimFunc:
    """PrimFunc (cache, update[, write_indices]): writes the new rows into cache, and nothing else."""
    return _prim_func(update, copy=False)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The in-place form of a copying cache update, recognised by its attribute `lowering.scatter`."""
    return update_in_place(CacheUpdate.from_json(str(function.attrs[ATTRIBUTE])))


def _prim_func(update: CacheUpdate, copy: bool) -> tirx.PrimFunc:
    target = "present" if copy else "cache"
    # Private: a module gives each function a name of its own.
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        T.func_name("update_cache")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: update.to_json()})
        names = ("cache", "update") + ("write_indices",) * update.indices + ("present",) * copy
        arguments = {name: T.arg(name, T.handle()) for name in names}
        dims = [_size(f"d{axis}", d) for axis, d in enumerate(update.dims)]
        length = _size("length", update.length)
        shapes = {
            "cache": dims,
            "update": [length if axis == update.axis else d for axis, d in enumerate(dims)],
            "write_indices": dims[:1],
            "present": dims,
        }
        buffers = {}
        for name, argument in arguments.items():
            dtype = "int64" if name == "write_indices" else update.dtype
            matched = T.match_buffer(argument, shapes[name], dtype, align=_bytes(dtype))
            buffers[name] = IRBuilder.name(name, matched)
        rest, max_len = _product(dims[1 : update.axis]), dims[update.axis]
        suffix = _product(dims[update.axis + 1 :])
        with T.sblock("update_cache"):
            T.reads([_all(buffer) for name, buffer in buffers.items() if name != target])
            T.writes([_all(buffers[target])])
            flat = {name: T.decl_buffer([_product(x.shape)], x.dtype, data=x.data) for name, x in buffers.items()}

            def write(prefix: Expr) -> None:
                if copy:
                    size = max_len * suffix
                    _copy(flat["present"], prefix * size, flat["cache"], prefix * size, size)
                b = prefix // tirx.max(rest, 1)
                w = T.bind(flat["write_indices"][b] if update.indices else T.int64(0))
                with T.serial(length) as s, _position(w, s, max_len, update.circular) as position:
                    to, source = (prefix * max_len + position) * suffix, (prefix * length + s) * suffix
                    _copy(flat[target], to, flat["update"], source, suffix)

            prefixes = dims[0] * rest
            written = prefixes * (max_len if copy else length) * suffix * _bytes(update.dtype)
            with T.If(written >= _PARALLEL_BYTES):
                with T.Then(), T.parallel(prefixes) as prefix:
                    write(prefix)
                with T.Else(), T.serial(prefixes) as prefix:
                    write(prefix)
    return builder.get()


@contextmanager
def _position(w: Expr, s: Expr, max_len: Expr, circular: bool) -> Iterator[Expr]:
    """Where row s goes; the body is skipped for a row that goes nowhere."""
    if circular:
        end = tirx.max(max_len, 1)
        yield T.bind(tirx.floormod(tirx.floormod(w, end) + s, end))
    else:
        position = T.bind(w + s)
        with T.If(tirx.all(position >= 0, position < max_len)), T.Then():
            yield position


def _copy(to: tirx.Buffer, to_start: Expr, source: tirx.Buffer, start: Expr, size: Expr) -> None:
    """A loop that LLVM turns into a memcpy."""
    with T.serial(size) as element:
        T.buffer_store(to, source[start + element], [to_start + element])


def _size(name: str, size: int | None) -> Expr:
    return T.int64(size) if size is not None else IRBuilder.name(name, T.int64())


def _bytes(dtype: str) -> int:
    return max(1, DataType(dtype).bits // 8)


def _product(sizes: Sequence[Expr]) -> Expr:
    return functools.reduce(operator.mul, sizes, tirx.const(1, "int64"))


def _all(buffer: tirx.Buffer) -> tirx.BufferRegion:
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]
