"""Positions and numbers of rows and keys of each packed request, read from the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Size, Value, is_one
from ..helpers.assertions import assert_shape, require
from ..helpers.kernels import emit_loops, serial
from ..helpers.requirements import require_input
from ..helpers.run_time import bind_sizes


@dataclass(frozen=True)
class PplRequests:
    """The rows and keys of `batch` requests, as int64 [batch] tensors.

    firsts is the first row, counts the number of rows, key_starts the first column of a packed mask, and lengths the
    number of keys, which is at most the number that the cache can store. row_starts is [batch + 1]. max_rows and
    max_keys are the largest numbers of rows and keys of a request, at least 1. The first free_batches requests have no
    causal mask. all_keys is the sum of the numbers of keys, as kvstarts states it.
    """

    batch: Size
    row_starts: Value
    firsts: Value
    counts: Value
    key_starts: Value
    lengths: Value
    max_rows: Size
    max_keys: Size
    free_batches: Size
    all_keys: Size


def read_requests(
    node: Node, tokens: Size, seqstarts: Value, kvstarts: Value, decoding_batches: Value | None, capacity: Size
) -> PplRequests:
    """Locate the rows and keys of each request.

    seqstarts and kvstarts are int64 [batch + 1], decoding_batches is an int64 number. There are `tokens` packed rows,
    and caches store at most `capacity` keys of a request.
    """
    for name, value in (("seqstarts", seqstarts), ("kvstarts", kvstarts)):
        check_integers(node, name, value, 1)
    seqstarts = require(
        node,
        seqstarts,
        is_at_least(seqstarts.shape[0], 1),
        "node.seqstarts_empty",
        "seqstarts has {} elements, and must have at least one, the leading 0.",
        *seqstarts.shape,
    )
    batch = node.simplify(seqstarts.shape[0] - 1)
    kvstarts = assert_shape(node, kvstarts, (node.simplify(batch + 1),))
    inputs = [seqstarts, kvstarts]
    if decoding_batches is not None:
        inputs.append(_read_number(node, "decoding_batches", decoding_batches))
    by_request = ((batch,), "int64")

    def body(seqstarts: Any, kvstarts: Any, *rest: Any) -> None:
        firsts, counts, key_starts, lengths, numbers = rest[-5:]
        zero, unit = (tirx.const(x, "int64") for x in (0, 1))
        free = zero if decoding_batches is None else tirx.max(tirx.min(rest[0][0], int64(batch)), zero)
        for k, value in enumerate((unit, unit, free, tirx.max(kvstarts[int64(batch)], zero))):
            T.buffer_store(numbers, value, [k])
        with serial(batch) as b:
            for starts, first, count, limit in (
                (seqstarts, firsts, counts, tokens),
                (kvstarts, key_starts, lengths, capacity),
            ):
                T.buffer_store(first, starts[b], [b])
                end = tirx.const(LARGEST_SIZE, "int64")  # differences of arbitrary numbers could wrap
                begin, next_begin = (tirx.max(tirx.min(starts[index], end), zero) for index in (b, b + 1))
                size = tirx.max(tirx.min(next_begin - begin, int64(limit)), zero)
                T.buffer_store(count, size, [b])
            T.buffer_store(numbers, tirx.max(numbers[0], counts[b]), [0])
            T.buffer_store(numbers, tirx.max(numbers[1], lengths[b]), [1])

    *tables, numbers = emit_loops(
        node, "requests", body, inputs, [by_request] * 4 + [((4,), "int64")], [batch, tokens, capacity]
    )
    return PplRequests(batch, seqstarts, *tables, *bind_sizes(node, numbers, source=kvstarts))


def require_present(node: Node, **inputs: Value | None) -> None:
    """Raise NodeError if an input that the operator requires is missing."""
    for name, value in inputs.items():
        require_input(node, name, value, "Give it; the operator requires it.")


def check_integers(node: Node, name: str, value: Value, *ranks: int) -> None:
    if value.dtype != "int64" or value.rank not in ranks:
        expected = " or ".join(map(str, ranks))
        raise node.error(
            "node.tensor_type_unsupported",
            f"{name} is {value.dtype} of rank {value.rank}.",
            f"Make it int64 of rank {expected}.",
        )


def is_at_least(size: Size, minimum: int) -> Size:
    return size >= minimum


def _read_number(node: Node, name: str, value: Value) -> Value:
    """Return the number as a tensor [1]."""
    check_integers(node, name, value, 0, 1)
    if value.rank == 1:
        if isinstance(value.shape[0], int) and not is_one(value.shape[0]):
            raise node.error("node.shape_mismatch", f"{name} has {value.shape[0]} elements.", "Make it one number.")
        return assert_shape(node, value, (1,))
    return node.reshape_to(value, (1,))
