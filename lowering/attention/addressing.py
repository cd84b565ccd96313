"""Where elements lie, and what they hold."""

from __future__ import annotations

from typing import Protocol

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .cache_layout import Axes, Pages
from .expr.emit import broadcast, cast, lanes, scalar_type, widened
from .parameters import Size, int64
from .problem import AttentionProblem
from .slots import Slots, clamp


class Given(Protocol):
    """What is asked of the parameters of a function: the tensors by name, how many batches there are, and rows."""

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

    What tables say is clamped: whatever they hold, an element is one of the buffer.
    """

    def __init__(self, parameters: Given) -> None:
        self.problem, self.buffers = parameters.problem, parameters.buffers
        self.S = parameters.S
        self.slots = Slots(parameters.problem.layout, parameters.buffers, parameters.B)

    # Rows.

    def rows(self, b: Expr) -> Size:
        """How many query rows batch b has, at most S."""
        if not self.problem.packed:
            return self.S
        starts, tokens = self.buffers["row_starts"], int64(self._extent("q", "t"))
        first, last = (clamp(starts[at], tokens) for at in (b, b + 1))  # differences of any numbers would wrap
        return clamp(last - first, int64(self.S))

    def row(self, b: Expr, i: Expr) -> Expr:
        """Where query row i of batch b is on the axis t of its buffers."""
        if not self.problem.packed:
            return i
        return clamp(self.buffers["row_starts"][b] + int64(i), self._extent("q", "t") - 1)

    def at(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of element d of that row of q, k, v or y; h is the query head for q and y. Of codes that
        share bytes it is the byte."""
        buffer, axes, dim = self._about(name)
        if name not in ("q", "y") and self.packing > 1:
            d, dim = tirx.floordiv(d, self.packing), dim // self.packing
        where = {"b": b, "t": self.row(b, row)} if name in ("q", "y") else self._slot(name, b, row)
        where |= {"h": h, "d": d, "e": h * dim + d}
        return buffer, [where[axis] for axis in axes]

    def flat(self, name: str, offset: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of an element of q, k, v or y by its number in memory, which may be a vector."""
        return _flat(self._about(name)[0], offset)

    def offset(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr | int = 0) -> Expr:
        """The number in memory of the element `at` these indices; int64."""
        buffer, indices = self.at(name, b, h, row, T.int64(1) * d)
        offset = int64(0)
        for index, size in zip(indices, buffer.shape):
            offset = offset * int64(size) + index
        return offset

    def strides(self, name: str) -> tuple[Size, Size, Size]:
        """Elements from one batch, head and row of q, k, v or y to the next: row to row within a `run`, and batch to
        batch where the buffer has batches."""
        buffer, axes, dim = self._about(name)
        dim = dim if name in ("q", "y") else dim // self.packing
        stride, strides = int64(1), {"b": int64(0)}
        for axis, size in zip(reversed(axes), reversed(buffer.shape)):
            strides[axis] = stride
            stride = stride * int64(size)
        return strides["b"], strides.get("h", int64(dim)), strides["t"]

    def run(self, name: str) -> int | None:
        """How many rows of q, k, v or y lie at one stride, from each multiple of it on; None for all of a batch."""
        return None if name in ("q", "y") else self.problem.layout.run

    @property
    def looked_up(self) -> bool:
        """Whether it takes tables or a ring to find a key: then `strides` is that within a `run`."""
        return self.problem.layout.looked_up

    def extents(self, name: str) -> tuple[int, Size, Size]:
        """Heads, rows and batches that the buffer of q, k, v or y has."""
        heads = self.problem.q_heads if name in ("q", "y") else self.problem.kv_heads
        return heads, self._extent(name, "t"), self._extent(name, "b")

    def slot_count(self) -> Expr:
        """How many keys the cache has room for, of all batches and layers."""
        buffer, axes, _ = self._about("k")
        count = int64(1)
        for axis, size in zip(axes, buffer.shape):
            count = count * int64(size) if axis in "btpl" else count
        slots = self.problem.layout.slots
        return tirx.floordiv(count, 2) if isinstance(slots, Pages) and slots.apart else count

    def _about(self, name: str) -> tuple[tirx.Buffer, Axes, int]:
        """Buffer, its axes and the elements of a row of a head."""
        p = self.problem
        dim = p.head_dim if name in ("q", "k") else p.v_head_dim
        if name in ("q", "y"):
            return self.buffers[name], p.row_axes, dim
        return self.buffers["kv" if p.layout.joint else name], p.layout.axes, dim

    def _extent(self, name: str, axis: str) -> Size:
        buffer, axes, _ = self._about(name)
        return buffer.shape[axes.index(axis)] if axis in axes else 1

    def _slot(self, name: str, b: Expr, j: Expr) -> dict[str, Expr]:
        """Where key j of batch b lies on the axes that do not depend on head and element."""
        return self.slots.of(b, j, int(name == "v"), lambda axis: self._extent(name, axis)).where

    # Elements.

    def q(self, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
        """Element d of query row i, query head h, in acc_dtype."""
        return self._load("q", b, h, i, d)

    def k(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Element d of key j, key/value head hk, in acc_dtype."""
        return self._load("k", b, hk, j, d)

    def v(self, b: Expr, hk: Expr, j: Expr, d: Expr) -> Expr:
        """Element d of value j, key/value head hk, in acc_dtype."""
        return self._load("v", b, hk, j, d)

    def _load(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> Expr:
        buffer, indices = self.at(name, b, h, row, d)
        value = buffer[tuple(indices)]
        if name == "q" or not self.problem.coded:
            return widened(value, self.problem.acc_dtype)
        if self.packing > 1:
            number = half_byte(value, d, self.problem.acc_dtype)
        else:
            number = decoded(value, self.problem.acc_dtype)
        if self.channels:
            buffer, indices = self.channel_scales(name, h, d)
            return number * widened(buffer[tuple(indices)], self.problem.acc_dtype)
        product = number * self.scale(name, self.offset(name, b, h, row, d))
        narrow = self.product_type()
        return product if narrow == self.problem.acc_dtype else widened(cast(product, narrow), self.problem.acc_dtype)

    @property
    def packing(self) -> int:
        """How many elements of k or v share one of the buffer."""
        return self.problem.layout.packing

    @property
    def channels(self) -> bool:
        """Whether there is a scale for each element of a head, for all of k, and all of v: `channel_scales`."""
        codec = self.problem.layout.codec
        return codec is not None and codec.channels

    def channel_scales(self, name: str, h: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of the scale of element d of key/value head h."""
        joint = self.problem.layout.joint
        part = [T.int64(int(name == "v"))] if joint else []
        return self.buffers["kv_scale" if joint else f"{name}_scale"], [*part, int64(h), T.int64(1) * d]

    def group(self) -> int:
        """How many elements share a scale, which are neighbors in memory; 0 if all of k, and all of v, do, or
        `channels`."""
        assert self.problem.layout.codec is not None
        return self.problem.layout.codec.group

    def factor(self, name: str) -> Expr | None:
        """What all of k, or all of v, is to be multiplied by, in acc_dtype, if there is such a number."""
        if not self.problem.coded or self.group() or self.channels:
            return None
        return self.scale(name, T.int64(0))

    def product_type(self) -> str:
        """The type that a code times its scale is rounded to: acc_dtype, but for scales of half precision by group."""
        codec = self.problem.layout.codec
        return codec.scale_dtype if codec is not None and codec.rounds else self.problem.acc_dtype

    def scale(self, name: str, offset: Expr) -> Expr:
        """The scale of an element of k or v, whose `offset` is this, in acc_dtype."""
        index = (
            tirx.floordiv(offset, self.group())
            if self.group()
            else T.int64(int(self.problem.layout.joint and name == "v"))
        )
        buffer, indices = self.scales(name, index)
        return widened(buffer[tuple(indices)], self.problem.acc_dtype)

    def scales(self, name: str, index: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of a scale of k or v by its number in memory. Scales have the axes of what they scale, so
        that element n has scale n // group."""
        return _flat(self.buffers["kv_scale" if self.problem.layout.joint else f"{name}_scale"], index)

    def store_y(self, b: Expr, h: Expr, i: Expr, d: Expr, value: Expr) -> None:
        """Y at (b, h, i, d) := value, rounded to the type of Y."""
        buffer, indices = self.at("y", b, h, i, d)
        T.buffer_store(buffer, cast(value, buffer.dtype), indices)

    def store_qk(self, b: Expr, h: Expr, i: Expr, j: Expr, value: Expr) -> None:
        """The qk output at (b, h, i, j) := value, rounded to its type."""
        buffer = self.buffers["qk"]
        T.buffer_store(buffer, cast(value, buffer.dtype), [b, h, i, j])

    def store_ends(self, b: Expr, h: Expr, i: Expr, m: Expr, l: Expr) -> None:
        """The outputs lse := m + log(l) and max := m of a row, from its final maximum and sum; those that there are."""
        place = [self.row(b, i), h] if self.problem.packed else [b, h, i]
        if self.problem.lse:
            T.buffer_store(self.buffers["lse"], m + T.log(l), place)
        if self.problem.max:
            T.buffer_store(self.buffers["max"], m, place)


def _flat(buffer: tirx.Buffer, offset: Expr) -> tuple[tirx.Buffer, list[Expr]]:
    # The last index is as good as any; a view with one axis would be lost on TVM's passes for half precision.
    return buffer, [T.int64(0)] * (len(buffer.shape) - 1) + [offset]


def half_byte(value: Expr, d: Expr, dtype: str) -> Expr:
    """The int4 of a byte that is element d of its row, or a vector of them, as a number before its scale."""
    shift = cast(tirx.floormod(d, broadcast(tirx.const(2, scalar_type(d)), lanes(d))), "int32")
    four, mask, eight = (broadcast(tirx.const(x, "int32"), lanes(value)) for x in (4, 15, 8))
    return cast(((cast(value, "int32") >> (shift * four)) & mask) - eight, dtype)


def decoded(value: Expr, dtype: str) -> Expr:
    """A stored code, int8 or the bits of a float8_e4m3fn, or a vector of them, as a number before its scale.

    Exponent and mantissa of float8_e4m3fn, put where those of float32 are, are a number that is too small by 2^120.
    """
    if scalar_type(value) == "int8":
        return cast(value, dtype)

    def const(x: float, kind: str) -> Expr:
        return broadcast(tirx.const(x, kind), lanes(value))

    code = cast(value, "uint32")
    magnitude = code & const(0x7F, "uint32")
    shifted = T.reinterpret(code.ty.dtype.replace("uint", "float"), magnitude << const(20, "uint32"))
    number = tirx.Select(
        tirx.EQ(magnitude, const(0x7F, "uint32")), const(float("nan"), "float32"), shifted * const(2.0**120, "float32")
    )
    negative = tirx.NE(code & const(0x80, "uint32"), const(0, "uint32"))
    return cast(tirx.Select(negative, -number, number), dtype)
