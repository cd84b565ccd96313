"""KvWrite: write new rows of keys and values to a cache, after bias, rotary embedding and quantization.

    for each batch b, new row i < row_counts[b] and head h:       t = starts[b] + i, n = row_starts[b] + i
        x = the D elements of row n, + bias                        float32
        x = x rotated by the angles of row n                       keys only
        x = x rounded to `dtype`, as seen by attention over uncached keys
        slot of key t := x, or its quantized value and scale

Rows of all batches are in one buffer, in any order, with gaps that are never read. Only slots of new rows are written.
A row whose slot is outside the cache is dropped. If a ring maps several rows to one slot, the last one is written.

Quantization with a scale for a group is symmetric: the scale is max |x| / 127, at least 1e-5, computed in `dtype`, and
quantized values are at most 127 in magnitude (OpenPPL's KeyValueCache). Quantization with a scale for the tensor gives
x * factor, rounded to even and saturated, where `factor` is an input, the inverse of the scale that readers use
(TensorRT-LLM's kv_orig_quant_scale). Scales of channels work the same way, with a factor for each element of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..records import Record
from ..tensorir.regions import full_region
from .cache_elements import compute_group_scale, quantize_in_group, quantize_value, round_to_dtype
from .codegen.parameters import SymbolicSizes, TensorSpec, declare_buffer, describe_cache_tables, describe_cache_tensors
from .codegen.slots import Slots, saturate
from .expr.emit import cast, widen_to
from .record.cache_layout import CacheLayout, KvQuantization

ATTRIBUTE = "lowering.kv_write"

# The chunks into which the rows of a batch are split, and the number of elements below which one thread does all.
_CHUNKS_PER_BATCH = 16
_PARALLEL_ELEMENTS = 1 << 15
# Independent maxima, as a compiler does not reorder a single one. A power of two.
_LANES = 16


@dataclass(frozen=True)
class Rotary:
    """The first `dim` elements of each head of a key are rotated in pairs.

    The pairs are (2k, 2k + 1) if interleaved, else (k, k + dim / 2). angles is a float32 [N, dim / 2, 2] parameter with
    cosine and sine by row.
    """

    dim: int
    interleaved: bool


@dataclass(frozen=True)
class Columns:
    """Rows of `width` elements, in which the elements of the keys begin at k and those of the values at v."""

    k: int
    v: int
    width: int


@dataclass(frozen=True)
class KvWrite(Record):
    """The parameters of a KV write. batch None is symbolic. With v_head_dim 0 there are keys but no values.

    New rows are buffers new_k [N, H, D] and new_v [N, H, Dv], or one, new [N, width], with `columns`; bias is a [width]
    parameter of type dtype.
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
        if self.layout.is_joint and self.head_dim != self.v_head_dim:
            raise ValueError("keys and values in one buffer must have the same size")
        quantization = self.quantization
        if quantization is not None and quantization.group and quantization.dtype != "int8":
            raise ValueError("scales of groups need int8 quantized values")
        if quantization is not None and quantization.channels and self.v_head_dim > self.head_dim:
            raise ValueError("scales of channels must cover the elements of a value: head_dim is less than v_head_dim")
        if self.head_dim % self.layout.packing or self.v_head_dim % self.layout.packing:
            raise ValueError("quantized values that share bytes need even head sizes")
        if self.bias and self.columns is None:
            raise ValueError("a bias needs columns")

    @property
    def quantization(self) -> KvQuantization | None:
        """Type and scales of the caches if they are quantized."""
        return self.layout.quantization

    def caches(self) -> tuple[str, ...]:
        """Return the names of the buffers that are written."""
        quantization, buffers = (
            self.quantization,
            ("kv",) if self.layout.is_joint else ("k", "v")[: len(self.dims())],
        )
        grouped = quantization is not None and quantization.group > 0
        return (*buffers, *(f"{name}_scale" for name in buffers if grouped))

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the parameters before the written ones of the copying form: the caches come first."""
        quantization = self.quantization
        present = {
            "new": self.columns is not None,
            "new_k": self.columns is None,
            "new_v": self.columns is None and self.v_head_dim > 0,
            "bias": self.bias,
            "angles": self.rotary is not None,
            "factor": quantization is not None and quantization.group == 0,
        }
        operands = (*(name for name, is_present in present.items() if is_present), "row_starts", "row_counts", "starts")
        beams = ("prompts", "beam_of")  # used by readers only
        return (*self.caches(), *operands, *(name for name in self.layout.tables() if name not in beams))

    def dims(self) -> tuple[int, ...]:
        """Return the elements of a row of a head of the keys, and of the values if there are any."""
        return (self.head_dim, self.v_head_dim) if self.v_head_dim else (self.head_dim,)


class BoundKvWrite:
    """A KV write with the parameters of the PrimFunc frame that is open in the IRBuilder.

    The constructor declares the parameters: the inputs, and with copy the written caches once more.
    """

    def __init__(self, record: KvWrite, copy: bool) -> None:
        self.record, self._layout = record, record.layout
        T.func_name("kv_write")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: record.to_json()})
        written = {name: f"{name}_present" if copy else name for name in record.caches()}
        names = (*record.inputs(), *(written.values() if copy else ()))
        arguments = {name: T.arg(name, T.handle()) for name in names}
        self.size = SymbolicSizes()
        self.B = self.size("B") if record.batch is None else record.batch
        shapes = self._shapes()
        shapes |= {new: shapes[old] for old, new in written.items()}
        self.buffers = {name: declare_buffer(name, argument, *shapes[name]) for name, argument in arguments.items()}
        self.written = {name: self.buffers[new] for name, new in written.items()}
        self.slots = Slots(self._layout, self.buffers, self.B, is_written=True)

    def _shapes(self) -> dict[str, TensorSpec]:
        record = self.record
        tokens, width = self.size("tokens"), record.columns.width if record.columns is not None else 0
        dims, types = (record.head_dim, record.v_head_dim), (record.dtype, record.dtype)
        by_batch: TensorSpec = ([self.B], "int64")
        inputs: dict[str, TensorSpec] = {
            "new": ([tokens, width], record.dtype),
            "new_k": ([tokens, record.heads, record.head_dim], record.dtype),
            "new_v": ([tokens, record.heads, record.v_head_dim], record.dtype),
            "bias": ([width], record.dtype),
            "angles": ([tokens, record.rotary.dim // 2 if record.rotary is not None else 0, 2], "float32"),
            "factor": (
                [2, record.heads, record.head_dim] if record.quantization and record.quantization.channels else [2],
                "float32",
            ),
            **dict.fromkeys(("row_starts", "row_counts", "starts"), by_batch),
        }
        caches = describe_cache_tensors(self._layout, record.heads, dims, types, self.B, self.size("slots"), self.size)
        return inputs | caches | describe_cache_tables(self._layout, self.B, self.size)

    def rows(self, b: Expr) -> Expr:
        """Return the number of new rows of batch b: 0 if the buffer does not contain them."""
        first, count = self.buffers["row_starts"][b], self.buffers["row_counts"][b]
        tokens = self.size("tokens")
        is_valid = tirx.all(first >= 0, first <= tokens)
        return tirx.Select(is_valid, tirx.max(tirx.min(count, tokens - first), T.int64(0)), T.int64(0))

    def key(self, b: Expr, i: Expr) -> Expr:
        """Return the number of the key that new row i of batch b is."""
        return saturate(self.buffers["starts"][b]) + i

    def is_last_in_slot(self, b: Expr, i: Expr) -> Expr:
        """Return whether no later row of the batch is written to the slot of row i."""
        ring = self.slots.ring()
        if ring is None:
            return tirx.const(True, "bool")
        sinks, _, capacity = ring
        return tirx.any(self.key(b, i) < sinks, i >= self.rows(b) - capacity)

    def element(self, kv_index: int, n: Expr, h: Expr, d: Expr) -> Expr:
        """Return element d of head h of row n of the new keys (kv_index 0) or values (1), with its bias; float32."""
        columns, a = self.record.columns, self.record
        if columns is None:
            return widen_to(self.buffers[("new_k", "new_v")[kv_index]][n, h, d], "float32")
        column = (columns.k, columns.v)[kv_index] + h * (a.head_dim, a.v_head_dim)[kv_index] + d
        value = widen_to(self.buffers["new"][n, column], "float32")
        return value + widen_to(self.buffers["bias"][column], "float32") if a.bias else value

    def rotate_pair(self, n: Expr, k: Expr, x: Expr, y: Expr) -> tuple[Expr, Expr]:
        """Return the pair (x, y) number k of row n, rotated by its angle."""
        cos, sin = (self.buffers["angles"][n, k, T.int64(side)] for side in (0, 1))
        return x * cos - y * sin, y * cos + x * sin

    def pair(self, k: Expr) -> tuple[Expr, Expr]:
        """Return the two elements of a head that are rotated as pair k."""
        rotary = self.record.rotary
        assert rotary is not None
        return (2 * k, 2 * k + 1) if rotary.interleaved else (k, k + rotary.dim // 2)

    @contextmanager
    def slot(
        self, kv_index: int, b: Expr, t: Expr, scale: bool = False
    ) -> Iterator[tuple[tirx.Buffer, dict[str, Expr]]]:
        """Yield the buffer of the keys or values, or of their scales, and the indices of key t in it.

        The indices are those on the axes that do not depend on the element. The body is skipped if the slot is not in
        the buffer.
        """
        name = "kv" if self._layout.is_joint else "kv"[kv_index]
        buffer, axes = self.written[f"{name}_scale" if scale else name], self._layout.axes
        slot = self.slots.locate_own(b, t, kv_index, lambda axis: buffer.shape[axes.index(axis)] if axis in axes else 1)
        layer = self._layout.layer < buffer.shape[axes.index("l")] if "l" in axes else tirx.const(True, "bool")
        with T.If(tirx.all(slot.is_inside, layer)), T.Then():
            yield buffer, slot.indices

    def factor(self, kv_index: int, h: Expr, d: Expr) -> Expr:
        """Return the factor that quantizes element d of head h, unless there are scales of groups."""
        channels = self.record.quantization is not None and self.record.quantization.channels
        return self.buffers["factor"][(T.int64(kv_index), *((h, d) if channels else ()))]

    def quantize_element(self, kv_index: int, h: Expr, n: Expr, value: Callable[[Expr], Expr]) -> Expr:
        """Return element n of head h of a quantized buffer, unless there are scales of groups.

        It packs the element value(n), or as many elements as share it.
        """
        quantization = self.record.quantization
        assert quantization is not None
        if quantization.packing == 1:
            return quantize_value(value(n) * self.factor(kv_index, h, n), quantization.dtype)
        low, high = (
            quantize_value(value(d) * self.factor(kv_index, h, d), quantization.dtype) for d in (2 * n, 2 * n + 1)
        )
        return low | (high << tirx.const(4, "uint8"))

    def index(self, indices: dict[str, Expr], h: Expr, d: Expr, dim: int) -> list[Expr]:
        """Return the indices of element d, or of scale d, of head h, which has `dim` of them."""
        return [(indices | {"h": h, "d": d, "e": h * dim + d})[axis] for axis in self._layout.axes]


def copy_and_write(record: KvWrite) -> tirx.PrimFunc:
    """Build PrimFunc (*inputs, *caches): the written caches are copies of the input ones with the new rows."""
    return _build(record, copy=True)


def write_in_place(record: KvWrite) -> tirx.PrimFunc:
    """Build PrimFunc (*inputs), which writes the new rows into the caches and does nothing else."""
    return _build(record, copy=False)


def in_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Build the in-place form of a copying KV write, recognized by its attribute `lowering.kv_write`."""
    return write_in_place(KvWrite.from_json(str(function.attrs[ATTRIBUTE])))


