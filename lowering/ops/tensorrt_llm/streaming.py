"""StreamingLLM (arXiv:2309.17453): keys are cached before rotation, and turned where they stand among those that count.

In a generation phase the n keys before the new token that its window has, sinks first, take the positions 0 to n - 1,
and the token itself takes n. They are gathered from the cache and turned, in a buffer of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...attention.gather import gather, inputs
from ...attention.problem import AttentionProblem
from ...importing.node import Node
from ...importing.values import Size, Value
from ..kernels import compute, loops, serial
from ..run_time import bind
from .cache import Cache
from .requests import Requests
from .rotary import angles_at
from .rows import turned
from .settings import Settings

Read = Callable[..., Any]


@dataclass(frozen=True)
class Stream:
    """Tensors by sequence: counts (n), firsts (the row of the first gathered key) and skips (keys that are left out
    behind the sinks); by gathered row [rows]: sequence and position. `requests` counts positions as this does. most:
    gathered keys of any sequence, at least 1."""

    counts: Value
    firsts: Value
    skips: Value
    sequence: Value
    position: Value
    rows: Size
    most: Size
    requests: Requests


def stream_of(node: Node, settings: Settings, requests: Requests, windowed: bool) -> Stream:
    sequences = requests.sequences
    given = [requests[name] for name in ("past", "context", "lefts", "sinks", "lengths")]

    def sizes(past: Any, context: Any, lefts: Any, sinks: Any, lengths: Any, *made: Any) -> None:
        counts, firsts, skips, ends, numbers = made
        zero, one = (tirx.const(x, "int64") for x in (0, 1))
        for k, value in enumerate((zero, one)):
            T.buffer_store(numbers, value, [k])
        with serial(sequences) as s:
            n = past[s]
            if windowed:  # the window without the row's own key; lefts says it without the sinks
                n = tirx.min(n, tirx.max(lefts[s] + sinks[s], zero))
            n = T.bind(tirx.Select(context[s] > 0, zero, n))
            for buffer, value in (
                (counts, n), (firsts, numbers[0]), (skips, past[s] - n),
                (ends, tirx.Select(context[s] > 0, lengths[s], n + one)),
            ):  # fmt: skip
                T.buffer_store(buffer, value, [s])
            T.buffer_store(numbers, numbers[0] + n, [0])
            T.buffer_store(numbers, tirx.max(numbers[1], n), [1])

    outputs = [((sequences,), "int64")] * 4 + [((2,), "int64")]
    counts, firsts, skips, ends, numbers = loops(node, "stream", sizes, given, outputs, [sequences])
    beside = (settings.kv_heads, settings.size)
    rows, most = bind(node, numbers, (beside, "float32"))

    def places(counts: Any, firsts: Any, sequence: Any, position: Any) -> None:
        with serial(sequences) as s, T.serial(counts[s]) as j:
            for buffer, value in ((sequence, s), (position, j)):
                T.buffer_store(buffer, value, [firsts[s] + j])

    by_row = [((rows,), "int64")] * 2
    sequence, position = loops(node, "stream_rows", places, [counts, firsts], by_row, [sequences])

    def moved(index: tuple[Expr, ...], position: Read, skips: Read, of: Read) -> Expr:
        return position(*index) - skips(of(*index))

    arrays = [requests["position"], skips, requests["sequence"]]
    shifted = compute(node, "positions", moved, arrays, (requests.rows,), dtype="int64")
    tables = {**requests.tables, "past": counts, "lengths": ends, "position": shifted}
    return Stream(counts, firsts, skips, sequence, position, rows, most, replace(requests, tables=tables))


def turned_keys(
    node: Node,
    settings: Settings,
    given: Mapping[str, Value],
    cache: Cache,
    stream: Stream,
    problem: AttentionProblem,
    sinks: Value,
) -> dict[str, Value]:
    """Keys and values [rows, Hkv, D] out of the cache, as the kernel for packed keys has its parameters."""
    arrays = {**cache.tensors, "lengths": stream.counts, "key_starts": stream.firsts}
    arrays |= {"sink_keys": sinks, "skips": stream.skips}
    shape = (stream.rows, settings.kv_heads, settings.size)
    names = inputs(problem, skipping=True)
    outputs = [(shape, problem.dtype)] * 2
    keys, values = node.call_tir(
        gather(problem, skipping=True), [node.tensor(arrays[name]) for name in names], outputs, "gather"
    )
    rotary = settings.rotary
    if rotary is not None:
        lengths = stream.requests["lengths"]
        angles = angles_at(node, settings, given, stream.position, stream.sequence, lengths, stream.rows)

        def element(index: tuple[Expr, ...], key: Read, angle: Read) -> Expr:
            n, h, d = index
            value = turned(rotary, lambda e: key(n, h, e).astype("float32"), lambda k, side: angle(n, k, side), d)
            return value.astype(problem.dtype)

        keys = compute(node, "turned_keys", element, [keys, angles], shape, dtype=problem.dtype)
    return {"k": keys, "v": values, "slot_starts": stream.firsts, "lengths": stream.counts}
