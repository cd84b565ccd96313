"""Addresses and values of the elements of Q, K, V and the outputs."""

from __future__ import annotations

from typing import Protocol

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..expr.emit import broadcast, cast, lanes, scalar_type, widen_to
from ..record.cache_layout import Axes, Pages
from ..record.problem import AttentionProblem
from .parameters import Size, int64
from .slots import Slots, clamp


class AddressingParameters(Protocol):
    """The parameters of a function as `Addressing` needs them: tensors by name, number of batches and of rows."""

    @property
    def problem(self) -> AttentionProblem: ...
    @property
    def buffers(self) -> dict[str, tirx.Buffer]: ...
    @property
    def B(self) -> Size: ...
    @property
    def S(self) -> Size: ...


class Addressing:
    """Elements of Q, K, V and the outputs. Indices may have any integer type; d may be a vector (`T.ramp`).

    Table entries are clamped: whatever they are, an element is inside its buffer.
    """

    def __init__(self, parameters: AddressingParameters) -> None:
        self.problem, self.buffers = parameters.problem, parameters.buffers
        self.S = parameters.S
        self.slots = Slots(parameters.problem.layout, parameters.buffers, parameters.B)

    # Rows.

    def rows(self, b: Expr) -> Size:
        """Return the number of query rows of batch b, at most S."""
        if not self.problem.is_ragged:
            return self.S
        starts, tokens = self.buffers["row_starts"], int64(self._extent("q", "t"))
        first, last = (
            clamp(starts[index], tokens) for index in (b, b + 1)
        )  # a difference of arbitrary numbers would wrap
        return clamp(last - first, int64(self.S))

    def row(self, b: Expr, i: Expr) -> Expr:
        """Return the index of query row i of batch b on the axis t of its buffers."""
        if not self.problem.is_ragged:
            return i
        return clamp(self.buffers["row_starts"][b] + int64(i), self._extent("q", "t") - 1)

    def at(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Return buffer and indices of element d of that row of q, k, v or y; h is the query head for q and y.

        For quantized values that share a byte the indices are those of the byte.
        """
        buffer, axes, dim = self._describe(name)
        if name not in ("q", "y") and self.packing > 1:
            d, dim = tirx.floordiv(d, self.packing), dim // self.packing
        axis_indices = {"b": b, "t": self.row(b, row)} if name in ("q", "y") else self._slot(name, b, row)
        axis_indices |= {"h": h, "d": d, "e": h * dim + d}
        return buffer, [axis_indices[axis] for axis in axes]

    def flat(self, name: str, offset: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Return buffer and indices of an element of q, k, v or y by its linear offset, which may be a vector."""
        return _flat(self._describe(name)[0], offset)

    def offset(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr | int = 0) -> Expr:
        """Return the linear int64 offset of the element that `at` finds for these indices."""
        buffer, indices = self.at(name, b, h, row, T.int64(1) * d)
        offset = int64(0)
        for index, size in zip(indices, buffer.shape):
            offset = offset * int64(size) + index
        return offset

    def strides(self, name: str) -> tuple[Size, Size, Size]:
        """Return the strides of q, k, v or y in elements, from one batch, head and row to the next.

        The row stride is valid within a `run`, the batch stride if the buffer has batches.
        """
        buffer, axes, dim = self._describe(name)
        dim = dim if name in ("q", "y") else dim // self.packing
        stride, strides = int64(1), {"b": int64(0)}
        for axis, size in zip(reversed(axes), reversed(buffer.shape)):
            strides[axis] = stride
            stride = stride * int64(size)
        return strides["b"], strides.get("h", int64(dim)), strides["t"]

    def run(self, name: str) -> int | None:
        """Return how many rows of q, k, v or y have one stride, from each multiple of it on.

        None stands for all rows of a batch.
        """
        return None if name in ("q", "y") else self.problem.layout.run

    @property
    def has_lookup(self) -> bool:
        """Whether finding a key takes tables or a ring: then `strides` is the stride within a `run`."""
        return self.problem.layout.has_lookup

    def extents(self, name: str) -> tuple[int, Size, Size]:
        """Return the numbers of heads, rows and batches of the buffer of q, k, v or y."""
        heads = self.problem.q_heads if name in ("q", "y") else self.problem.kv_heads
        return heads, self._extent(name, "t"), self._extent(name, "b")

    def slot_count(self) -> Expr:
        """Return the number of keys for which the cache has slots, over all batches and layers."""
        buffer, axes, _ = self._describe("k")
        count = int64(1)
        for axis, size in zip(axes, buffer.shape):
            count = count * int64(size) if axis in "btpl" else count
        slots = self.problem.layout.slots
        return tirx.floordiv(count, 2) if isinstance(slots, Pages) and slots.apart else count

    def _describe(self, name: str) -> tuple[tirx.Buffer, Axes, int]:
        """Return the buffer, its axes and the elements of a row of a head."""
        p = self.problem
        dim = p.head_dim if name in ("q", "k") else p.v_head_dim
        if name in ("q", "y"):
            return self.buffers[name], p.row_axes, dim
        return self.buffers["kv" if p.layout.is_joint else name], p.layout.axes, dim

    def _extent(self, name: str, axis: str) -> Size:
        buffer, axes, _ = self._describe(name)
        return buffer.shape[axes.index(axis)] if axis in axes else 1

    def _slot(self, name: str, b: Expr, j: Expr) -> dict[str, Expr]:
        """Return the indices of key j of batch b on the axes that do not depend on head and element."""
        return self.slots.locate(b, j, int(name == "v"), lambda axis: self._extent(name, axis)).indices

    # Elements.

    def q(self, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
        """Return element d of query row i, query head h, in acc_dtype."""
        return self._load("q", b, h, i, d)

    def k(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Return element d of key j, key/value head hk, in acc_dtype."""
        return self._load("k", b, hk, j, d)

    def v(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Return element d of value j, key/value head hk, in acc_dtype."""
        return self._load("v", b, hk, j, d)

    def _load(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> Expr:
        buffer, indices = self.at(name, b, h, row, d)
        value = buffer[tuple(indices)]
        if name == "q" or not self.problem.is_quantized:
            return widen_to(value, self.problem.acc_dtype)
        if self.packing > 1:
            unscaled = unpack_int4(value, d, self.problem.acc_dtype)
        else:
            unscaled = convert_quantized(value, self.problem.acc_dtype)
        if self.channels:
            buffer, indices = self.channel_scales(name, h, d)
            return unscaled * widen_to(buffer[tuple(indices)], self.problem.acc_dtype)
        scaled = unscaled * self.scale(name, self.offset(name, b, h, row, d))
        scaled_dtype = self.scaled_dtype()
        return (
            scaled
            if scaled_dtype == self.problem.acc_dtype
            else widen_to(cast(scaled, scaled_dtype), self.problem.acc_dtype)
        )

    @property
    def packing(self) -> int:
        """How many elements of k or v share one element of the buffer."""
        return self.problem.layout.packing

    @property
    def channels(self) -> bool:
        """Whether there is a scale for each element of a head, for all of k, and all of v: `channel_scales`."""
        quantization = self.problem.layout.quantization
        return quantization is not None and quantization.channels

    def channel_scales(self, name: str, h: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Return buffer and indices of the scale of element d of key/value head h."""
        joint = self.problem.layout.is_joint
        kv_index = [T.int64(int(name == "v"))] if joint else []
        return self.buffers["kv_scale" if joint else f"{name}_scale"], [*kv_index, int64(h), T.int64(1) * d]

    def group(self) -> int:
        """Return how many neighboring elements share a scale.

        It is 0 for one scale for all of k, and one for all of v, or for `channels`.
        """
        assert self.problem.layout.quantization is not None
        return self.problem.layout.quantization.group

    def tensor_scale(self, name: str) -> Expr | None:
        """Return the factor of all of k, or all of v, in acc_dtype, if there is one such number."""
        if not self.problem.is_quantized or self.group() or self.channels:
            return None
        return self.scale(name, T.int64(0))

    def scaled_dtype(self) -> str:
        """Return the type to which a scaled element is rounded.

        It is acc_dtype, unless scales by group are in half precision.
        """
        quantization = self.problem.layout.quantization
        return (
            quantization.scale_dtype
            if quantization is not None and quantization.has_rounded_scaling
            else self.problem.acc_dtype
        )

    def scale(self, name: str, offset: Expr) -> Expr:
        """Return the scale of the element of k or v at the linear `offset`, in acc_dtype."""
        index = (
            tirx.floordiv(offset, self.group())
            if self.group()
            else T.int64(int(self.problem.layout.is_joint and name == "v"))
        )
        buffer, indices = self.scales(name, index)
        return widen_to(buffer[tuple(indices)], self.problem.acc_dtype)

    def scales(self, name: str, index: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Return buffer and indices of a scale of k or v by its linear offset.

        Scales have the axes of the elements that they scale, so that element n has scale n // group.
        """
        return _flat(self.buffers["kv_scale" if self.problem.layout.is_joint else f"{name}_scale"], index)

    def store_y(self, b: Expr, h: Expr, i: Expr, d: Expr, value: Expr) -> None:
        """Store Y at (b, h, i, d) := value, rounded to the type of Y."""
        buffer, indices = self.at("y", b, h, i, d)
        T.buffer_store(buffer, cast(value, buffer.dtype), indices)

    def store_qk(self, b: Expr, h: Expr, i: Expr, j: Expr, value: Expr) -> None:
        """Store the qk output at (b, h, i, j) := value, rounded to its type."""
        buffer = self.buffers["qk"]
        T.buffer_store(buffer, cast(value, buffer.dtype), [b, h, i, j])

    def store_statistics(self, b: Expr, h: Expr, i: Expr, m: Expr, l: Expr) -> None:
        """Store the requested outputs lse := m + log(l) and max := m of a row, from its final maximum and sum."""
        indices = [self.row(b, i), h] if self.problem.is_ragged else [b, h, i]
        if self.problem.lse:
            T.buffer_store(self.buffers["lse"], m + T.log(l), indices)
        if self.problem.max:
            T.buffer_store(self.buffers["max"], m, indices)


def _flat(buffer: tirx.Buffer, offset: Expr) -> tuple[tirx.Buffer, list[Expr]]:
    # The offset goes into the last index: TVM's passes for half precision do not handle a view with one axis.
    return buffer, [T.int64(0)] * (len(buffer.shape) - 1) + [offset]


def unpack_int4(value: Expr, d: Expr, dtype: str) -> Expr:
    """Return int4 element d of a row from its byte, or a vector of them, as a number before its scale."""
    shift = cast(tirx.floormod(d, broadcast(tirx.const(2, scalar_type(d)), lanes(d))), "int32")
    four, mask, eight = (broadcast(tirx.const(x, "int32"), lanes(value)) for x in (4, 15, 8))
    return cast(((cast(value, "int32") >> (shift * four)) & mask) - eight, dtype)


def convert_quantized(value: Expr, dtype: str) -> Expr:
    """Return a stored value, int8 or the bits of a float8_e4m3fn, or a vector of them, as a number before its scale.

    Exponent and mantissa of float8_e4m3fn, at the bit position of those of float32, are a number too small by 2^120.
    """
    if scalar_type(value) == "int8":
        return cast(value, dtype)

    def const(x: float, kind: str) -> Expr:
        return broadcast(tirx.const(x, kind), lanes(value))

    bits = cast(value, "uint32")
    magnitude = bits & const(0x7F, "uint32")
    shifted = T.reinterpret(bits.ty.dtype.replace("uint", "float"), magnitude << const(20, "uint32"))
    number = tirx.Select(
        tirx.EQ(magnitude, const(0x7F, "uint32")), const(float("nan"), "float32"), shifted * const(2.0**120, "float32")
    )
    negative = tirx.NE(bits & const(0x80, "uint32"), const(0, "uint32"))
    return cast(tirx.Select(negative, -number, number), dtype)
