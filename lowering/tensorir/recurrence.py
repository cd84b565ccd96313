"""Recurrences over a sequence: LSTM, GRU and RNN of ONNX in one direction, behind the product of its inputs.

    for each batch, step by step:    sums = x_t + h R^T for each gate,    h, and the cell c of an LSTM, by the gates

x_t = X_t W^T + biases is a matmul of the whole sequence, computed before. Units lie in blocks of BLOCK, and of each
block the gates side by side, behind zeros for units that there are not: x [L, B, blocks * gates * BLOCK] and
R [blocks, H, gates, BLOCK], so that a block of a row of R is read in one go. The code is the same for one unit at a
time and for vectors of them.

R may be int8, four successive units packed in a 32-bit lane: then each step quantizes h (quantized_states.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .quantized_states import PACKED, PLAIN_DOT, Dot, QuantizedStates
from .regions import whole

ATTRIBUTE = "lowering.recurrence"
BLOCK = 16
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

Function = Callable[[str, Expr], Expr]
"""exp, tanh or log, by name, of a number or of a vector."""


@dataclass(frozen=True)
class Activation:
    name: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class Recurrence:
    """One direction of H units. Gates are those of ONNX in its order: i, o, f, c of an LSTM, z, r, h of a GRU.

    Parameters are float32: x, r, recurrent [blocks, BLOCK] (a GRU's bias of h within its reset, `linear_before_reset`),
    h [B, H], c [B, H] (LSTM), peepholes [3, blocks * BLOCK] for i, o, f, lengths int32 [B]; y [L, B, H], the last h and
    c. Behind its length a sequence has outputs of 0.

    is_quantized: r [blocks, packed_units, gates, BLOCK] int32 holds packed int8, among them -128 only if holds_lowest.
    Each column of x has r_scale float32, the zero point r_zero int32, and r_sum int32, the sum of its values minus the
    zero point.
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
        """Packed lanes that hold all units, the last one padded with zeros."""
        return -(-self.units // PACKED)

    def inputs(self) -> tuple[str, ...]:
        there = {"r_scale": self.is_quantized, "r_zero": self.is_quantized, "r_sum": self.is_quantized,
                 "recurrent": self.linear_before_reset, "h": True, "c": self.kind == "LSTM",
                 "peepholes": self.peepholes, "lengths": self.lengths}  # fmt: skip
        return ("x", "r", *(name for name, given in there.items() if given))

    def outputs(self) -> tuple[str, ...]:
        return ("y", "last_h", *(["last_c"] if self.kind == "LSTM" else []))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Recurrence:
        data = json.loads(text)
        return Recurrence(**{**data, "activations": tuple(Activation(**a) for a in data["activations"])})


def plain_recurrence(record: Recurrence) -> tirx.PrimFunc:
    """PrimFunc (*inputs, *outputs), unscheduled."""
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        buffers = declare(record)
        with T.sblock("recurrence"):
            T.reads([whole(buffers[name]) for name in record.inputs()])
            T.writes([whole(buffers[name]) for name in record.outputs()])
            with T.parallel(buffers["x"].shape[1]) as b:
                Rows(record, buffers, b, 1, 1, lambda name, x: getattr(tirx, name)(x), PLAIN_DOT).emit()
    return builder.get()


def declare(record: Recurrence) -> dict[str, tirx.Buffer]:
    """The parameters of the PrimFunc frame that is open in the IRBuilder, and its attributes."""
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
    whole_numbers = {"lengths", *(("r", "r_zero", "r_sum") if record.is_quantized else ())}
    return {
        name: IRBuilder.name(
            name,
            T.match_buffer(
                arguments[name], shapes.get(name, [B, H]), "int32" if name in whole_numbers else "float32", align=4
            ),
        )
        for name in names
    }


class Rows:
    """The code for `count` batches from b0 on, in vectors of `lanes` units."""

    def __init__(
        self,
        record: Recurrence,
        buffers: dict[str, tirx.Buffer],
        b0: Expr,
        count: int,
        lanes: int,
        function: Function,
        dot: Dot,
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
                    self.each_unit(lambda j, w, name=name, row=row: self.put(
                        name, row, j, self.load(self.buffers[name], [self.b0 + row, j], w)))  # type: ignore[misc]  # fmt: skip
        L = self.buffers["x"].shape[0]
        with T.serial(L) as step:
            self.step(step)
        for name in ("h", "c") if "c" in self.state else ("h",):
            for row in range(self.count):
                self.each_unit(lambda j, w, name=name, row=row: self.store(
                    self.buffers[f"last_{name}"], [self.b0 + row, j], self.get(name, row, j, w)))  # type: ignore[misc]  # fmt: skip

    # Memory.

    def each_unit(self, body: Callable[[Expr, int], None]) -> None:
        """body(first unit, how many) for all units that there are."""
        whole_vectors = self.record.units // self.lanes
        with T.serial(T.int64(whole_vectors)) as n:
            body(n * self.lanes, self.lanes)
        with T.serial(T.int64(self.record.units - whole_vectors * self.lanes)) as n:
            body(n + whole_vectors * self.lanes, 1)

    def load(self, buffer: tirx.Buffer, at: list[Expr], lanes: int | None = None) -> Expr:
        lanes = self.lanes if lanes is None else lanes
        return buffer[(*at[:-1], at[-1] if lanes == 1 else T.ramp(at[-1], 1, lanes))]

    def store(self, buffer: tirx.Buffer, at: list[Expr], value: Expr) -> None:
        lanes = value.ty.dtype.lanes
        T.buffer_store(buffer, value, [*at[:-1], at[-1] if lanes == 1 else T.ramp(at[-1], 1, lanes)])

    def get(self, name: str, row: int, j: Expr, lanes: int | None = None) -> Expr:
        return self.load(self.state[name], [j + row * self.width], lanes)

    def put(self, name: str, row: int, j: Expr, value: Expr) -> None:
        self.store(self.state[name], [j + row * self.width], value)

    def spread(self, value: Expr | float) -> Expr:
        value = tirx.const(value, "float32") if isinstance(value, float) else value
        return value if self.lanes == 1 else T.broadcast(value, self.lanes)

    # A step.

    def step(self, step: Expr) -> None:
        record, L = self.record, self.buffers["x"].shape[0]
        self.places, self.there = [], []
        for row in range(self.count):
            length = L
            if record.lengths:
                given = self.buffers["lengths"][self.b0 + row].astype("int64")
                length = T.bind(tirx.max(tirx.min(given, L), tirx.const(0, "int64")))
            there = T.bind(step < length)
            place = length - 1 - step if record.reverse else step
            self.there.append(there)
            self.places.append(T.bind(tirx.Select(there, place, step)))
        if self.quantized is not None:
            self.quantized.quantize()
        sub = BLOCK // self.lanes
        {"LSTM": self.lstm, "GRU": self.gru, "RNN": self.rnn}[record.kind](T.int64(record.blocks * sub), sub)
        for row in range(self.count):
            at = [self.places[row], self.b0 + row]

            def write(j: Expr, w: int, row: int = row, at: list[Expr] = at) -> None:
                self.store(self.buffers["y"], [*at, j], self.get("new", row, j, w))
                self.put("h", row, j, self.get("new", row, j, w))

            def nothing(j: Expr, w: int, at: list[Expr] = at) -> None:
                zero = tirx.const(0.0, "float32")
                self.store(self.buffers["y"], [*at, j], zero if w == 1 else T.broadcast(zero, w))

            if not record.lengths:
                self.each_unit(write)
                continue
            with T.If(self.there[row]):
                with T.Then():
                    self.each_unit(write)
                with T.Else():
                    self.each_unit(nothing)

    def sums(self, gates: list[int], block: Expr, inside: Expr, source: str, start: bool = True) -> list[list[Expr]]:
        """For each row and each of the gates the vector of sums at `inside` a block: of x, unless start is False, and
        of the rows of R times the elements of source."""
        record = self.record
        if self.quantized is not None:
            columns = [(block * record.gates + g) * BLOCK + inside for g in gates]
            return self.quantized.sums(gates, columns, block, inside)
        made = [[T.alloc_buffer((self.lanes,), "float32") for _ in gates] for _ in range(self.count)]
        zero = tirx.const(0, "int64")
        for row, parts in enumerate(made):
            for g, part in zip(gates, parts):
                at = (block * record.gates + g) * BLOCK + inside
                x = self.load(self.buffers["x"], [self.places[row], self.b0 + row, at]) if start else self.spread(0.0)
                self.store(part, [zero], x)
        with T.serial(T.int64(record.units)) as k:
            weights = [T.bind(self.load(self.buffers["r"], [block, k, tirx.const(g, "int64"), inside])) for g in gates]
            for row, parts in enumerate(made):
                element = T.bind(self.spread(self.state[source][k + row * self.width]))
                for weight, part in zip(weights, parts):
                    self.store(part, [zero], self.load(part, [zero]) + element * weight)
        return [[T.bind(self.load(part, [zero])) for part in parts] for parts in made]

    def activated(self, number: int, value: Expr, clipped: bool = True) -> Expr:
        if clipped and self.record.clip:
            most, least = self.spread(float(self.record.clip)), self.spread(-float(self.record.clip))
            value = tirx.max(tirx.min(value, most), least)
        value = self.kept(value)
        return self.kept(_activated(self.record.activations[number], value, self.spread, self.function))

    def kept(self, value: Expr) -> Expr:
        register = T.alloc_buffer((self.lanes,), "float32")
        self.store(register, [tirx.const(0, "int64")], value)
        return T.bind(self.load(register, [tirx.const(0, "int64")]))

    def lstm(self, count: Expr, sub: int) -> None:
        record, peep = self.record, self.buffers.get("peepholes")
        with T.serial(count) as n:
            block, inside = T.bind(n // sub), T.bind(n % sub * self.lanes)
            j = T.bind(n * self.lanes)
            for row, (i, o, f, g) in enumerate(self.sums([0, 1, 2, 3], block, inside, "h")):
                c = T.bind(self.get("c", row, j))

                def peeped(value: Expr, gate: int, cell: Expr, j: Expr = j) -> Expr:
                    if peep is None:
                        return value
                    return value + self.load(peep, [tirx.const(gate, "int64"), j]) * cell

                i = self.activated(0, peeped(i, 0, c))
                f = self.spread(1.0) - i if record.input_forget else self.activated(0, peeped(f, 2, c))
                new = self.kept(f * c + i * self.activated(1, g))
                o = self.activated(0, peeped(o, 1, new))
                self.put("new", row, j, o * self.activated(2, new, clipped=False))
                self.put_if(row, "c", j, new, c)

    def put_if(self, row: int, name: str, j: Expr, new: Expr, old: Expr) -> None:
        """Within its length a sequence goes on."""
        if self.record.lengths:
            with T.If(self.there[row]), T.Then():
                self.put(name, row, j, new)
        else:
            self.put(name, row, j, new)

    def gru(self, count: Expr, sub: int) -> None:
        record = self.record
        before = record.linear_before_reset
        with T.serial(count) as n:
            block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
            reset = []
            for row, (z, r) in enumerate(self.sums([0, 1], block, inside, "h")):
                self.put("z", row, j, self.activated(0, z))
                reset.append(self.activated(0, r))
                if not before:
                    self.put("reset", row, j, reset[row] * self.get("h", row, j))
            if before:
                for row, (h,) in enumerate(self.sums([2], block, inside, "h", start=False)):
                    h = h + self.load(self.buffers["recurrent"], [j])
                    at = (block * record.gates + 2) * BLOCK + inside
                    x = self.load(self.buffers["x"], [self.places[row], self.b0 + row, at])
                    self.mixed(row, j, x + reset[row] * h)
        if not before:
            with T.serial(count) as n:
                block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
                for row, (h,) in enumerate(self.sums([2], block, inside, "reset")):
                    self.mixed(row, j, h)

    def mixed(self, row: int, j: Expr, value: Expr) -> None:
        z = T.bind(self.get("z", row, j))
        self.put("new", row, j, (self.spread(1.0) - z) * self.activated(1, value) + z * self.get("h", row, j))

    def rnn(self, count: Expr, sub: int) -> None:
        with T.serial(count) as n:
            block, inside, j = T.bind(n // sub), T.bind(n % sub * self.lanes), T.bind(n * self.lanes)
            for row, (h,) in enumerate(self.sums([0], block, inside, "h")):
                self.put("new", row, j, self.activated(0, h))


def _activated(which: Activation, x: Expr, spread: Callable[[float], Expr], function: Function) -> Expr:
    alpha, beta, zero, one = spread(float(which.alpha)), spread(float(which.beta)), spread(0.0), spread(1.0)
    if which.name == "Sigmoid":
        return one / (one + function("exp", zero - x))
    if which.name == "Tanh":
        return function("tanh", x)
    if which.name == "Relu":
        return tirx.max(x, zero)
    if which.name == "Affine":
        return alpha * x + beta
    if which.name == "LeakyRelu":
        return tirx.Select(x >= zero, x, alpha * x)
    if which.name == "ThresholdedRelu":
        return tirx.Select(x > alpha, x, zero)
    if which.name == "ScaledTanh":
        return alpha * function("tanh", beta * x)
    if which.name == "HardSigmoid":
        return tirx.max(tirx.min(alpha * x + beta, one), zero)
    if which.name == "Elu":
        return tirx.Select(x >= zero, x, alpha * (function("exp", tirx.min(x, zero)) - one))
    size = tirx.max(x, zero - x)
    if which.name == "Softsign":
        return x / (one + size)
    if which.name == "Softplus":
        return tirx.max(x, zero) + function("log", one + function("exp", zero - size))
    raise ValueError(f"there is no activation {which.name}")
