"""The work of an attention for its arguments: pairs of queries and keys, which depend on masks and lengths."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..record.formula import Formula
from ..record.problem import ATTRIBUTE, AttentionProblem
from .bound import BoundAttention
from .key_ranges import count_keys, select_key
from .scores import HIDDEN_BIAS


def count_pairs(problem: AttentionProblem) -> tirx.PrimFunc:
    """Build a PrimFunc with the parameters of the attention and one more, counts: int64 [2], which it fills.

    counts[0] is the number of pairs of a query row and a visible key, over the batch and all query heads. counts[1] is
    the number of slots of the cache whose keys no query may see before the mask, over all key/value heads.
    """
    mask = problem.mask
    per_head = "h" in mask.index_names if isinstance(mask, Formula) else mask is not None and mask.dims[1] != 1
    heads = problem.q_heads if per_head else 1
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("count_pairs")
        bound = BoundAttention(problem)
        counts = T.arg("counts", T.Buffer((2,), "int64"))
        for k, start in enumerate((T.int64(0), bound.addressing.slot_count() * problem.kv_heads)):
            T.buffer_store(counts, start, [k])
        with T.serial(T.int64(1) * bound.B) as b:
            rows = T.int64(1) * bound.rows(b)
            seen = count_keys(bound.keys.compute_tile_ranges(b, T.int64(0), rows))
            T.buffer_store(counts, counts[1] - seen * problem.kv_heads, [1])
            with T.serial(heads) as h, T.serial(rows) as i:
                ranges = [(T.bind(lo), T.bind(hi)) for lo, hi in bound.keys.compute_row_ranges(b, i)]
                if mask is None:
                    T.buffer_store(counts, counts[0] + count_keys(ranges) * (problem.q_heads // heads), [0])
                else:
                    with T.serial(count_keys(ranges)) as n:
                        j = T.bind(select_key(ranges, n))
                        shown = bound.scores.compute_bias(b, h, i, j, inside=True) > tirx.const(
                            HIDDEN_BIAS, problem.acc_dtype
                        )
                        T.buffer_store(counts, counts[0] + shown.astype("int64") * (problem.q_heads // heads), [0])
    return builder.get().without_attr(ATTRIBUTE).without_attr("global_symbol")
