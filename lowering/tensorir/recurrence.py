"""Recurrences over a sequence: LSTM, GRU and RNN of ONNX in one direction, after the matmul of the inputs.

    for each batch and step:    accumulators = x_t + h R^T for each gate,    h, and the cell c of an LSTM, by the gates

x_t = X_t W^T + biases is a matmul of the whole sequence, computed before. Units are in blocks of BLOCK. Each block has
its gates next to each other, padded with zeros at the end: x [L, B, blocks * gates * BLOCK] and R [blocks, H, gates,
BLOCK]. So a block of a row of R is contiguous in memory. The code is the same for single units and for vectors of them.

R may be int8, four successive units packed in a 32-bit lane: then each step quantizes h (quantized_states.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..records import Record
from .quantized_states import PACKED_VALUES, PLAIN_DOT, PackedDot, QuantizedStates
from .regions import full_region

ATTRIBUTE = "lowering.recurrence"
BLOCK = 16
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

Function = Callable[[str, Expr], Expr]
"""exp, tanh or log, by name, of a scalar or a vector."""


@dataclass(frozen=True)
class Activation:
    name: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class Recurrence(Record):
    """One direction of H units. Gates are those of ONNX in its order: i, o, f, c of an LSTM, z, r, h of a GRU.

    Parameters are float32: x, r, recurrent [blocks, BLOCK] (a GRU's bias of h within its reset, `linear_before_reset`),
    h [B, H], c [B, H] (LSTM), peepholes [3, blocks * BLOCK] for i, o, f, lengths int32 [B]; y [L, B, H], the last h and
    c. Outputs of a sequence after its length are 0.

    is_quantized: r [blocks, packed_units, gates, BLOCK] int32 contains packed int8, among them -128 only if
    holds_lowest. Each column of x has r_scale float32, the zero point r_zero int32, and r_sum int32, the sum of its
    values minus the zero point.
    """

    kind: str
    units: int
    activations: tuple[Activation, ...]
    reverse: bool = False
    clip: float = 0.0
    input_forget: bool = False
    linear_before_reset: bool = False
    peepholes: bool = False
    lengths: bool = False
    is_quantized: bool = False
    holds_lowest: bool = False

    @property
    def gates(self) -> int:
        return GATES[self.kind]

    @property
    def blocks(self) -> int:
        return -(-self.units // BLOCK)

    @property
    def packed_units(self) -> int:
        """Number of packed lanes for all units, the last one padded with zeros."""
        return -(-self.units // PACKED_VALUES)

    def inputs(self) -> tuple[str, ...]:
        is_present = {"r_scale": self.is_quantized, "r_zero": self.is_quantized, "r_sum": self.is_quantized,
                 "recurrent": self.linear_before_reset, "h": True, "c": self.kind == "LSTM",
                 "peepholes": self.peepholes, "lengths": self.lengths}  # fmt: skip
        return ("x", "r", *(name for name, present in is_present.items() if present))

    def outputs(self) -> tuple[str, ...]:
        return ("y", "last_h", *(["last_c"] if self.kind == "LSTM" else []))


def make_plain_recurrence(record: Recurrence) -> tirx.PrimFunc:
    """Return a PrimFunc (*inputs, *outputs), unscheduled."""
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        buffers = declare_recurrence(record)
        with T.sblock("recurrence"):
            T.reads([full_region(buffers[name]) for name in record.inputs()])
            T.writes([full_region(buffers[name]) for name in record.outputs()])
            with T.parallel(buffers["x"].shape[1]) as b:
                RecurrenceEmitter(record, buffers, b, 1, 1, lambda name, x: getattr(tirx, name)(x), PLAIN_DOT).emit()
    return builder.get()


def declare_recurrence(record: Recurrence) -> dict[str, tirx.Buffer]:
    """Declare the parameters and attributes of the PrimFunc frame that is open in the IRBuilder; return the buffers."""
    T.func_name("recurrence")
    T.func_attr({"tirx.noalias": True, "op_pattern": 8, ATTRIBUTE: record.to_json()})
    names = (*record.inputs(), *record.outputs())
    arguments = {name: T.arg(name, T.handle()) for name in names}
    L, B = (IRBuilder.name(name, T.int64()) for name in "LB")
    H, padded = T.int64(record.units), record.blocks * BLOCK
    columns = T.int64(padded * record.gates)
    along_k = record.packed_units if record.is_quantized else record.units
    shapes = {
        "x": [L, B, columns],
        "r": [T.int64(n) for n in (record.blocks, along_k, record.gates, BLOCK)],
        "r_scale": [columns],
        "r_zero": [columns],
        "r_sum": [columns],
        "recurrent": [T.int64(padded)],
        "peepholes": [T.int64(3), T.int64(padded)],
        "lengths": [B],
        "y": [L, B, H],
    }
    integers = {"lengths", *(("r", "r_zero", "r_sum") if record.is_quantized else ())}
    return {
        name: IRBuilder.name(
            name,
            T.match_buffer(
                arguments[name], shapes.get(name, [B, H]), "int32" if name in integers else "float32", align=4
            ),
        )
        for name in names
    }


class RecurrenceEmitter:
    """Emits the code for `count` batches from b0 on, in vectors of `lanes` units."""

    def __init__(
        self,
        record: Recurrence,
        buffers: dict[str, tirx.Buffer],
        b0: Expr,
        count: int,
        lanes: int,
        function: Function,
        dot: PackedDot,
    ) -> None:
        self.record, self.buffers, self.b0, self.count = record, buffers, b0, count
        self.lanes, self.function = lanes, function
        self.width = record.blocks * BLOCK
        size = (count * self.width,)
        names = ("h", "new", *(["c"] if record.kind == "LSTM" else ["z", "reset"] if record.kind == "GRU" else []))
        self.state = {name: T.alloc_buffer(size, "float32") for name in names}
        self.quantized = QuantizedStates(self, dot) if record.is_quantized else None

    def emit(self) -> None:
        for name, buffer in self.state.items():
            with T.serial(T.int64(self.count * self.width)) as n:
                T.buffer_store(buffer, tirx.const(0.0, "float32"), [n])
            if name in ("h", "c"):
                for row in range(self.count):
                    self.visit_units(lambda j, w, name=name, row=row: self.store_state(
                        name, row, j, self.load(self.buffers[name], [self.b0 + row, j], w)))  # type: ignore[misc]  # fmt: skip
        L = self.buffers["x"].shape[0]
        with T.serial(L) as step:
            self.emit_step(step)
        for name in ("h", "c") if "c" in self.state else ("h",):
            for row in range(self.count):
                self.visit_units(lambda j, w, name=name, row=row: self.store(
                    self.buffers[f"last_{name}"], [self.b0 + row, j], self.load_state(name, row, j, w)))  # type: ignore[misc]  # fmt: skip

    # Memory.

    def visit_units(self, body: Callable[[Expr, int], None]) -> None:
        """Call body(first unit, number of units) for all units, first in whole vectors."""
        whole_vectors = self.record.units // self.lanes
        with T.serial(T.int64(whole_vectors)) as n:
            body(n * self.lanes, self.lanes)
        with T.serial(T.int64(self.record.units - whole_vectors * self.lanes)) as n:
            body(n + whole_vectors * self.lanes, 1)

    def load(self, buffer: tirx.Buffer, indices: list[Expr], lanes: int | None = None) -> Expr:
        lanes = self.lanes if lanes is None else lanes
        return buffer[(*indices[:-1], indices[-1] if lanes == 1 else T.ramp(indices[-1], 1, lanes))]

    def store(self, buffer: tirx.Buffer, indices: list[Expr], value: Expr) -> None:
        lanes = value.ty.dtype.lanes
        T.buffer_store(buffer, value, [*indices[:-1], indices[-1] if lanes == 1 else T.ramp(indices[-1], 1, lanes)])

    def load_state(self, name: str, row: int, j: Expr, lanes: int | None = None) -> Expr:
        return self.load(self.state[name], [j + row * self.width], lanes)

    def store_state(self, name: str, row: int, j: Expr, value: Expr) -> None:
        self.store(self.state[name], [j + row * self.width], value)

    def broadcast(self, value: Expr | float) -> Expr:
        value = tirx.const(value, "float32") if isinstance(value, float) else value
        return value if self.lanes == 1 else T.broadcast(value, self.lanes)

    # One step.

    def emit_step(self, step: Expr) -> None:
        record, L = self.record, self.buffers["x"].shape[0]
        self.positions, self.is_active = [], []
        for row in range(self.count):
            length = L
            if record.lengths:
                raw_length = self.buffers["lengths"][self.b0 + row].astype("int64")
                length = T.bind(tirx.max(tirx.min(raw_length, L), tirx.const(0, "int64")))
            is_active = T.bind(step < length)
            position = length - 1 - step if record.reverse else step
            self.is_active.append(is_active)
            self.positions.append(T.bind(tirx.Select(is_active, position, step)))
        if self.quantized is not None:
            self.quantized.quantize()
        sub = BLOCK // self.lanes
        {"LSTM": self.emit_lstm, "GRU": self.emit_gru, "RNN": self.emit_rnn}[record.kind](
            T.int64(record.blocks * sub), sub
        )
        for row in range(self.count):
            indices = [self.positions[row], self.b0 + row]

            def write(j: Expr, w: int, row: int = row, indices: list[Expr] = indices) -> None:
                self.store(self.buffers["y"], [*indices, j], self.load_state("new", row, j, w))
                self.store_state("h", row, j, self.load_state("new", row, j, w))

            def write_zeros(j: Expr, w: int, indices: list[Expr] = indices) -> None:
                zero = tirx.const(0.0, "float32")
                self.store(self.buffers["y"], [*indices, j], zero if w == 1 else T.broadcast(zero, w))

            if not record.lengths:
                self.visit_units(write)
                continue
            with T.If(self.is_active[row]):
                with T.Then():
                    self.visit_units(write)
                with T.Else():
                    self.visit_units(write_zeros)

    def accumulate_gates(
        self, gates: list[int], block: Expr, inside: Expr, source: str, start: bool = True
    ) -> list[list[Expr]]:
        """Return the accumulators at offset `inside` of a block, for each row and each of the gates.

        They are x, unless start is False, plus the dot products of the rows of R and the elements of source.
        """
        record = self.record
        if self.quantized is not None:
            columns = [(block * record.gates + g) * BLOCK + inside for g in gates]
            return self.quantized.accumulate_gates(gates, columns, block, inside)
        accumulators = [[T.alloc_buffer((self.lanes,), "float32") for _ in gates] for _ in range(self.count)]
        zero = tirx.const(0, "int64")
        for row, row_accumulators in enumerate(accumulators):
            for g, accumulator in zip(gates, row_accumulators):
                column = (block * record.gates + g) * BLOCK + inside
                x = (
                    self.load(self.buffers["x"], [self.positions[row], self.b0 + row, column])
                    if start
                    else self.broadcast(0.0)
                )
                self.store(accumulator, [zero], x)
        with T.serial(T.int64(record.units)) as k:
            weights = [T.bind(self.load(self.buffers["r"], [block, k, tirx.const(g, "int64"), inside])) for g in gates]
            for row, row_accumulators in enumerate(accumulators):
                element = T.bind(self.broadcast(self.state[source][k + row * self.width]))
                for weight, accumulator in zip(weights, row_accumulators):
                    self.store(accumulator, [zero], self.load(accumulator, [zero]) + element * weight)
        return [
            [T.bind(self.load(accumulator, [zero])) for accumulator in row_accumulators]
            for row_accumulators in accumulators
        ]

    def apply_activation(self, number: int, value: Expr, clipped: bool = True) -> Expr:
        if clipped and self.record.clip:
            upper, lower = self.broadcast(float(self.record.clip)), self.broadcast(-float(self.record.clip))
            value = tirx.max(tirx.min(value, upper), lower)
        value = self.materialize(value)
        return self.materialize(_emit_activation(self.record.activations[number], value, self.broadcast, self.function))

    def materialize(self, value: Expr) -> Expr:
        register = T.alloc_buffer((self.lanes,), "float32")
        self.store(register, [tirx.const(0, "int64")], value)
        return T.bind(self.load(register, [tirx.const(0, "int64")]))

    def emit_lstm(self, count: Expr, sub: int) -> None:
        record, peep = self.record, self.buffers.get("peepholes")
        with T.serial(count) as n:
            block, inside = T.bind(n // sub), T.bind(n % sub * self.lanes)
            j = T.bind(n * self.lanes)
            for row, (i, o, f, g) in enumerate(self.accumulate_gates([0, 1, 2, 3], block, inside, "h")):
                c = T.bind(self.load_state("c", row, j))

                def add_peephole(value: Expr, gate: int, cell: Expr, j: Expr = j) -> Expr:
                    if peep is None:
                        return value
                    return value + self.load(peep, [tirx.const(gate, "int64"), j]) * cell

                i = self.apply_activation(0, add_peephole(i, 0, c))
                f = self.broadcast(1.0) - i if record.input_forget else self.apply_activation(0, add_peephole(f, 2, c))
                new = self.materialize(f * c + i * self.apply_activation(1, g))
                o = self.apply_activation(0, add_peephole(o, 1, new))
                self.store_state("new", row, j, o * self.apply_activation(2, new, clipped=False))
                self.store_active_state(row, "c", j, new, c)

    def store_active_state(self, row: int, name: str, j: Expr, new: Expr, old: Expr) -> None:
        """Update the state of a sequence within its length."""
        if self.record.lengths:
            with T.If(self.is_active[row]), T.Then():
                self.store_state(name, row, j, new)
        else:
            self.store_state(name, row, j, new)

    def emit_gru(self, count: Expr, sub: int) -> None:
        record = self.record
        is_linear_before_reset = record.linear_before_reset
        with T.serial(count) as n:
            block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
            reset = []
            for row, (z, r) in enumerate(self.accumulate_gates([0, 1], block, inside, "h")):
                self.store_state("z", row, j, self.apply_activation(0, z))
                reset.append(self.apply_activation(0, r))
                if not is_linear_before_reset:
                    self.store_state("reset", row, j, reset[row] * self.load_state("h", row, j))
            if is_linear_before_reset:
                for row, (h,) in enumerate(self.accumulate_gates([2], block, inside, "h", start=False)):
                    h = h + self.load(self.buffers["recurrent"], [j])
                    column = (block * record.gates + 2) * BLOCK + inside
                    x = self.load(self.buffers["x"], [self.positions[row], self.b0 + row, column])
                    self.blend_state(row, j, x + reset[row] * h)
        if not is_linear_before_reset:
            with T.serial(count) as n:
                block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
                for row, (h,) in enumerate(self.accumulate_gates([2], block, inside, "reset")):
                    self.blend_state(row, j, h)

    def blend_state(self, row: int, j: Expr, value: Expr) -> None:
        z = T.bind(self.load_state("z", row, j))
        self.store_state(
            "new",
            row,
            j,
            (self.broadcast(1.0) - z) * self.apply_activation(1, value) + z * self.load_state("h", row, j),
        )

    def emit_rnn(self, count: Expr, sub: int) -> None:
        with T.serial(count) as n:
            block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
            for row, (h,) in enumerate(self.accumulate_gates([0], block, inside, "h")):
                self.store_state("new", row, j, self.apply_activation(0, h))


def _emit_activation(activation: Activation, x: Expr, spread: Callable[[float], Expr], function: Function) -> Expr:
    alpha, beta, zero, one = spread(float(activation.alpha)), spread(float(activation.beta)), spread(0.0), spread(1.0)
    if activation.name == "Sigmoid":
        return one / (one + function("exp", zero - x))
    if activation.name == "Tanh":
        return function("tanh", x)
    if activation.name == "Relu":
        return tirx.max(x, zero)
    if activation.name == "Affine":
        return alpha * x + beta
    if activation.name == "LeakyRelu":
        return tirx.Select(x >= zero, x, alpha * x)
    if activation.name == "ThresholdedRelu":
        return tirx.Select(x > alpha, x, zero)
    if activation.name == "ScaledTanh":
        return alpha * function("tanh", beta * x)
    if activation.name == "HardSigmoid":
        return tirx.max(tirx.min(alpha * x + beta, one), zero)
    if activation.name == "Elu":
        return tirx.Select(x >= zero, x, alpha * (function("exp", tirx.min(x, zero)) - one))
    size = tirx.max(x, zero - x)
    if activation.name == "Softsign":
        return x / (one + size)
    if activation.name == "Softplus":
        return tirx.max(x, zero) + function("log", one + function("exp", zero - size))
    raise ValueError(f"there is no activation {activation.name}")
