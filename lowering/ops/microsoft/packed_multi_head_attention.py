"""com.microsoft PackedMultiHeadAttention: the tokens of sequences without their padding, each of which sees its own.

Sequence b has the rows cumulative_sequence_length[b] to [b + 1] of T packed ones, as queries and as keys. A sequence
whose numbers are not in ascending order, or more than T, has the rows that are there.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...attention.cache_layout import CacheLayout, Offset
from ...attention.formula import Formula
from ...attention.parameters import int64
from ...importing.compute import agreed, number, relax_call
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..asserted import asserted
from ..attend import formula_of, packed, solved
from ..kernels import compute, loops, serial
from ..run_time import bind
from . import DOMAIN
from .paged_attention import check_ints
from .projections import check_floats, head_size

_FLOATS = ("float32", "float16", "bfloat16")


@op("PackedMultiHeadAttention", since=1, domain=DOMAIN)
def packed_multi_head_attention(
    node: Node,
    query: Value,
    key: Value | None,
    value: Value | None,
    bias: Value | None,
    token_offset: Value,
    cumulative_sequence_length: Value,
    attention_bias: Value | None = None,
) -> Value:
    """Y [T, Hq * Dv]. query and key are [T, H * D], value [T, H * Dv], or query is [T, H, 3, D] with all three.

    token_offset [B, S] says where tokens were before they were packed: only its sizes matter here. attention_bias
    [B or 1, H or 1, S, S] is added to scores.
    """
    heads = node.attr("num_heads")
    check_floats(node, query=query, key=key, value=value)
    if query.dtype not in _FLOATS:
        raise node.error(f"input query is {query.dtype}.", f"Use one of {', '.join(_FLOATS)}.")
    check_ints(node, "token_offset", token_offset, 2)
    check_ints(node, "cumulative_sequence_length", cumulative_sequence_length, 1)
    q, k, v = (_heads_apart(node, x, heads) for x in _biased(node, _rows(node, heads, query, key, value), bias))
    batch, sequence = token_offset.shape
    starts = asserted(node, cumulative_sequence_length, (node.simplify(batch + 1),))
    tables, most = _sequences(node, starts, q.shape[0], batch)
    change, read = _change(node, attention_bias, (batch, heads, sequence))
    size, scale = number(node, "the head size", q.shape[2]), node.attr("scale", 0.0)
    problem = packed(
        batch, (heads, heads), size, q.dtype, CacheLayout("thd", Offset()),
        v_size=number(node, "the value size", v.shape[2]),
        scale=scale or 1 / math.sqrt(size), score=change,
    )  # fmt: skip
    given: dict[str, Any] = {"q": q, "k": k, "v": v, **tables, "most_rows": most, "most_keys": most, **read}
    y = solved(node, problem, given, most)["y"]
    return node.reshaped(y, (y.shape[0], heads * v.shape[2]))


def _rows(node: Node, heads: int, query: Value, key: Value | None, value: Value | None) -> list[Value]:
    """Q, K and V as [T, H * D]."""
    if heads < 1:
        raise node.error(f"attribute num_heads is {heads}.", "Use at least 1.")
    if key is None and value is None:
        if query.rank != 4:
            raise node.error(f"packed query has rank {query.rank}.", "Make it [tokens, heads, 3, head size].")
        size = number(node, "the last dimension of query", query.shape[3])
        whole = asserted(node, query, (query.shape[0], heads, 3, size))
        return [
            compute(
                node, "part", lambda i, x, n=n: x(i[0], i[1] // size, n, i[1] % size), [whole],
                (query.shape[0], heads * size),
            )
            for n in range(3)
        ]  # fmt: skip
    if key is None or value is None:
        raise node.error("one of key and value is given.", "Give both, or none and pack them in query.")
    for x in (query, key, value):
        if x.rank != 2:
            raise node.error(f"{node.name_of(x, False)} has rank {x.rank}.", "Make it [tokens, hidden].")
    tokens = agreed(node, "the number of tokens", query.shape[0], key.shape[0], value.shape[0])
    width = heads * head_size(node, "query", query.shape[1], heads)
    v_width = heads * head_size(node, "value", value.shape[1], heads)
    return [asserted(node, x, (tokens, w)) for x, w in ((query, width), (key, width), (value, v_width))]


def _biased(node: Node, rows: list[Value], bias: Value | None) -> list[Value]:
    """The rows plus their parts of the bias, which lie one after the other."""
    if bias is None:
        return rows
    widths = [number(node, "a hidden size", x.shape[1]) for x in rows]
    if bias.rank != 1:
        raise node.error(f"input bias has rank {bias.rank}.", "Make it [hidden + hidden + v_hidden].")
    bias = asserted(node, bias, (sum(widths),))
    found = []
    for n, x in enumerate(rows):
        first = sum(widths[:n])
        own = compute(node, "bias", lambda i, b, first=first: b(i[0] + first), [bias], (widths[n],))
        found.append(relax_call(node, relax.op.add, x, own))
    return found


def _heads_apart(node: Node, x: Value, heads: int) -> Value:
    return node.reshaped(x, (x.shape[0], heads, number(node, "a hidden size", x.shape[1]) // heads))


def _sequences(node: Node, starts: Value, tokens: Size, batch: Size) -> tuple[dict[str, Value], Size]:
    """The tables of the kernel, and the most rows that a sequence has, at least 1."""

    def body(starts: Any, *outputs: Any) -> None:
        row_starts, slot_starts, lengths, most = outputs

        def row(at: Any) -> Any:
            return tirx.max(tirx.min(starts[at].astype("int64"), int64(tokens)), int64(0))

        T.buffer_store(row_starts, row(int64(0)), [int64(0)])
        T.buffer_store(most, int64(1), [0])
        with serial(batch) as b:
            first = T.bind(row_starts[b])
            count = T.bind(tirx.max(row(b + 1) - first, int64(0)))
            for table, at, number in ((row_starts, b + 1, first + count), (slot_starts, b, first), (lengths, b, count)):
                T.buffer_store(table, number, [at])
            T.buffer_store(most, tirx.max(most[0], count), [0])

    shapes = ((node.simplify(batch + 1),), (batch,), (batch,), (1,))
    outputs = [(shape, "int64") for shape in shapes]
    row_starts, slot_starts, lengths, most = loops(node, "sequences", body, [starts], outputs, [batch, tokens])
    (rows,) = bind(node, most, of=starts)
    return {"row_starts": row_starts, "slot_starts": slot_starts, "lengths": lengths}, rows


def _change(
    node: Node, bias: Value | None, sizes: tuple[Size, int, Size]
) -> tuple[Formula | None, dict[str, Value | Size]]:
    """What is added to scores."""
    if bias is None:
        return None, {}
    if bias.rank != 4:
        raise node.error(f"input attention_bias has rank {bias.rank}.", "Make it [batch, heads, rows, keys].")
    batch, heads, sequence = sizes
    one_batch, one_head = (bias.shape[axis] == 1 for axis in range(2))
    bias = asserted(node, bias, (1 if one_batch else batch, 1 if one_head else heads, sequence, sequence))

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, bias: Any, sequence: Any) -> Any:
        row, key = (tirx.max(tirx.min(at, sequence - 1), int64(0)) for at in (i, j))
        zero = int64(0)
        return s + bias(zero if one_batch else b, zero if one_head else h, row, key).astype("float32")

    return formula_of(element, [bias], "float32", [sequence])
