"""Quantized states of a recurrence: each step quantizes h before its matmul with int8 R, as ONNX Runtime does.

    scale = (max(h, 0) - min(h, 0)) / 255    zero = round(-min(h, 0) / scale)    q = round(h / scale) + zero
    sum over k of h R = scale r_scale (sum of q r - r_zero sum of q - zero r_sum)

q and zero are uint8, or int8 and smaller by 128, which gives the same sum. Each batch has its own scale and zero point.
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
    from .recurrence import RecurrenceEmitter


@dataclass(frozen=True)
class PackedDot:
    """accumulate(total, a, b) adds the dot product of four states and four int8 values to an int32 accumulator.

    The states are int8 if is_signed, else uint8. Operands are packed lanes, or vectors of them.
    """

    accumulate: Callable[[Expr, Expr, Expr], Expr]
    is_signed: bool = False


PACKED_VALUES = 4
"""Values of a packed 32-bit lane."""


def _accumulate(total: Expr, a: Expr, b: Expr) -> Expr:
    for n in range(PACKED_VALUES):
        total = total + (a >> 8 * n & 255) * (b << 24 - 8 * n >> 24)
    return total


PLAIN_DOT = PackedDot(_accumulate)
"""The dot product of one packed lane of each operand, in operations of every machine."""


class QuantizedStates:
    """The quantized h of all batches of `rows`, and the dot products that read it."""

    def __init__(self, rows: RecurrenceEmitter, dot: PackedDot) -> None:
        self.rows, self.dot = rows, dot
        self.dtype, self.min_value = ("int8", -128) if dot.is_signed else ("uint8", 0)
        self.values = T.alloc_buffer((rows.count * rows.width,), self.dtype)
        self.scale = T.alloc_buffer((rows.count,), "float32")
        self.zero, self.sum = (T.alloc_buffer((rows.count,), "int32") for _ in range(2))

    def quantize(self) -> None:
        """Quantize the current h. Padding after the units is 0, which every range includes."""
        for row in range(self.rows.count):
            low, high = self._compute_range(row)
            width = T.bind(high - low)
            scale = T.bind(tirx.Select(width > 0, width / 255.0, _float(1.0)))
            zero = tirx.nearbyint(tirx.min(tirx.max((0.0 - low) / scale, _float(0.0)), _float(255.0)))
            zero = T.bind(zero + _float(self.min_value))
            total = self._alloc_accumulator("int32", 0)
            bounds = _float(self.min_value), _float(self.min_value + 255)
            spread = [T.bind(self._broadcast(number)) for number in (scale, zero, *bounds)]

            def write(offset: Expr, h: Expr, spread: list[Expr] = spread, total: tirx.Buffer = total) -> None:
                scale, zero, lower, upper = spread
                number = self.rows.function("nearbyint", h / scale) + zero
                value = T.bind(tirx.max(tirx.min(number, upper), lower).astype(self._vector_type("int32")))
                self.rows.store(self.values, [offset], value.astype(self._vector_type(self.dtype)))
                self.rows.store(total, [0], self.rows.load(total, [0]) + value)

            self._visit_vectors(row, write)
            T.buffer_store(self.scale, scale, [row])
            T.buffer_store(self.zero, zero.astype("int32"), [row])
            unused = self.rows.width - self.rows.record.units
            T.buffer_store(self.sum, self._reduce_lanes(total, lambda a, b: a + b) - unused * self.zero[row], [row])

    def _compute_range(self, row: int) -> tuple[Expr, Expr]:
        """Return the minimum and the maximum of h, each extended to include 0."""
        bounds = [(self._alloc_accumulator("float32", 0.0), choose) for choose in (tirx.min, tirx.max)]

        def look(offset: Expr, h: Expr) -> None:
            for bound, choose in bounds:
                self.rows.store(bound, [0], choose(self.rows.load(bound, [0]), h))

        self._visit_vectors(row, look)
        low, high = (T.bind(self._reduce_lanes(bound, choose)) for bound, choose in bounds)
        return low, high

    def _visit_vectors(self, row: int, body: Callable[[Expr, Expr], None]) -> None:
        """Call body(offset, h at it) for all vectors of a row's h."""
        with T.serial(T.int64(self.rows.width // self.rows.lanes)) as n:
            offset = T.bind(n * self.rows.lanes + row * self.rows.width)
            body(offset, T.bind(self.rows.load(self.rows.state["h"], [offset])))

    def _alloc_accumulator(self, dtype: str, start: float) -> tirx.Buffer:
        buffer = T.alloc_buffer((self.rows.lanes,), dtype)
        self.rows.store(buffer, [0], self._broadcast(tirx.const(start, dtype)))
        return buffer

    def _reduce_lanes(self, buffer: tirx.Buffer, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        result = buffer[0]
        for lane in range(1, self.rows.lanes):
            result = combine(result, buffer[lane])
        return result

    def accumulate_gates(self, gates: list[int], columns: list[Expr], block: Expr, inside: Expr) -> list[list[Expr]]:
        """Return the vector of accumulators at a column of x, for each row and each of the gates."""
        rows, zero = self.rows, tirx.const(0, "int64")
        accumulators = [[self._alloc_accumulator("int32", 0) for _ in gates] for _ in range(rows.count)]
        with T.serial(T.int64(rows.record.packed_units)) as k:
            weights = [T.bind(rows.load(rows.buffers["r"], [block, k, tirx.const(g, "int64"), inside])) for g in gates]
            for row, row_accumulators in enumerate(accumulators):
                first = k * PACKED_VALUES + row * rows.width
                packed = T.bind(self._broadcast(T.reinterpret("int32", self.values[T.ramp(first, 1, PACKED_VALUES)])))
                for weight, accumulator in zip(weights, row_accumulators):
                    rows.store(accumulator, [zero], self.dot.accumulate(rows.load(accumulator, [zero]), packed, weight))
        return [
            [
                self._dequantize(row, column, rows.load(accumulator, [zero]))
                for column, accumulator in zip(columns, row_accumulators)
            ]
            for row, row_accumulators in enumerate(accumulators)
        ]

    def _dequantize(self, row: int, column: Expr, total: Expr) -> Expr:
        """Return x plus the value of an int32 accumulator."""
        rows = self.rows
        scale, zero, r_sum = (rows.load(rows.buffers[f"r_{name}"], [column]) for name in ("scale", "zero", "sum"))
        total = total - zero * self._broadcast(self.sum[row]) - r_sum * self._broadcast(self.zero[row])
        number = total.astype(self._vector_type("float32"))
        x = rows.load(rows.buffers["x"], [rows.positions[row], rows.b0 + row, column])
        return T.bind(x + number * (scale * self._broadcast(self.scale[row])))

    def _vector_type(self, dtype: str) -> str:
        return dtype if self.rows.lanes == 1 else f"{dtype}x{self.rows.lanes}"

    def _broadcast(self, value: Expr) -> Expr:
        return value if self.rows.lanes == 1 else T.broadcast(value, self.rows.lanes)


def _float(number: float) -> Expr:
    return tirx.const(number, "float32")
