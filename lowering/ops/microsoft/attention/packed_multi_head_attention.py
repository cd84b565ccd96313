"""com.microsoft PackedMultiHeadAttention: packed tokens of sequences without padding; each sees its own sequence.

Sequence b has the rows cumulative_sequence_length[b] to [b + 1] of T packed ones, as queries and as keys. If its
numbers are not in ascending order, or greater than T, the sequence has the rows that exist.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ....attention.codegen.parameters import int64
from ....attention.record.cache_layout import CacheLayout, Offset
from ....attention.record.formula import Formula
from ....importing.node import Node
from ....importing.values import Size, Value
from ... import op
from ...attention.attend import call_attention_kernel, make_ragged_problem, trace_formula
from ...helpers.assertions import assert_shape
from ...helpers.compute import number, relax_call, unify_sizes
from ...helpers.kernels import compute, emit_loops, serial
from ...helpers.requirements import require_dtype, require_range, require_rank
from ...helpers.run_time import bind_sizes
from .. import DOMAIN
from .projections import check_floats, check_ints, divide_heads

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
    """Return Y [T, Hq * Dv].

    query and key are [T, H * D] and value [T, H * Dv], or query is [T, H, 3, D] with all three. token_offset [B, S] has
    the positions of tokens before packing: only its sizes matter here. attention_bias [B or 1, H or 1, S, S] is added
    to scores.
    """
    heads = node.attr("num_heads")
    check_floats(node, query=query, key=key, value=value)
    require_dtype(node, "query", query, _FLOATS)
    check_ints(node, "token_offset", token_offset, 2)
    check_ints(node, "cumulative_sequence_length", cumulative_sequence_length, 1)
    q, k, v = (
        _split_heads(node, x, heads) for x in _add_biases(node, _split_rows(node, heads, query, key, value), bias)
    )
    batch, sequence = token_offset.shape
    starts = assert_shape(node, cumulative_sequence_length, (node.simplify(batch + 1),))
    tables, max_rows = _locate_sequences(node, starts, q.shape[0], batch)
    score, bias_arguments = _build_bias(node, attention_bias, (batch, heads, sequence))
    size, scale = number(node, "the head size", q.shape[2]), node.attr("scale", 0.0)
    problem = make_ragged_problem(
        batch, (heads, heads), size, q.dtype, CacheLayout("thd", Offset()),
        v_size=number(node, "the value size", v.shape[2]),
        scale=scale or 1 / math.sqrt(size), score=score,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        **tables,
        "most_rows": max_rows,
        "most_keys": max_rows,
        **bias_arguments,
    }
    y = call_attention_kernel(node, problem, arguments, max_rows)["y"]
    return node.reshape_to(y, (y.shape[0], heads * v.shape[2]))


def _split_rows(node: Node, heads: int, query: Value, key: Value | None, value: Value | None) -> list[Value]:
    """Return Q, K and V as [T, H * D]."""
    require_range(node, "num_heads", heads, 1)
    if key is None and value is None:
        require_rank(node, "query", query, "[tokens, heads, 3, head size]")
        size = number(node, "the last dimension of query", query.shape[3])
        whole = assert_shape(node, query, (query.shape[0], heads, 3, size))
        return [
            compute(
                node, "part", lambda i, x, n=n: x(i[0], i[1] // size, n, i[1] % size), [whole],
                (query.shape[0], heads * size),
            )
            for n in range(3)
        ]  # fmt: skip
    if key is None or value is None:
        raise node.error(
            "node.inputs_incomplete",
            "only one of key and value is given.",
            "Give both, or none and pack them in query.",
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        require_rank(node, name, x, "[tokens, hidden]")
    tokens = unify_sizes(node, "the number of tokens", query.shape[0], key.shape[0], value.shape[0])
    width = heads * divide_heads(node, "query", query.shape[1], heads)
    v_width = heads * divide_heads(node, "value", value.shape[1], heads)
    return [assert_shape(node, x, (tokens, w)) for x, w in ((query, width), (key, width), (value, v_width))]


def _add_biases(node: Node, rows: list[Value], bias: Value | None) -> list[Value]:
    """Add to each of the rows its own slice of the bias; the slices are concatenated."""
    if bias is None:
        return rows
    widths = [number(node, "a hidden size", x.shape[1]) for x in rows]
    require_rank(node, "bias", bias, "[hidden + hidden + v_hidden]")
    bias = assert_shape(node, bias, (sum(widths),))
    biased_rows = []
    for n, x in enumerate(rows):
        first = sum(widths[:n])
        bias_slice = compute(node, "bias", lambda i, b, first=first: b(i[0] + first), [bias], (widths[n],))
        biased_rows.append(relax_call(node, relax.op.add, x, bias_slice))
    return biased_rows


def _split_heads(node: Node, x: Value, heads: int) -> Value:
    return node.reshape_to(x, (x.shape[0], heads, number(node, "a hidden size", x.shape[1]) // heads))


def _locate_sequences(node: Node, starts: Value, tokens: Size, batch: Size) -> tuple[dict[str, Value], Size]:
    """Return the tables of the kernel, and the largest number of rows of a sequence, at least 1."""

    def body(starts: Any, *outputs: Any) -> None:
        row_starts, slot_starts, lengths, max_rows = outputs

        def row(index: Any) -> Any:
            return tirx.max(tirx.min(starts[index].astype("int64"), int64(tokens)), int64(0))

        T.buffer_store(row_starts, row(int64(0)), [int64(0)])
        T.buffer_store(max_rows, int64(1), [0])
        with serial(batch) as b:
            first = T.bind(row_starts[b])
            count = T.bind(tirx.max(row(b + 1) - first, int64(0)))
            for table, index, number in (
                (row_starts, b + 1, first + count),
                (slot_starts, b, first),
                (lengths, b, count),
            ):
                T.buffer_store(table, number, [index])
            T.buffer_store(max_rows, tirx.max(max_rows[0], count), [0])

    shapes = ((node.simplify(batch + 1),), (batch,), (batch,), (1,))
    outputs = [(shape, "int64") for shape in shapes]
    row_starts, slot_starts, lengths, max_rows = emit_loops(node, "sequences", body, [starts], outputs, [batch, tokens])
    (rows,) = bind_sizes(node, max_rows, source=starts)
    return {"row_starts": row_starts, "slot_starts": slot_starts, "lengths": lengths}, rows


def _build_bias(
    node: Node, bias: Value | None, sizes: tuple[Size, int, Size]
) -> tuple[Formula | None, dict[str, Value | Size]]:
    """Return the formula that adds the bias to scores, and its arguments."""
    if bias is None:
        return None, {}
    require_rank(node, "attention_bias", bias, "[batch, heads, rows, keys]")
    batch, heads, sequence = sizes
    is_batch_shared, is_head_shared = (bias.shape[axis] == 1 for axis in range(2))
    bias = assert_shape(
        node, bias, (1 if is_batch_shared else batch, 1 if is_head_shared else heads, sequence, sequence)
    )

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, bias: Any, sequence: Any) -> Any:
        row, key = (tirx.max(tirx.min(position, sequence - 1), int64(0)) for position in (i, j))
        zero = int64(0)
        return s + bias(zero if is_batch_shared else b, zero if is_head_shared else h, row, key).astype("float32")

    return trace_formula(element, [bias], "float32", [sequence])