def _build(record: KvWrite, copy: bool) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        bound = BoundKvWrite(record, copy)
        with T.sblock("kv_write"):
            T.reads(
                [full_region(buffer) for name, buffer in bound.buffers.items() if not copy or name in record.inputs()]
            )
            T.writes([full_region(buffer) for buffer in bound.written.values()])
            if copy:
                for name, buffer in bound.written.items():
                    with T.grid(*buffer.shape) as index:
                        T.buffer_store(buffer, bound.buffers[name][tuple(index)], list(index))
            size = bound.size("tokens") * record.heads * (record.head_dim + record.v_head_dim)

            def rows_of(work: Expr) -> None:
                b, share = T.bind(work // _CHUNKS_PER_BATCH), work % _CHUNKS_PER_BATCH
                count = T.bind(bound.rows(b))
                first, last = (T.bind(count * s // _CHUNKS_PER_BATCH) for s in (share, share + 1))
                with T.serial(last - first) as r, T.serial(T.int64(record.heads)) as h:
                    _Head(bound, b, T.bind(first + r), h).emit()

            work = T.int64(_CHUNKS_PER_BATCH) * bound.B
            with T.If(size >= _PARALLEL_ELEMENTS):
                with T.Then(), T.parallel(work) as number:
                    rows_of(number)
                with T.Else(), T.serial(work) as number:
                    rows_of(number)
    return builder.get()


class _Head:
    """The code for head h of new row i of batch b."""

    def __init__(self, bound: BoundKvWrite, b: Expr, i: Expr, h: Expr) -> None:
        self.bound, self.record, self.b, self.i, self.h = bound, bound.record, b, i, h
        self.n = T.bind(bound.buffers["row_starts"][b] + i)
        self.t = T.bind(bound.key(b, i))

    def emit(self) -> None:
        with T.If(self.bound.is_last_in_slot(self.b, self.i)), T.Then():
            for kv_index, dim in enumerate(self.record.dims()):
                self.store_rows(kv_index, dim)

    def store_rows(self, kv_index: int, dim: int) -> None:
        x = T.alloc_buffer((dim,), "float32")
        with T.serial(T.int64(dim)) as d:
            T.buffer_store(x, self.bound.element(kv_index, self.n, self.h, d), [d])
        rotary = self.record.rotary
        if rotary is not None and kv_index == 0:
            with T.serial(T.int64(rotary.dim // 2)) as k:
                first, second = self.bound.pair(k)
                pair = [T.bind(value) for value in self.bound.rotate_pair(self.n, k, x[first], x[second])]
                for index, value in zip((first, second), pair):
                    T.buffer_store(x, value, [index])
        quantization = self.record.quantization
        with self.bound.slot(kv_index, self.b, self.t) as (buffer, indices):
            if quantization is not None and quantization.group:
                self.store_grouped(kv_index, x, dim, quantization, buffer, indices)
                return
            width = dim // self.record.layout.packing
            with T.serial(T.int64(width)) as n:

                def exact(d: Expr) -> Expr:
                    return round_to_dtype(x[d], self.record.dtype)

                value = (
                    cast(exact(n), buffer.dtype)
                    if quantization is None
                    else self.bound.quantize_element(kv_index, self.h, n, exact)
                )
                T.buffer_store(buffer, value, self.bound.index(indices, self.h, n, width))

    def store_grouped(
        self,
        kv_index: int,
        x: tirx.Buffer,
        dim: int,
        quantization: KvQuantization,
        buffer: tirx.Buffer,
        indices: dict[str, Expr],
    ) -> None:
        """Store quantized values with a scale for each group."""
        dtype, lanes = self.record.dtype, math.gcd(quantization.group, _LANES)
        largest = T.alloc_buffer((lanes,), "float32")
        with (
            T.serial(T.int64(dim // quantization.group)) as g,
            self.bound.slot(kv_index, self.b, self.t, scale=True) as (scales, scale_indices),
        ):
            with T.serial(T.int64(lanes)) as lane:
                T.buffer_store(largest, tirx.const(0.0, "float32"), [lane])
            with T.serial(T.int64(quantization.group // lanes)) as e, T.serial(T.int64(lanes)) as lane:
                value = round_to_dtype(x[g * quantization.group + e * lanes + lane], dtype)
                T.buffer_store(largest, tirx.max(largest[lane], tirx.abs(value)), [lane])
            remaining = lanes
            while remaining > 1:
                remaining //= 2
                with T.serial(T.int64(remaining)) as lane:
                    T.buffer_store(largest, tirx.max(largest[lane], largest[lane + remaining]), [lane])
            scale = T.bind(compute_group_scale(largest[0], dtype))
            at = self.bound.index(scale_indices, self.h, g, dim // quantization.group)
            T.buffer_store(scales, cast(scale, scales.dtype), at)
            with T.serial(T.int64(quantization.group)) as e:
                d = g * quantization.group + e
                value = round_to_dtype(round_to_dtype(x[d], dtype) / scale, dtype)
                T.buffer_store(buffer, quantize_in_group(value), self.bound.index(indices, self.h, d, dim))
