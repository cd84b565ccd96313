"""StreamingLLM (arXiv:2309.17453): keys are cached before rotation, and rotated to their positions among visible keys.

In a generation phase, the n keys of the window before the new token, sinks first, have positions 0 to n - 1, and the
token itself has position n. The keys are gathered from the cache and rotated in a separate buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...attention.gather import build_gather, list_gather_inputs
from ...attention.record.problem import AttentionProblem
from ...importing.node import Node
from ...importing.values import Size, Value
from ..helpers.kernels import compute, emit_loops, serial
from ..helpers.run_time import bind_sizes
from .cache import GptCache
from .requests import GptRequests
from .rotary import compute_angles_at
from .rows import rotate_element
from .settings import GptSettings

Read = Callable[..., Any]


@dataclass(frozen=True)
class StreamedKeys:
    """Tables that locate the visible cached keys.

    By sequence: counts (n), firsts (the row of the first gathered key) and skips (keys that are left out after the
    sinks). By gathered row [rows]: sequence and position. `requests` has positions as defined here. max_keys is the
    largest number of gathered keys of a sequence, at least 1.
    """

    counts: Value
    firsts: Value
    skips: Value
    sequence: Value
    position: Value
    rows: Size
    max_keys: Size
    requests: GptRequests


def locate_streamed_keys(node: Node, settings: GptSettings, requests: GptRequests, has_window: bool) -> StreamedKeys:
    sequences = requests.sequences
    request_tables = [requests[name] for name in ("past", "context", "lefts", "sinks", "lengths")]

    def sizes(past: Any, context: Any, lefts: Any, sinks: Any, lengths: Any, *buffers: Any) -> None:
        counts, firsts, skips, ends, numbers = buffers
        zero, unit = (tirx.const(x, "int64") for x in (0, 1))
        for k, value in enumerate((zero, unit)):
            T.buffer_store(numbers, value, [k])
        with serial(sequences) as s:
            n = past[s]
            if has_window:  # the window without the row's own key; lefts does not include the sinks
                n = tirx.min(n, tirx.max(lefts[s] + sinks[s], zero))
            n = T.bind(tirx.Select(context[s] > 0, zero, n))
            for buffer, value in (
                (counts, n), (firsts, numbers[0]), (skips, past[s] - n),
                (ends, tirx.Select(context[s] > 0, lengths[s], n + unit)),
            ):  # fmt: skip
                T.buffer_store(buffer, value, [s])
            T.buffer_store(numbers, numbers[0] + n, [0])
            T.buffer_store(numbers, tirx.max(numbers[1], n), [1])

    outputs = [((sequences,), "int64")] * 4 + [((2,), "int64")]
    counts, firsts, skips, ends, numbers = emit_loops(node, "stream", sizes, request_tables, outputs, [sequences])
    row_shape = (settings.kv_heads, settings.size)
    rows, max_keys = bind_sizes(node, numbers, (row_shape, "float32"))

    def emit_rows(counts: Any, firsts: Any, sequence: Any, position: Any) -> None:
        with serial(sequences) as s, T.serial(counts[s]) as j:
            for buffer, value in ((sequence, s), (position, j)):
                T.buffer_store(buffer, value, [firsts[s] + j])

    by_row = [((rows,), "int64")] * 2
    sequence, position = emit_loops(node, "stream_rows", emit_rows, [counts, firsts], by_row, [sequences])

    def shift(index: tuple[Expr, ...], position: Read, skips: Read, sequence_of: Read) -> Expr:
        return position(*index) - skips(sequence_of(*index))

    arrays = [requests["position"], skips, requests["sequence"]]
    shifted = compute(node, "positions", shift, arrays, (requests.rows,), dtype="int64")
    tables = {**requests.tables, "past": counts, "lengths": ends, "position": shifted}
    return StreamedKeys(counts, firsts, skips, sequence, position, rows, max_keys, replace(requests, tables=tables))


def gather_rotated_keys(
    node: Node,
    settings: GptSettings,
    node_inputs: Mapping[str, Value],
    cache: GptCache,
    stream: StreamedKeys,
    problem: AttentionProblem,
    sinks: Value,
) -> dict[str, Value]:
    """Return keys and values [rows, Hkv, D] from the cache, by the parameter names of the kernel for packed keys."""
    arrays = {**cache.tensors, "lengths": stream.counts, "key_starts": stream.firsts}
    arrays |= {"sink_keys": sinks, "skips": stream.skips}
    shape = (stream.rows, settings.kv_heads, settings.size)
    names = list_gather_inputs(problem, skipping=True)
    outputs = [(shape, problem.dtype)] * 2
    keys, values = node.call_tir(
        build_gather(problem, skipping=True), [node.tensor(arrays[name]) for name in names], outputs, "gather"
    )
    rotary = settings.rotary
    if rotary is not None:
        lengths = stream.requests["lengths"]
        angles = compute_angles_at(node, settings, node_inputs, stream.position, stream.sequence, lengths, stream.rows)

        def element(index: tuple[Expr, ...], key: Read, angle: Read) -> Expr:
            n, h, d = index
            value = rotate_element(
                rotary, lambda e: key(n, h, e).astype("float32"), lambda k, side: angle(n, k, side), d
            )
            return value.astype(problem.dtype)

        keys = compute(node, "turned_keys", element, [keys, angles], shape, dtype=problem.dtype)
    return {"k": keys, "v": values, "slot_starts": stream.firsts, "lengths": stream.counts}
