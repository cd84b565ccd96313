"""KvWrite: new rows of keys and values go into a cache, with bias, rotary embedding and quantization on their way.

    for each batch b, new row i < row_counts[b] and head h:       t = starts[b] + i, n = row_starts[b] + i
        x = the D elements of row n, + bias                        float32
        x = rotated by the angles of row n                         keys only
        x = x rounded to `dtype`, which is what attention over uncached keys sees
        slot of key t := x, or its code and scale

Rows of all batches lie in one buffer, in any order, with gaps that are never read. Only slots of new rows are written:
a row whose slot is not in the cache is dropped, and of rows that a ring puts into one slot the last one stays.

Codes with a scale for a group are symmetric: the scale is max |x| / 127, at least 1e-5, computed in `dtype`, and codes
are at most 127 in size (OpenPPL's KeyValueCache). Codes with a scale for the tensor are x * factor, rounded to even and
saturated, where `factor` is an input, the inverse of the scale that readers use (TensorRT-LLM's kv_orig_quant_scale).
Scales of channels are the same with a factor for each element of a head.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import full_region
from .cache_layout import CacheLayout, Codec
from .expr.emit import cast, widened
from .parameters import Sizes, Tensor, matched, store_tables, store_tensors
from .slots import Slots

ATTRIBUTE = "lowering.kv_write"

LARGEST_CODE = 127
SMALLEST_SCALE = 1e-5
LARGEST_E4M3 = 448.0

# Parts that the rows of a batch are cut into, and elements below which one thread does all.
_PARTS = 16
_PARALLEL_ELEMENTS = 1 << 15
# Maxima that do not wait for one another: a compiler keeps the order of a single one. A power of two.
_LANES = 16


@dataclass(frozen=True)
class Rotary:
    """The first `dim` elements of each head of a key turn in pairs: (2k, 2k + 1) if interleaved, else (k, k + dim / 2).

    angles is a float32 [N, dim / 2, 2] parameter with cosine and sine by row.
    """

    dim: int
    interleaved: bool


@dataclass(frozen=True)
class Columns:
    """Rows of `width` elements, in which those of the keys begin at k and those of the values at v."""

    k: int
    v: int
    width: int


@dataclass(frozen=True)
class KvWrite:
    """What goes where. batch None is symbolic. With v_head_dim 0 there are keys, and no values. New rows are
    buffers new_k [N, H, D] and new_v [N, H, Dv], or one, new [N, width], with `columns`; bias is a [width] parameter of
    type dtype.
    """

    batch: int | None
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    layout: CacheLayout
    columns: Columns | None = None
    bias: bool = False
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        if self.layout.joint and self.head_dim != self.v_head_dim:
            raise ValueError("keys and values in one buffer have one size")
        codec = self.layout.codec
        if codec is not None and codec.group and codec.dtype != "int8":
            raise ValueError("scales of groups are made for int8")
        if codec is not None and codec.channels and self.v_head_dim > self.head_dim:
            raise ValueError("factors of channels are as many as a key has elements")
        if self.head_dim % self.layout.packing or self.v_head_dim % self.layout.packing:
            raise ValueError("codes that share bytes come in pairs")
        if self.bias and self.columns is None:
            raise ValueError("a bias is that of columns")

    def caches(self) -> tuple[str, ...]:
        """Names of the buffers that are written."""
        codec, buffers = self.layout.codec, ("kv",) if self.layout.joint else ("k", "v")[: len(self.dims())]
        grouped = codec is not None and codec.group > 0
        return (*buffers, *(f"{name}_scale" for name in buffers if grouped))

    def inputs(self) -> tuple[str, ...]:
        """Names of the parameters in front of the written ones of the copying form: the caches come first."""
        codec = self.layout.codec
        present = {
            "new": self.columns is not None,
            "new_k": self.columns is None,
            "new_v": self.columns is None and self.v_head_dim > 0,
            "bias": self.bias,
            "angles": self.rotary is not None,
            "factor": codec is not None and codec.group == 0,
        }
        given = (*(name for name, there in present.items() if there), "row_starts", "row_counts", "starts")
        beams = ("prompts", "beam_of")  # say where to read
        return (*self.caches(), *given, *(name for name in self.layout.tables() if name not in beams))

    def dims(self) -> tuple[int, ...]:
        """Elements of a row of a head of the keys, and of the values if there are any."""
        return (self.head_dim, self.v_head_dim) if self.v_head_dim else (self.head_dim,)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"layout": self.layout.to_data()})

    @staticmethod
    def from_json(text: str) -> KvWrite:
        data = json.loads(text)
        for name, kind in (("columns", Columns), ("rotary", Rotary)):
            if data[name] is not None:
                data[name] = kind(**data[name])
        return KvWrite(**{**data, "layout": CacheLayout.from_data(data["layout"])})


class BoundKvWrite:
    """`kv_write` with the parameters of the PrimFunc frame that is open in the IRBuilder, which the constructor
    declares: the inputs, and with copy the written caches once more."""

    def __init__(self, record: KvWrite, copy: bool) -> None:
        self.record, self.layout = record, record.layout
        T.func_name("kv_write")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: record.to_json()})
        written = {name: f"{name}_present" if copy else name for name in record.caches()}
        names = (*record.inputs(), *(written.values() if copy else ()))
        arguments = {name: T.arg(name, T.handle()) for name in names}
        self.size = Sizes()
        self.B = self.size("B") if record.batch is None else record.batch
        shapes = self._shapes()
        shapes |= {new: shapes[old] for old, new in written.items()}
        self.buffers = {name: matched(name, argument, *shapes[name]) for name, argument in arguments.items()}
        self.written = {name: self.buffers[new] for name, new in written.items()}
        self.slots = Slots(self.layout, self.buffers, self.B)

    def _shapes(self) -> dict[str, Tensor]:
        a = self.record
        tokens, width = self.size("tokens"), a.columns.width if a.columns is not None else 0
        dims, types = (a.head_dim, a.v_head_dim), (a.dtype, a.dtype)
        by_batch: Tensor = ([self.B], "int64")
        own: dict[str, Tensor] = {
            "new": ([tokens, width], a.dtype),
            "new_k": ([tokens, a.heads, a.head_dim], a.dtype),
            "new_v": ([tokens, a.heads, a.v_head_dim], a.dtype),
            "bias": ([width], a.dtype),
            "angles": ([tokens, a.rotary.dim // 2 if a.rotary is not None else 0, 2], "float32"),
            "factor": ([2, a.heads, a.head_dim] if a.layout.codec and a.layout.codec.channels else [2], "float32"),
            **dict.fromkeys(("row_starts", "row_counts", "starts"), by_batch),
        }
        stored = store_tensors(self.layout, a.heads, dims, types, self.B, self.size("slots"), self.size)
        return own | stored | store_tables(self.layout, self.B, self.size)

    def rows(self, b: Expr) -> Expr:
        """How many new rows batch b has: none, if the buffer does not hold them."""
        first, count = self.buffers["row_starts"][b], self.buffers["row_counts"][b]
        tokens = self.size("tokens")
        there = tirx.all(first >= 0, first <= tokens)
        return tirx.Select(there, tirx.max(tirx.min(count, tokens - first), T.int64(0)), T.int64(0))

    def stays(self, b: Expr, i: Expr) -> Expr:
        """Whether no later row of the batch takes the slot of row i."""
        ring = self.slots.ring()
        if ring is None:
            return tirx.const(True, "bool")
        sinks, _, capacity = ring
        return tirx.any(self.buffers["starts"][b] + i < sinks, i >= self.rows(b) - capacity)

    def element(self, part: int, n: Expr, h: Expr, d: Expr) -> Expr:
        """Element d of head h of row n of the new keys (part 0) or values (1), with its bias; float32."""
        columns, a = self.record.columns, self.record
        if columns is None:
            return widened(self.buffers[("new_k", "new_v")[part]][n, h, d], "float32")
        at = (columns.k, columns.v)[part] + h * (a.head_dim, a.v_head_dim)[part] + d
        value = widened(self.buffers["new"][n, at], "float32")
        return value + widened(self.buffers["bias"][at], "float32") if a.bias else value

    def turned(self, n: Expr, k: Expr, x: Expr, y: Expr) -> tuple[Expr, Expr]:
        """The pair (x, y) number k of row n, turned by its angle."""
        cos, sin = (self.buffers["angles"][n, k, T.int64(side)] for side in (0, 1))
        return x * cos - y * sin, y * cos + x * sin

    def pair(self, k: Expr) -> tuple[Expr, Expr]:
        """Which elements of a head turn together."""
        rotary = self.record.rotary
        assert rotary is not None
        return (2 * k, 2 * k + 1) if rotary.interleaved else (k, k + rotary.dim // 2)

    @contextmanager
    def slot(self, part: int, b: Expr, t: Expr, scale: bool = False) -> Iterator[tuple[tirx.Buffer, dict[str, Expr]]]:
        """The buffer of part's elements, or of their scales, and the indices of key t on the axes that do not depend on
        the element; the body is skipped if the slot is not in the buffer."""
        name = "kv" if self.layout.joint else "kv"[part]
        buffer, axes = self.written[f"{name}_scale" if scale else name], self.layout.axes
        slot = self.slots.own(b, t, part, lambda axis: buffer.shape[axes.index(axis)] if axis in axes else 1)
        layer = self.layout.layer < buffer.shape[axes.index("l")] if "l" in axes else tirx.const(True, "bool")
        with T.If(tirx.all(slot.inside, layer)), T.Then():
            yield buffer, slot.where

    def factor(self, part: int, h: Expr, d: Expr) -> Expr:
        """What element d of head h is multiplied by to be a code, but for scales of groups."""
        channels = self.layout.codec is not None and self.layout.codec.channels
        return self.buffers["factor"][(T.int64(part), *((h, d) if channels else ()))]

    def coded(self, part: int, h: Expr, n: Expr, value: Callable[[Expr], Expr]) -> Expr:
        """Element n of head h of the buffer, which holds codes, but for scales of groups: one of the element value(n),
        or of as many as share it."""
        codec = self.layout.codec
        assert codec is not None
        if codec.packing == 1:
            return code(value(n) * self.factor(part, h, n), codec.dtype)
        low, high = (code(value(d) * self.factor(part, h, d), codec.dtype) for d in (2 * n, 2 * n + 1))
        return low | (high << tirx.const(4, "uint8"))

    def index(self, where: dict[str, Expr], h: Expr, d: Expr, dim: int) -> list[Expr]:
        """The indices of element d, or of scale d, of head h, which has so many."""
        return [(where | {"h": h, "d": d, "e": h * dim + d})[axis] for axis in self.layout.axes]


def copy_and_write(record: KvWrite) -> tirx.PrimFunc:
    """PrimFunc (*inputs, *caches): the written caches are copies of the given ones with the new rows."""
    return _prim_func(record, copy=True)


def write_in_place(record: KvWrite) -> tirx.PrimFunc:
    """PrimFunc (*inputs): writes the new rows into the caches, and nothing else."""
    return _prim_func(record, copy=False)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The in-place form of a copying KV write, recognized by its attribute `lowering.kv_write`."""
    return write_in_place(KvWrite.from_json(str(function.attrs[ATTRIBUTE])))


