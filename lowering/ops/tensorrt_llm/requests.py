"""Where the rows and keys of each request and beam are, as int64 tensors that one small kernel fills.

A sequence is one beam of a request: sequence s is beam s % beams of request s // beams. In a context phase only beam 0
has rows, in a generation phase each has one. Rows of qkv, packed or padded, are counted over all of them (`source`);
the rows that attention works on lie one sequence behind the other without gaps (`packed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.parameters import int64
from ...importing import symbolic
from ...importing.node import Node
from ...importing.values import Size, Value
from ..asserted import asserted, required
from ..kernels import compute, loops, serial
from ..run_time import bind
from .settings import Settings


@dataclass(frozen=True)
class Requests:
    """Tensors by sequence [sequences]: firsts and counts of source rows, row_starts [sequences + 1] of packed rows,
    past and lengths (tokens before and behind the call), context (1 in a context phase), lefts and sinks (keys before a
    row's own that its window has, and sink tokens), new_sinks (those among the keys of this call). prompts [requests]:
    keys that all beams read from beam 0. ring [3].

    By row: sequence, position and packed (-1: padding) of a source row [rows], source of a packed row [rows].
    most_rows, most_past, most_keys: of any sequence, at least 1.
    """

    requests: Size
    sequences: Size
    rows: Size
    tables: Mapping[str, Value]
    most_rows: Size
    most_past: Size
    most_keys: Size
    padded: bool

    def __getitem__(self, name: str) -> Value:
        return self.tables[name]


_BY_SEQUENCE = ("firsts", "counts", "past", "lengths", "context", "lefts", "sinks", "new_sinks")
_BY_ROW = ("sequence", "position", "packed", "source")


def requests_of(
    node: Node,
    settings: Settings,
    given: Mapping[str, Value],
    rows: Size,
    each: Size | None,
    beams: int,
    block: int,
    capacity: Size,
) -> Requests:
    """given holds the int inputs by name; `rows` rows of qkv, padded to `each` per sequence unless that is None. block
    is the number of tokens in a block of a paged cache, or 0; capacity is how many slots a sequence can have, which
    bounds what lengths and windows may say."""
    count = given["context_lengths"].shape[0]
    sequences = node.simplify(count * beams)
    ints = {name: as_int64(node, value) for name, value in given.items()}
    shapes = {"row_starts": node.simplify(sequences + 1), "prompts": count, "ring": 3, "numbers": 3}
    shapes |= dict.fromkeys(_BY_SEQUENCE, sequences) | dict.fromkeys(_BY_ROW, rows)
    names, outputs = list(ints), list(shapes)

    def body(*buffers: Any) -> None:
        inputs = dict(zip(names, buffers))
        made = dict(zip(outputs, buffers[len(names) : len(names) + len(outputs)]))
        _Table(settings, inputs, made, rows, each, beams, block, capacity).emit(count)

    sizes = [size for size in (count, rows, each, capacity) if size is not None]
    made = [((shapes[name],), "int64") for name in outputs]
    results = loops(node, "requests", body, list(ints.values()), made, sizes)
    tables = dict(zip(outputs, results))
    most_rows, most_past, most_keys = bind(node, tables.pop("numbers"))
    return Requests(count, sequences, rows, tables, most_rows, most_past, most_keys, each is not None)


def as_int64(node: Node, value: Value) -> Value:
    return value if value.dtype == "int64" else compute(
        node, "as_int64", lambda i, x: x(*i).astype("int64"), [value], value.shape, dtype="int64"
    )  # fmt: skip


def check_ints(node: Node, name: str, value: Value, *ranks: int) -> Value:
    """The value. Raises NodeError unless it is int32 or int64 of one of these ranks."""
    if value.dtype not in ("int32", "int64") or value.rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise node.error(f"{name} is {value.dtype} of rank {value.rank}.", f"Make it int32 of rank {wanted}.")
    return value


def at_least_one(node: Node, name: str, value: Value, *axes: int) -> Value:
    """The value, whose size along these axes is known or asserted at run time to be 1 or more: kernels read the nearest
    element, whatever indices hold."""
    for axis in axes:
        text = f"dimension {axis} of {name} is {{}}; it must be 1 or more."
        value = required(node, value, symbolic.less_or_equal(1, value.shape[axis]), text, value.shape[axis])
    return value


def by_request(node: Node, name: str, value: Value, count: Size) -> Value:
    return asserted(node, check_ints(node, name, value, 1), (count,))


class _Table:
    """The statements of the kernel."""

    def __init__(
        self,
        settings: Settings,
        given: Mapping[str, Any],
        made: Mapping[str, Any],
        rows: Size,
        each: Size | None,
        beams: int,
        block: int,
        capacity: Size,
    ) -> None:
        self.settings, self.given, self.made, self.capacity = settings, given, made, int64(capacity)
        self.rows, self.each, self.beams, self.block = int64(rows), each, beams, block

    def emit(self, count: Size) -> None:
        zero, one = int64(0), int64(1)
        self.put("row_starts", zero, zero)
        for k in range(3):
            self.put("numbers", int64(k), one)
        window, sinks = self.window()
        bubble = tirx.floormod(self.block - tirx.floormod(sinks, self.block), self.block) if self.block else zero
        capacity = int64(LARGEST_SIZE)  # without a window no slot is used twice
        if window is not None:
            capacity = tirx.max(window - sinks + (self.block if self.settings.one_more_block else 0), one)
        for k, value in enumerate((sinks, sinks + bubble, capacity)):
            self.put("ring", int64(k), value)
        with serial(self.rows) as row:
            for name, value in (("sequence", zero), ("position", zero), ("packed", int64(-1)), ("source", zero)):
                self.put(name, row, value)
        with serial(count) as request, serial(self.beams) as beam:
            self.sequence(request, beam, window, sinks)

    def sequence(self, request: Expr, beam: Expr, window: Expr | None, sinks: Expr) -> None:
        s = T.bind(request * self.beams + beam)
        zero, one = int64(0), int64(1)
        start = T.bind(self.made["row_starts"][s])
        context = self.is_context(request)
        asked = tirx.Select(tirx.EQ(beam, zero), self.given["context_lengths"][request], zero)
        n = T.bind(tirx.max(tirx.min(tirx.Select(context, asked, one), self.rows - start), zero))
        first = start
        if self.each is not None:
            first = tirx.Select(context, request, s) * self.each
            n = T.bind(tirx.max(tirx.min(n, tirx.min(self.rows - first, int64(self.each))), zero))
        past = tirx.max(self.read("host_past_key_value_lengths", request, zero), zero)
        # What a ring has turned over, and a decoder's past beside an encoder's keys, may be longer than the cache.
        bounded = window is None and not self.settings.cross
        past = T.bind(tirx.min(past, self.capacity if bounded else int64(LARGEST_SIZE)))
        total = T.bind(past + tirx.Select(context, tirx.max(self.given["context_lengths"][request], zero), one))
        self.put("row_starts", s + one, start + n)
        for name, value in (
            ("firsts", first), ("counts", n), ("past", past), ("lengths", total),
            ("context", tirx.Select(context, one, zero)), ("sinks", sinks), ("new_sinks", tirx.max(sinks - past, zero)),
        ):  # fmt: skip
            self.put(name, s, value)
        self.put("prompts", request, tirx.Select(context, total, self.given["context_lengths"][request]))
        left = zero
        if window is not None:
            left = tirx.min(window - sinks - one, self.capacity)
            if self.settings.compatible:
                left = left + tirx.Select(context, zero, one)
        self.put("lefts", s, left)
        for k, value in enumerate((n, past, total)):
            self.put("numbers", int64(k), tirx.max(self.made["numbers"][k], value))
        with T.serial(n) as i:
            row = T.bind(first + i)
            for name, value in (("sequence", s), ("position", past + i), ("packed", start + i)):
                self.put(name, row, value)
            self.put("source", start + i, row)

    def is_context(self, request: Expr) -> Expr:
        types = self.given.get("host_request_types")
        return tirx.const(True, "bool") if types is None else tirx.EQ(types[request], int64(0))

    def window(self) -> tuple[Expr | None, Expr]:
        """W of this layer, if there are windows, and the number of sink tokens."""
        zero = int64(0)
        sinks = tirx.max(tirx.min(self.read("host_sink_token_length", zero, zero), self.capacity), zero)
        sizes = self.given.get("host_max_attention_window_sizes")
        if sizes is None:
            return None, sinks
        which = tirx.floormod(int64(self.settings.layer), tirx.max(sizes.shape[0], int64(1)))
        return T.bind(tirx.max(tirx.min(sizes[which], int64(LARGEST_SIZE)), zero)), T.bind(sinks)

    def read(self, name: str, at: Expr, otherwise: Expr) -> Expr:
        return self.given[name][at] if name in self.given else otherwise

    def put(self, name: str, at: Expr, value: Expr) -> None:
        T.buffer_store(self.made[name], value, [at])
