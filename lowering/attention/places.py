"""Where elements lie, and what they hold."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .expr.emit import broadcast, cast, lanes, scalar_type, widened
from .parameters import Parameters, Size, int64
from .store import Axes, Offset, Pages


class Places:
    """Elements of Q, K, V and the outputs. Indices may have any integer type; d may be a vector (`T.ramp`).

    What tables say is clamped: whatever they hold, an element is one of the buffer.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.problem, self.buffers = parameters.problem, parameters.buffers
        self.B, self.S = parameters.B, parameters.S

    # Rows.

    def rows(self, b: Expr) -> Size:
        """How many query rows batch b has, at most S."""
        if not self.problem.packed:
            return self.S
        starts = self.buffers["row_starts"]
        return _clamp(starts[b + 1] - starts[b], int64(self.S))

    def row(self, b: Expr, i: Expr) -> Expr:
        """Where query row i of batch b is on the axis t of its buffers."""
        if not self.problem.packed:
            return i
        return _clamp(self.buffers["row_starts"][b] + int64(i), self._extent("q", "t") - 1)

    def at(self, name: str, b: Expr, h: Expr, row: Expr, d: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of element d of that row of q, k, v or y; h is the query head for q and y."""
        buffer, axes, dim = self._about(name)
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
        stride, strides = int64(1), {"b": int64(0)}
        for axis, size in zip(reversed(axes), reversed(buffer.shape)):
            strides[axis] = stride
            stride = stride * int64(size)
        return strides["b"], strides.get("h", int64(dim)), strides["t"]

    def run(self, name: str) -> int | None:
        """How many rows of q, k, v or y lie at one stride, from each multiple of it on; None for all of a batch."""
        return None if name in ("q", "y") else self.problem.store.run

    @property
    def looked_up(self) -> bool:
        """Whether it takes tables or a ring to find a key: then `strides` is that within a `run`."""
        return self.problem.store.looked_up

    def extents(self, name: str) -> tuple[int, Size, Size]:
        """Heads, rows and batches that the buffer of q, k, v or y has."""
        heads = self.problem.q_heads if name in ("q", "y") else self.problem.kv_heads
        return heads, self._extent(name, "t"), self._extent(name, "b")

    def _about(self, name: str) -> tuple[tirx.Buffer, Axes, int]:
        """Buffer, its axes and the elements of a row of a head."""
        p = self.problem
        dim = p.head_dim if name in ("q", "k") else p.v_head_dim
        if name in ("q", "y"):
            return self.buffers[name], p.row_axes, dim
        return self.buffers["kv" if p.store.joint else name], p.store.axes, dim

    def _extent(self, name: str, axis: str) -> Size:
        buffer, axes, _ = self._about(name)
        return buffer.shape[axes.index(axis)] if axis in axes else 1

    def _slot(self, name: str, b: Expr, j: Expr) -> dict[str, Expr]:
        """Where key j of batch b lies on the axes that do not depend on head and element."""
        store = self.problem.store
        place: dict[str, Expr] = {"b": b, "t": j, "l": T.int64(store.layer), "c": T.int64(int(name == "v"))}
        if not self.looked_up:
            return place
        row, slot = self._beam(int64(b), int64(j)), self._turn(int64(j))
        place |= {"b": row, "t": slot}
        slots = self._extent(name, "t")
        if isinstance(store.slots, Offset):
            place["t"] = self.buffers["slot_starts"][b] + slot
        elif isinstance(store.slots, Pages):
            pages, size = self.buffers["pages"], T.int64(store.slots.size)
            column = _clamp(tirx.floordiv(slot, size), pages.shape[-1] - 1)
            plane = [place["c"]] if store.slots.apart else []
            entry, rest = pages[(row, *plane, column)], tirx.floormod(slot, size)
            if store.slots.entries == "slot":
                place["t"] = entry + rest
            else:
                return place | {"t": rest, "p": _clamp(entry, self._extent(name, "p") - 1)}
        rows = self._extent(name, "b")
        return place | {"t": _clamp(place["t"], slots - 1), "b": _clamp(row, int64(rows) - 1)}

    def _turn(self, j: Expr) -> Expr:
        """The slot of key j in a ring."""
        ring = self.problem.store.ring
        if ring is None:
            return j
        turned = tirx.floormod(tirx.max(j - ring.sinks, T.int64(0)), T.int64(ring.capacity)) + ring.first
        return tirx.Select(j < ring.sinks, j, turned)

    def _beam(self, b: Expr, j: Expr) -> Expr:
        """The row of the cache in which batch b finds key j."""
        beams = self.problem.store.beams
        if beams is None:
            return b
        table, request = self.buffers["beam_of"], tirx.floordiv(b, T.int64(beams.count))
        found = table[request, tirx.floormod(b, T.int64(beams.count)), _clamp(j, table.shape[2] - 1)]
        source = tirx.Select(j < self.buffers["prompts"][request], T.int64(0), _clamp(found, T.int64(beams.count - 1)))
        return tirx.min(request * beams.count + source, int64(self.B) - 1)

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
        return decoded(value, self.problem.acc_dtype) * self.scale(name, self.offset(name, b, h, row, d))

    def group(self) -> int:
        """How many elements share a scale, which are neighbours in memory; 0 if all of k, and all of v, do."""
        assert self.problem.store.codec is not None
        return self.problem.store.codec.group

    def scale(self, name: str, offset: Expr) -> Expr:
        """The scale of an element of k or v, whose `offset` is this, in acc_dtype."""
        index = (
            tirx.floordiv(offset, self.group())
            if self.group()
            else T.int64(int(self.problem.store.joint and name == "v"))
        )
        buffer, indices = self.scales(name, index)
        return widened(buffer[tuple(indices)], self.problem.acc_dtype)

    def scales(self, name: str, index: Expr) -> tuple[tirx.Buffer, list[Expr]]:
        """Buffer and indices of a scale of k or v by its number in memory. Scales have the axes of what they scale, so
        that element n has scale n // group."""
        return _flat(self.buffers["kv_scale" if self.problem.store.joint else f"{name}_scale"], index)

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


def decoded(value: Expr, dtype: str) -> Expr:
    """A stored code, or a vector of them, as a floating-point number, before its scale.

    Exponent and mantissa of float8_e4m3fn, put where those of float32 are, are a number that is too small by 2^120.
    """
    if scalar_type(value) != "float8_e4m3fn":
        return cast(value, dtype)

    def const(x: float, kind: str) -> Expr:
        return broadcast(tirx.const(x, kind), lanes(value))

    code = cast(T.reinterpret(value.ty.dtype.replace("float8_e4m3fn", "uint8"), value), "uint32")
    magnitude = code & const(0x7F, "uint32")
    shifted = T.reinterpret(code.ty.dtype.replace("uint", "float"), magnitude << const(20, "uint32"))
    number = tirx.Select(
        tirx.EQ(magnitude, const(0x7F, "uint32")), const(float("nan"), "float32"), shifted * const(2.0**120, "float32")
    )
    negative = tirx.NE(code & const(0x80, "uint32"), const(0, "uint32"))
    return cast(tirx.Select(negative, -number, number), dtype)


def _clamp(value: Expr, end: Expr) -> Expr:
    """value, at least 0 and at most `end`, where that is not negative."""
    return tirx.max(tirx.min(value, end), 0)
