"""What the inputs of packed requests say: where the rows and keys of each lie, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.parameters import int64
from ...importing.node import Node
from ...importing.values import Size, Value, is_one
from ..asserted import asserted, required
from ..kernels import loops, serial
from ..run_time import bind


@dataclass(frozen=True)
class Requests:
    """Rows and keys of so many requests: int64 [batch] tensors of the first row, the number of rows, the first column
    of a packed mask and the number of keys; row_starts is [batch + 1]. Numbers of keys are at most those that the
    cache can hold. most_rows, most_keys: the most that a request has, at least 1. free: the first requests without a
    causal mask. all_keys: the sum of the numbers of keys, as it is said."""

    batch: Size
    row_starts: Value
    firsts: Value
    counts: Value
    key_starts: Value
    lengths: Value
    most_rows: Size
    most_keys: Size
    free: Size
    all_keys: Size


def requests(
    node: Node, tokens: Size, seqstarts: Value, kvstarts: Value, decoding_batches: Value | None, capacity: Size
) -> Requests:
    """seqstarts and kvstarts are int64 [batch + 1], decoding_batches an int64 number; of `tokens` packed rows, over
    caches that hold at most `capacity` keys of a request."""
    for name, value in (("seqstarts", seqstarts), ("kvstarts", kvstarts)):
        check_integers(node, name, value, 1)
    seqstarts = required(
        node, seqstarts, at_least(seqstarts.shape[0], 1), "seqstarts has {} elements; the first is 0.", *seqstarts.shape
    )
    batch = node.simplify(seqstarts.shape[0] - 1)
    kvstarts = asserted(node, kvstarts, (node.simplify(batch + 1),))
    given = [seqstarts, kvstarts]
    if decoding_batches is not None:
        given.append(_number(node, "decoding_batches", decoding_batches))
    by_request = ((batch,), "int64")

    def body(seqstarts: Any, kvstarts: Any, *rest: Any) -> None:
        firsts, counts, key_starts, lengths, numbers = rest[-5:]
        zero, one = (tirx.const(x, "int64") for x in (0, 1))
        free = zero if decoding_batches is None else tirx.max(tirx.min(rest[0][0], int64(batch)), zero)
        for k, value in enumerate((one, one, free, tirx.max(kvstarts[int64(batch)], zero))):
            T.buffer_store(numbers, value, [k])
        with serial(batch) as b:
            for starts, first, count, most in (
                (seqstarts, firsts, counts, tokens),
                (kvstarts, key_starts, lengths, capacity),
            ):
                T.buffer_store(first, starts[b], [b])
                end = tirx.const(LARGEST_SIZE, "int64")  # differences of any numbers would wrap
                begin, behind = (tirx.max(tirx.min(starts[at], end), zero) for at in (b, b + 1))
                size = tirx.max(tirx.min(behind - begin, int64(most)), zero)
                T.buffer_store(count, size, [b])
            T.buffer_store(numbers, tirx.max(numbers[0], counts[b]), [0])
            T.buffer_store(numbers, tirx.max(numbers[1], lengths[b]), [1])

    *tables, numbers = loops(
        node, "requests", body, given, [by_request] * 4 + [((4,), "int64")], [batch, tokens, capacity]
    )
    return Requests(batch, seqstarts, *tables, *bind(node, numbers, of=kvstarts))


def present(node: Node, **inputs: Value | None) -> None:
    """Raises NodeError for an input that the operator requires and that is a hole."""
    for name, value in inputs.items():
        if value is None:
            raise node.error(f"{name} is missing.", "Give it; the operator requires it.")


def check_integers(node: Node, name: str, value: Value, *ranks: int) -> None:
    if value.dtype != "int64" or value.rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise node.error(f"{name} is {value.dtype} of rank {value.rank}.", f"Make it int64 of rank {wanted}.")


def at_least(size: Size, least: int) -> Size:
    return size >= least


def _number(node: Node, name: str, value: Value) -> Value:
    """The number, as a tensor [1]."""
    check_integers(node, name, value, 0, 1)
    if value.rank == 1:
        if isinstance(value.shape[0], int) and not is_one(value.shape[0]):
            raise node.error(f"{name} has {value.shape[0]} elements.", "Make it one number.")
        return asserted(node, value, (1,))
    return node.reshaped(value, (1,))
