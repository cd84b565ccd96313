"""Quantized states of a recurrence: each step quantizes h before its matmul with int8 R, as ONNX Runtime does.

    scale = (max(h, 0) - min(h, 0)) / 255    zero = round(-min(h, 0) / scale)    q = round(h / scale) + zero
    sum over k of h R = scale r_scale (sum of q r - r_zero sum of q - zero r_sum)

q and zero are uint8, or int8 and smaller by 128, which is the same sum. Each batch has its own scale and zero point.
Accumulators are exact in int32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

if TYPE_CHECKING:
    from .recurrence import Rows


@dataclass(frozen=True)
class Dot:
    """accumulate(total, a, b): an int32 accumulator plus the dot product of four states, int8 if is_signed and else
    uint8, by four int8 values, of packed lanes or of vectors of them."""

    accumulate: Callable[[Expr, Expr, Expr], Expr]
    is_signed: bool = False


PACKED = 4
"""Values of a packed 32-bit lane."""


def _accumulate(total: Expr, a: Expr, b: Expr) -> Expr:
    for n in range(PACKED):
        total = total + (a >> 8 * n & 255) * (b << 24 - 8 * n >> 24)
    return total


PLAIN_DOT = Dot(_accumulate)
"""Of one packed lane of each, in operations of every machine."""


class QuantizedStates:
    """The quantized h of all batches of `rows`, and the dot products that read it."""

    def __init__(self, rows: Rows, dot: Dot) -> None:
        self.rows, self.dot = rows, dot
        self.dtype, self.least = ("int8", -128) if dot.is_signed else ("uint8", 0)
        self.values = T.alloc_buffer((rows.count * rows.width,), self.dtype)
        self.scale = T.alloc_buffer((rows.count,), "float32")
        self.zero, self.sum = (T.alloc_buffer((rows.count,), "int32") for _ in range(2))

    def quantize(self) -> None:
        """Quantize the present h. Padding after the units is 0, which every range includes."""
        for row in range(self.rows.count):
            low, high = self._range(row)
            width = T.bind(high - low)
            scale = T.bind(tirx.Select(width > 0, width / 255.0, _float(1.0)))
            zero = tirx.nearbyint(tirx.min(tirx.max((0.0 - low) / scale, _float(0.0)), _float(255.0)))
            zero = T.bind(zero + _float(self.least))
            total = self._accumulator("int32", 0)
            bounds = _float(self.least), _float(self.least + 255)
            spread = [T.bind(self._spread(number)) for number in (scale, zero, *bounds)]

            def write(at: Expr, h: Expr, spread: list[Expr] = spread, total: tirx.Buffer = total) -> None:
                scale, zero, least, most = spread
                number = self.rows.function("nearbyint", h / scale) + zero
                value = T.bind(tirx.max(tirx.min(number, most), least).astype(self._vector("int32")))
                self.rows.store(self.values, [at], value.astype(self._vector(self.dtype)))
                self.rows.store(total, [0], self.rows.load(total, [0]) + value)

            self._each_vector(row, write)
            T.buffer_store(self.scale, scale, [row])
            T.buffer_store(self.zero, zero.astype("int32"), [row])
            unused = self.rows.width - self.rows.record.units
            T.buffer_store(self.sum, self._reduced(total, lambda a, b: a + b) - unused * self.zero[row], [row])

    def _range(self, row: int) -> tuple[Expr, Expr]:
        """The smallest and the largest number of h, or 0."""
        bounds = [(self._accumulator("float32", 0.0), choose) for choose in (tirx.min, tirx.max)]

        def look(at: Expr, h: Expr) -> None:
            for bound, choose in bounds:
                self.rows.store(bound, [0], choose(self.rows.load(bound, [0]), h))

        self._each_vector(row, look)
        low, high = (T.bind(self._reduced(bound, choose)) for bound, choose in bounds)
        return low, high

    def _each_vector(self, row: int, body: Callable[[Expr, Expr], None]) -> None:
        """body(place, h there) for all vectors of a row's h."""
        with T.serial(T.int64(self.rows.width // self.rows.lanes)) as n:
            at = T.bind(n * self.rows.lanes + row * self.rows.width)
            body(at, T.bind(self.rows.load(self.rows.state["h"], [at])))

    def _accumulator(self, dtype: str, start: float) -> tirx.Buffer:
        buffer = T.alloc_buffer((self.rows.lanes,), dtype)
        self.rows.store(buffer, [0], self._spread(tirx.const(start, dtype)))
        return buffer

    def _reduced(self, buffer: tirx.Buffer, both: Callable[[Expr, Expr], Expr]) -> Expr:
        found = buffer[0]
        for lane in range(1, self.rows.lanes):
            found = both(found, buffer[lane])
        return found

    def sums(self, gates: list[int], columns: list[Expr], block: Expr, inside: Expr) -> list[list[Expr]]:
        """For each row and each of the gates the vector of sums at a column of x."""
        rows, zero = self.rows, tirx.const(0, "int64")
        made = [[self._accumulator("int32", 0) for _ in gates] for _ in range(rows.count)]
        with T.serial(T.int64(rows.record.packed_units)) as k:
            weights = [T.bind(rows.load(rows.buffers["r"], [block, k, tirx.const(g, "int64"), inside])) for g in gates]
            for row, parts in enumerate(made):
                first = k * PACKED + row * rows.width
                word = T.bind(self._spread(T.reinterpret("int32", self.values[T.ramp(first, 1, PACKED)])))
                for weight, part in zip(weights, parts):
                    rows.store(part, [zero], self.dot.accumulate(rows.load(part, [zero]), word, weight))
        return [
            [self._number(row, column, rows.load(part, [zero])) for column, part in zip(columns, parts)]
            for row, parts in enumerate(made)
        ]

    def _number(self, row: int, column: Expr, total: Expr) -> Expr:
        """x plus what a sum of products stands for."""
        rows = self.rows
        scale, zero, less = (rows.load(rows.buffers[f"r_{name}"], [column]) for name in ("scale", "zero", "sum"))
        total = total - zero * self._spread(self.sum[row]) - less * self._spread(self.zero[row])
        number = total.astype(self._vector("float32"))
        x = rows.load(rows.buffers["x"], [rows.places[row], rows.b0 + row, column])
        return T.bind(x + number * (scale * self._spread(self.scale[row])))

    def _vector(self, dtype: str) -> str:
        return dtype if self.rows.lanes == 1 else f"{dtype}x{self.rows.lanes}"

    def _spread(self, value: Expr) -> Expr:
        return value if self.rows.lanes == 1 else T.broadcast(value, self.rows.lanes)


def _float(number: float) -> Expr:
    return tirx.const(number, "float32")
