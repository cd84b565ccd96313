"""The rows and keys of each request and beam, as int64 tensors that one small kernel fills.

A sequence is one beam of a request: sequence s is beam s % beams of request s // beams. In a context phase only beam 0
has rows; in a generation phase each beam has one row. Rows of qkv, packed or padded, are numbered over all sequences
(`source`). Attention works on rows of one sequence after the other without gaps (`packed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Size, Value
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.kernels import compute, emit_loops, serial
from ..helpers.run_time import bind_sizes
from .settings import GptSettings


@dataclass(frozen=True)
class GptRequests:
    """Tables that locate the rows and keys of each sequence.

    By sequence [sequences]: firsts and counts of source rows; row_starts [sequences + 1] of packed rows; past and
    lengths, the tokens before and after the call; context, 1 in a context phase; lefts, the keys before a row's own in
    its window; sinks, the sink tokens; new_sinks, those among the keys of this call. By request: prompts [requests],
    the keys that all beams read from beam 0. ring is [3].

    By row [rows]: sequence, position and packed (-1: padding) of a source row, source of a packed row. max_rows,
    max_past and max_keys are the largest numbers of a sequence, at least 1.
    """

    requests: Size
    sequences: Size
    rows: Size
    tables: Mapping[str, Value]
    max_rows: Size
    max_past: Size
    max_keys: Size
    is_padded: bool

    def __getitem__(self, name: str) -> Value:
        return self.tables[name]


_BY_SEQUENCE = ("firsts", "counts", "past", "lengths", "context", "lefts", "sinks", "new_sinks")
_BY_ROW = ("sequence", "position", "packed", "source")


def locate_requests(
    node: Node,
    settings: GptSettings,
    int_inputs: Mapping[str, Value],
    rows: Size,
    padded_rows: Size | None,
    beams: int,
    block: int,
    capacity: Size,
) -> GptRequests:
    """Locate the rows and keys of each sequence.

    int_inputs has the int inputs by name. qkv has `rows` rows, padded to padded_rows per sequence unless that is None.
    block is the number of tokens in a block of a paged cache, or 0. capacity is the largest number of slots of a
    sequence; lengths and windows are clamped to it.
    """
    count = int_inputs["context_lengths"].shape[0]
    sequences = node.simplify(count * beams)
    ints = {name: cast_to_int64(node, value) for name, value in int_inputs.items()}
    shapes = {"row_starts": node.simplify(sequences + 1), "prompts": count, "ring": 3, "numbers": 3}
    shapes |= dict.fromkeys(_BY_SEQUENCE, sequences) | dict.fromkeys(_BY_ROW, rows)
    names, outputs = list(ints), list(shapes)

    def body(*buffers: Any) -> None:
        inputs = dict(zip(names, buffers))
        results = dict(zip(outputs, buffers[len(names) : len(names) + len(outputs)]))
        _RequestsKernel(settings, inputs, results, rows, padded_rows, beams, block, capacity).emit(count)

    sizes = [size for size in (count, rows, padded_rows, capacity) if size is not None]
    output_types = [((shapes[name],), "int64") for name in outputs]
    results = emit_loops(node, "requests", body, list(ints.values()), output_types, sizes)
    tables = dict(zip(outputs, results))
    max_rows, max_past, max_keys = bind_sizes(node, tables.pop("numbers"))
    return GptRequests(count, sequences, rows, tables, max_rows, max_past, max_keys, padded_rows is not None)


def cast_to_int64(node: Node, value: Value) -> Value:
    return value if value.dtype == "int64" else compute(
        node, "as_int64", lambda i, x: x(*i).astype("int64"), [value], value.shape, dtype="int64"
    )  # fmt: skip


def check_ints(node: Node, name: str, value: Value, *ranks: int) -> Value:
    """Return the value, after checking that it is int32 or int64 of one of these ranks."""
    if value.dtype not in ("int32", "int64") or value.rank not in ranks:
        expected = " or ".join(map(str, ranks))
        raise node.error(
            "node.tensor_type_unsupported",
            f"{name} is {value.dtype} of rank {value.rank}.",
            f"Make it int32 of rank {expected}.",
        )
    return value


def require_nonempty(node: Node, name: str, value: Value, *axes: int) -> Value:
    """Return the value, whose size along these axes is 1 or more, statically or asserted at run time.

    Kernels read the nearest element, whatever indices contain.
    """
    for axis in axes:
        text = f"dimension {axis} of {name} is {{}}; it must be 1 or more."
        value = require(
            node, value, symbolic.less_or_equal(1, value.shape[axis]), "node.dimension_empty", text, value.shape[axis]
        )
    return value


def check_by_request(node: Node, name: str, value: Value, count: Size) -> Value:
    return assert_shape(node, check_ints(node, name, value, 1), (count,))


class _RequestsKernel:
    """A writer of the kernel's statements."""

    def __init__(
        self,
        settings: GptSettings,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        rows: Size,
        padded_rows: Size | None,
        beams: int,
        block: int,
        capacity: Size,
    ) -> None:
        self.settings, self.inputs, self.outputs, self.capacity = settings, inputs, outputs, int64(capacity)
        self.rows, self.padded_rows, self.beams, self.block = int64(rows), padded_rows, beams, block

    def emit(self, count: Size) -> None:
        zero, unit = int64(0), int64(1)
        self.store("row_starts", zero, zero)
        for k in range(3):
            self.store("numbers", int64(k), unit)
        window, sinks = self.read_window()
        bubble = tirx.floormod(self.block - tirx.floormod(sinks, self.block), self.block) if self.block else zero
        capacity = int64(LARGEST_SIZE)  # without a window no slot is overwritten
        if window is not None:
            capacity = tirx.max(window - sinks + (self.block if self.settings.has_spare_block else 0), unit)
        for k, value in enumerate((sinks, sinks + bubble, capacity)):
            self.store("ring", int64(k), value)
        with serial(self.rows) as row:
            for name, value in (("sequence", zero), ("position", zero), ("packed", int64(-1)), ("source", zero)):
                self.store(name, row, value)
        with serial(count) as request, serial(self.beams) as beam:
            self.emit_sequence(request, beam, window, sinks)

    def emit_sequence(self, request: Expr, beam: Expr, window: Expr | None, sinks: Expr) -> None:
        s = T.bind(request * self.beams + beam)
        zero, unit = int64(0), int64(1)
        start = T.bind(self.outputs["row_starts"][s])
        context = self.is_context(request)
        context_length = tirx.Select(tirx.EQ(beam, zero), self.inputs["context_lengths"][request], zero)
        n = T.bind(tirx.max(tirx.min(tirx.Select(context, context_length, unit), self.rows - start), zero))
        first = start
        if self.padded_rows is not None:
            first = tirx.Select(context, request, s) * self.padded_rows
            n = T.bind(tirx.max(tirx.min(n, tirx.min(self.rows - first, int64(self.padded_rows))), zero))
        past = tirx.max(self.read("host_past_key_value_lengths", request, zero), zero)
        # Tokens of a ring that has wrapped, and a decoder's past in cross attention, may be longer than the cache.
        is_bounded = window is None and not self.settings.is_cross
        past = T.bind(tirx.min(past, self.capacity if is_bounded else int64(LARGEST_SIZE)))
        total = T.bind(past + tirx.Select(context, tirx.max(self.inputs["context_lengths"][request], zero), unit))
        self.store("row_starts", s + unit, start + n)
        for name, value in (
            ("firsts", first), ("counts", n), ("past", past), ("lengths", total),
            ("context", tirx.Select(context, unit, zero)), ("sinks", sinks),
            ("new_sinks", tirx.max(sinks - past, zero)),
        ):  # fmt: skip
            self.store(name, s, value)
        self.store("prompts", request, tirx.Select(context, total, self.inputs["context_lengths"][request]))
        left = zero
        if window is not None:
            left = tirx.min(window - sinks - unit, self.capacity)
            if self.settings.is_trt_compatible:
                left = left + tirx.Select(context, zero, unit)
        self.store("lefts", s, left)
        for k, value in enumerate((n, past, total)):
            self.store("numbers", int64(k), tirx.max(self.outputs["numbers"][k], value))
        with T.serial(n) as i:
            row = T.bind(first + i)
            for name, value in (("sequence", s), ("position", past + i), ("packed", start + i)):
                self.store(name, row, value)
            self.store("source", start + i, row)

    def is_context(self, request: Expr) -> Expr:
        types = self.inputs.get("host_request_types")
        return tirx.const(True, "bool") if types is None else tirx.EQ(types[request], int64(0))

    def read_window(self) -> tuple[Expr | None, Expr]:
        """Return the window W of this layer, or None without windows, and the number of sink tokens."""
        zero = int64(0)
        sinks = tirx.max(tirx.min(self.read("host_sink_token_length", zero, zero), self.capacity), zero)
        sizes = self.inputs.get("host_max_attention_window_sizes")
        if sizes is None:
            return None, sinks
        layer = tirx.floormod(int64(self.settings.layer), tirx.max(sizes.shape[0], int64(1)))
        return T.bind(tirx.max(tirx.min(sizes[layer], int64(LARGEST_SIZE)), zero)), T.bind(sinks)

    def read(self, name: str, index: Expr, default: Expr) -> Expr:
        return self.inputs[name][index] if name in self.inputs else default

    def store(self, name: str, index: Expr, value: Expr) -> None:
        T.buffer_store(self.outputs[name], value, [index])