def _prim_func(record: KvWrite, copy: bool) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        bound = BoundKvWrite(record, copy)
        with T.sblock("kv_write"):
            T.reads(
                [full_region(buffer) for name, buffer in bound.buffers.items() if not copy or name in record.inputs()]
            )
            T.writes([full_region(buffer) for buffer in bound.written.values()])
            if copy:
                for name, buffer in bound.written.items():
                    with T.grid(*buffer.shape) as place:
                        T.buffer_store(buffer, bound.buffers[name][tuple(place)], list(place))
            size = bound.size("tokens") * record.heads * (record.head_dim + record.v_head_dim)

            def rows_of(work: Expr) -> None:
                b, share = T.bind(work // _PARTS), work % _PARTS
                count = T.bind(bound.rows(b))
                first, last = (T.bind(count * s // _PARTS) for s in (share, share + 1))
                with T.serial(last - first) as r, T.serial(T.int64(record.heads)) as h:
                    _Head(bound, b, T.bind(first + r), h).emit()

            work = T.int64(_PARTS) * bound.B
            with T.If(size >= _PARALLEL_ELEMENTS):
                with T.Then(), T.parallel(work) as each:
                    rows_of(each)
                with T.Else(), T.serial(work) as each:
                    rows_of(each)
    return builder.get()


class _Head:
    """The code for head h of new row i of batch b."""

    def __init__(self, bound: BoundKvWrite, b: Expr, i: Expr, h: Expr) -> None:
        self.bound, self.record, self.b, self.i, self.h = bound, bound.record, b, i, h
        self.n = T.bind(bound.buffers["row_starts"][b] + i)
        self.t = T.bind(bound.buffers["starts"][b] + i)

    def emit(self) -> None:
        with T.If(self.bound.stays(self.b, self.i)), T.Then():
            for part, dim in enumerate(self.record.dims()):
                self.part(part, dim)

    def part(self, part: int, dim: int) -> None:
        x = T.alloc_buffer((dim,), "float32")
        with T.serial(T.int64(dim)) as d:
            T.buffer_store(x, self.bound.element(part, self.n, self.h, d), [d])
        rotary = self.record.rotary
        if rotary is not None and part == 0:
            with T.serial(T.int64(rotary.dim // 2)) as k:
                one, other = self.bound.pair(k)
                pair = [T.bind(value) for value in self.bound.turned(self.n, k, x[one], x[other])]
                for place, value in zip((one, other), pair):
                    T.buffer_store(x, value, [place])
        codec = self.record.layout.codec
        with self.bound.slot(part, self.b, self.t) as (buffer, where):
            if codec is not None and codec.group:
                self.grouped(part, x, dim, codec, buffer, where)
                return
            width = dim // self.record.layout.packing
            with T.serial(T.int64(width)) as n:

                def exact(d: Expr) -> Expr:
                    return rounded(x[d], self.record.dtype)

                value = cast(exact(n), buffer.dtype) if codec is None else self.bound.coded(part, self.h, n, exact)
                T.buffer_store(buffer, value, self.bound.index(where, self.h, n, width))

    def grouped(
        self, part: int, x: tirx.Buffer, dim: int, codec: Codec, buffer: tirx.Buffer, where: dict[str, Expr]
    ) -> None:
        """Codes with a scale for each group."""
        dtype, lanes = self.record.dtype, math.gcd(codec.group, _LANES)
        largest = T.alloc_buffer((lanes,), "float32")
        with (
            T.serial(T.int64(dim // codec.group)) as g,
            self.bound.slot(part, self.b, self.t, scale=True) as (scales, places),
        ):
            with T.serial(T.int64(lanes)) as lane:
                T.buffer_store(largest, tirx.const(0.0, "float32"), [lane])
            with T.serial(T.int64(codec.group // lanes)) as e, T.serial(T.int64(lanes)) as lane:
                value = rounded(x[g * codec.group + e * lanes + lane], dtype)
                T.buffer_store(largest, tirx.max(largest[lane], tirx.abs(value)), [lane])
            left = lanes
            while left > 1:
                left //= 2
                with T.serial(T.int64(left)) as lane:
                    T.buffer_store(largest, tirx.max(largest[lane], largest[lane + left]), [lane])
            scale = T.bind(group_scale(largest[0], dtype))
            at = self.bound.index(places, self.h, g, dim // codec.group)
            T.buffer_store(scales, cast(scale, scales.dtype), at)
            with T.serial(T.int64(codec.group)) as e:
                d = g * codec.group + e
                value = rounded(rounded(x[d], dtype) / scale, dtype)
                T.buffer_store(buffer, group_code(value), self.bound.index(where, self.h, d, dim))


def rounded(value: Expr, dtype: str) -> Expr:
    """A float32 value with no more digits than dtype has, ties to even.

    To bfloat16 by integers: TVM takes a cast there and back for nothing (BF16ComputeLegalize).
    """
    if dtype == "float32":
        return value
    if dtype != "bfloat16":
        return cast(cast(value, dtype), "float32")
    bits = T.reinterpret("uint32", value)
    last = (bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")
    upper = (bits + tirx.const(0x7FFF, "uint32") + last) & tirx.const(0xFFFF0000, "uint32")
    return tirx.Select(tirx.isnan(value), value, T.reinterpret("float32", upper))


def group_scale(largest: Expr, dtype: str) -> Expr:
    """The scale of a group whose largest element has this size; float32 numbers of `dtype`."""
    smallest = float(np.array(SMALLEST_SCALE).astype(getattr(ml_dtypes, dtype, dtype)))  # TVM would not round it
    scale = rounded(largest / tirx.const(float(LARGEST_CODE), "float32"), dtype)
    return tirx.max(scale, tirx.const(smallest, "float32"))


def group_code(value: Expr) -> Expr:
    """The code of an element over its scale."""
    end = tirx.const(float(LARGEST_CODE), "float32")
    return cast(tirx.max(tirx.min(tirx.nearbyint(value), end), -end), "int8")


def code(value: Expr, dtype: str) -> Expr:
    """A float32 value as a code of this type, rounded to even and saturated; of int4 as it is stored, plus 8."""
    if dtype == "int4":
        low, high, zero = (tirx.const(x, "float32") for x in (-8.0, 7.0, 8.0))
        return cast(tirx.max(tirx.min(tirx.nearbyint(value), high), low) + zero, "uint8")
    if dtype == "int8":
        low, high = (tirx.const(x, "float32") for x in (-128.0, 127.0))
        return cast(tirx.max(tirx.min(tirx.nearbyint(value), high), low), "int8")
    return encoded_e4m3(value)


def encoded_e4m3(value: Expr) -> Expr:
    """The bits of the float8_e4m3fn that is nearest to a float32 value: ties to even, beyond 448 it is 448, NaN is 448.

    Above 2^-6 the three bits of its mantissa are the first of float32's. Below, numbers are multiples of 2^-9: adding
    and subtracting a number whose last place is that rounds to them.
    """
    end = tirx.const(LARGEST_E4M3, "float32")
    size = tirx.abs(value)
    size = tirx.Select(size < end, size, end)
    bits = T.reinterpret("uint32", size)
    one = tirx.const(1, "uint32")
    last = (bits >> tirx.const(20, "uint32")) & one
    normal = (bits + tirx.const((1 << 19) - 1, "uint32") + last) >> tirx.const(20, "uint32")
    normal = normal - tirx.const(120 << 3, "uint32")
    step = tirx.const(2.0**14, "float32")  # its last place is 2^-9
    small = T.reinterpret("uint32", size + step) - tirx.const(0x46800000, "uint32")
    magnitude = tirx.Select(size < tirx.const(2.0**-6, "float32"), small, normal)
    sign = (T.reinterpret("uint32", value) >> tirx.const(24, "uint32")) & tirx.const(0x80, "uint32")
    return cast(magnitude | sign, "uint8")
