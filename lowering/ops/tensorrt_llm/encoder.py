"""Cross attention: the rows of cross_kv of each sequence, and the number of encoder tokens that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Size, Value
from ..helpers.kernels import emit_loops, serial
from ..helpers.run_time import bind_sizes
from .requests import GptRequests, cast_to_int64, check_by_request


@dataclass(frozen=True)
class EncoderRows:
    """int64 tensors by sequence that locate encoder tokens.

    firsts and counts are the rows of cross_kv that the call writes, of which most sequences have none. starts is 0.
    lengths counts all visible tokens, cached those of them that were in the cache before. max_keys is the largest
    length of a sequence, at least 1.
    """

    firsts: Value
    counts: Value
    starts: Value
    lengths: Value
    cached: Value
    max_keys: Size


def locate_encoder_rows(
    node: Node, lengths: Value, requests: GptRequests, beams: int, rows: Size, padded_rows: Size | None, capacity: Size
) -> EncoderRows:
    """Locate the encoder tokens of each sequence.

    lengths is encoder_input_lengths [requests], each at most `capacity`. cross_kv has `rows` rows, padded to
    padded_rows per request unless that is None.
    """
    lengths = cast_to_int64(node, check_by_request(node, "encoder_input_lengths", lengths, requests.requests))
    by_sequence = ((requests.sequences,), "int64")

    def body(lengths: Any, past: Any, context: Any, *buffers: Any) -> None:
        firsts, counts, starts, seen, cached, max_keys, running = buffers
        zero, unit = (tirx.const(x, "int64") for x in (0, 1))
        T.buffer_store(running, zero, [0])
        T.buffer_store(max_keys, unit, [0])
        with serial(requests.requests) as request:
            first = T.bind(request * beams)
            writes = tirx.all(tirx.EQ(past[first], zero), context[first] > zero)
            total = T.bind(tirx.max(tirx.min(lengths[request], int64(capacity)), zero))
            start = T.bind(running[0])
            room = int64(rows) - start
            step = total
            if padded_rows is not None:
                room, step = tirx.min(room, int64(padded_rows)), int64(padded_rows)
            count = T.bind(tirx.Select(writes, tirx.max(tirx.min(total, room), zero), zero))
            with serial(beams) as beam:
                s = T.bind(first + beam)
                own_count = tirx.Select(tirx.EQ(beam, zero), count, zero)
                for buffer, value in (
                    (firsts, start), (counts, own_count), (starts, zero), (seen, total),
                    (cached, tirx.Select(writes, zero, total)),
                ):  # fmt: skip
                    T.buffer_store(buffer, value, [s])
            T.buffer_store(running, tirx.min(start + tirx.Select(writes, step, zero), int64(rows)), [0])
            T.buffer_store(max_keys, tirx.max(max_keys[0], total), [0])

    sizes = [size for size in (requests.requests, rows, padded_rows, capacity) if size is not None]
    *tables, max_keys = emit_loops(
        node, "encoder", body, [lengths, requests["past"], requests["context"]],
        [by_sequence] * 5 + [((1,), "int64")], sizes, scratch=[((1,), "int64")],
    )  # fmt: skip
    return EncoderRows(*tables, *bind_sizes(node, max_keys))
