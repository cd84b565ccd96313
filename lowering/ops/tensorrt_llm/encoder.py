"""Cross attention: which rows of cross_kv are whose, and how many encoder tokens each sequence sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.parameters import int64
from ...importing.node import Node
from ...importing.values import Size, Value
from ..kernels import loops, serial
from ..run_time import bind
from .requests import Requests, as_int64, by_request


@dataclass(frozen=True)
class Encoder:
    """int64 tensors by sequence: firsts and counts of rows of cross_kv (those that the call writes, none for most),
    starts (0), lengths (all tokens that are seen), cached (those of them that the cache has had before). most: of any
    sequence, at least 1."""

    firsts: Value
    counts: Value
    starts: Value
    lengths: Value
    cached: Value
    most: Size


def encoder_of(
    node: Node, lengths: Value, requests: Requests, beams: int, rows: Size, each: Size | None, capacity: Size
) -> Encoder:
    """lengths is encoder_input_lengths [requests], at most `capacity` each; cross_kv has so many rows, padded to `each`
    per request unless that is None."""
    lengths = as_int64(node, by_request(node, "encoder_input_lengths", lengths, requests.requests))
    by_sequence = ((requests.sequences,), "int64")

    def body(lengths: Any, past: Any, context: Any, *made: Any) -> None:
        firsts, counts, starts, seen, cached, most, running = made
        zero, one = (tirx.const(x, "int64") for x in (0, 1))
        T.buffer_store(running, zero, [0])
        T.buffer_store(most, one, [0])
        with serial(requests.requests) as request:
            first = T.bind(request * beams)
            writes = tirx.all(tirx.EQ(past[first], zero), context[first] > zero)
            total = T.bind(tirx.max(tirx.min(lengths[request], int64(capacity)), zero))
            start = T.bind(running[0])
            room = int64(rows) - start
            step = total
            if each is not None:
                room, step = tirx.min(room, int64(each)), int64(each)
            count = T.bind(tirx.Select(writes, tirx.max(tirx.min(total, room), zero), zero))
            with serial(beams) as beam:
                s = T.bind(first + beam)
                mine = tirx.Select(tirx.EQ(beam, zero), count, zero)
                for buffer, value in (
                    (firsts, start), (counts, mine), (starts, zero), (seen, total),
                    (cached, tirx.Select(writes, zero, total)),
                ):  # fmt: skip
                    T.buffer_store(buffer, value, [s])
            T.buffer_store(running, tirx.min(start + tirx.Select(writes, step, zero), int64(rows)), [0])
            T.buffer_store(most, tirx.max(most[0], total), [0])

    sizes = [size for size in (requests.requests, rows, each, capacity) if size is not None]
    *tables, most = loops(
        node, "encoder", body, [lengths, requests["past"], requests["context"]],
        [by_sequence] * 5 + [((1,), "int64")], sizes, scratch=[((1,), "int64")],
    )  # fmt: skip
    return Encoder(*tables, *bind(node, most))
