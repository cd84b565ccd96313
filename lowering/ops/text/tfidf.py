"""ONNX TfIdfVectorizer (https://onnx.ai/onnx/operators/onnx__TfIdfVectorizer.html): counts of n-grams of a pool.

The pool is sorted by the elements of the result at compile time. Each output element searches for its own n-grams at
each position of a row. Strings are ids, which are equal where the strings are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.kernels import emit_loops, let, serial
from ..helpers.requirements import require_choice, require_range, require_rank
from ..tensor.reshape import reshape_to

_MODES = ("TF", "IDF", "TFIDF")
_MAX_OUTPUTS = 2**24


@dataclass(frozen=True)
class _NgramPool:
    """N-grams, sorted by the output element that counts them.

    firsts gives the beginning of the n-grams of each output element. starts and lengths give the beginning and the
    number of the items of each n-gram. items are all items.
    """

    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    items: np.ndarray


@op("TfIdfVectorizer", since=9)
def tfidf_vectorizer(node: Node, x: Value) -> Value:
    """Emit [max(ngram_indexes) + 1] of X [C], or [N, max(ngram_indexes) + 1] of X [N, C]."""
    mode = require_choice(node, "mode", node.attr("mode"), _MODES, code="tf_idf_vectorizer.mode_unsupported")
    require_rank(node, "X", x, "[C] or [N, C]", code="tf_idf_vectorizer.rank_unsupported")
    pool = _read_pool(node, x.dtype)
    weights = _read_weights(node, len(pool.firsts) - 1)
    dtype = "string" if x.dtype == "string" else "int64"
    rows = x if x.dtype == dtype else node.emit(relax.op.astype(node.tensor(x), dtype))
    rows = reshape_to(node, rows, x.shape if x.rank == 2 else (1, *x.shape))
    y = _emit_counts(node, rows, pool, weights, mode)
    return reshape_to(node, y, (*x.shape[:-1], len(pool.firsts) - 1))


def _read_pool(node: Node, dtype: str) -> _NgramPool:
    numbers, texts = node.attr("pool_int64s", None), node.attr("pool_strings", None)
    if (numbers is None) == (texts is None):
        raise node.error(
            "tf_idf_vectorizer.pool_ambiguous",
            "exactly one of the attributes pool_int64s and pool_strings is required.",
            "Give one of them.",
        )
    if (texts is None) == (dtype == "string"):
        raise node.error(
            "tf_idf_vectorizer.pool_dtype_mismatch",
            f"input X is {dtype}, and the pool holds {'integers' if texts is None else 'strings'}.",
        )
    items = numbers if texts is None else node.encode_strings(np.array(texts, object)).tolist()
    output_indices = _read_ngrams(node, items)
    ordered = sorted(output_indices, key=lambda ngram: output_indices[ngram])
    count = max(node.attr("ngram_indexes"), default=-1) + 1
    lengths = np.array([len(ngram) for ngram in ordered], np.int64)
    return _NgramPool(
        np.searchsorted([output_indices[ngram] for ngram in ordered], np.arange(count + 1)).astype(np.int64),
        np.append(np.cumsum(lengths) - lengths, 0),
        np.append(lengths, 0),
        np.array([item for ngram in ordered for item in ngram] + [0], np.int64 if texts is None else np.int32),
    )


def _read_ngrams(node: Node, items: list[int]) -> dict[tuple[int, ...], int]:
    """Return the output index of each n-gram of a counted length; the last of equal ones wins."""
    counts, indexes = list(node.attr("ngram_counts")), list(node.attr("ngram_indexes"))
    shortest, longest = node.attr("min_gram_length"), node.attr("max_gram_length")
    ends = [*counts[1:], len(items)]
    ngrams: list[tuple[int, ...]] = []
    for length, (start, end) in enumerate(zip(counts, ends), start=1):
        if not 0 <= start <= end <= len(items) or (end - start) % length:
            raise node.error(
                "tf_idf_vectorizer.ngram_counts_unsupported",
                f"attribute ngram_counts is {counts}, for a pool of {len(items)} items.",
                "Set it to the positions in the pool at which the n-grams of each length begin.",
            )
        ngrams += [tuple(items[start_item : start_item + length]) for start_item in range(start, end, length)]
    if len(ngrams) != len(indexes) or min(indexes, default=-1) < 0:
        raise node.error(
            "tf_idf_vectorizer.ngram_indexes_mismatch",
            f"attribute ngram_indexes has {len(indexes)} elements, the smallest {min(indexes, default=0)}, for "
            f"{len(ngrams)} n-grams.",
            "Give each n-gram an index of 0 or more in the result.",
        )
    if max(indexes, default=0) >= _MAX_OUTPUTS:
        raise node.error(
            "tf_idf_vectorizer.ngram_indexes_too_large",
            f"attribute ngram_indexes needs a result of {max(indexes) + 1} elements.",
            f"Use at most {_MAX_OUTPUTS} elements.",
        )
    if not 1 <= shortest <= longest:
        raise node.error(
            "tf_idf_vectorizer.gram_length_unsupported",
            f"attributes min_gram_length and max_gram_length are {shortest} and {longest}.",
        )
    return {ngram: output_index for ngram, output_index in zip(ngrams, indexes) if shortest <= len(ngram) <= longest}


def _read_weights(node: Node, count: int) -> np.ndarray:
    """Return the weights of the output elements, which are those of the n-grams that they count."""
    indexes, weights = list(node.attr("ngram_indexes")), node.attr("weights", None)
    output_weights = np.ones(count, np.float32)
    if weights is None:
        return output_weights
    if len(weights) != len(indexes):
        raise node.error(
            "tf_idf_vectorizer.weight_count_mismatch",
            f"attribute weights has {len(weights)} elements, for {len(indexes)} n-grams.",
            "Give one weight for each n-gram.",
        )
    output_weights[indexes] = weights
    if not np.array_equal(output_weights[indexes], np.asarray(weights, np.float32), equal_nan=True):
        raise node.error(
            "tf_idf_vectorizer.weights_inconsistent",
            "attribute weights has different elements for n-grams of the same index.",
            "Make them equal.",
        )
    return output_weights


def _emit_counts(node: Node, rows: Value, pool: _NgramPool, weights: np.ndarray, mode: str) -> Value:
    """Emit the counts [N, outputs], weighted by the mode, of rows [N, C]."""
    skips, columns = node.attr("max_skip_count"), rows.shape[1]
    require_range(node, "max_skip_count", skips, 0)
    one, zero = (tirx.const(number, "float32") for number in (1.0, 0.0))

    def statements(x: Any, firsts: Any, starts: Any, lengths: Any, items: Any, weights: Any, y: Any) -> None:
        with independent_loops(*y.shape) as (row, output):
            total, is_match = T.alloc_buffer((1,), "float32"), T.alloc_buffer((1,), "bool")
            T.buffer_store(total, zero, [0])
            with serial(let(firsts[output + 1] - firsts[output])) as k:
                start, length = let(starts[firsts[output] + k]), let(lengths[firsts[output] + k])
                # An n-gram of one element skips nothing, and no skip exceeds a row.
                max_distances = tirx.min(tirx.const(skips + 1, "int64"), tirx.const(0, "int64") + columns)
                distances = let(tirx.Select(length > 1, max_distances, tirx.const(1, "int64")))
                with serial(distances) as skip, serial(columns) as position:
                    T.buffer_store(is_match, position + (length - 1) * (skip + 1) < columns, [0])
                    with serial(length) as item:
                        element = x[row, tirx.min(position + item * (skip + 1), columns - tirx.const(1, "int64"))]
                        T.buffer_store(is_match, tirx.all(is_match[0], tirx.EQ(element, items[start + item])), [0])
                    T.buffer_store(total, total[0] + tirx.Select(is_match[0], one, zero), [0])
            count = total[0] if mode != "IDF" else tirx.Select(total[0] > zero, one, zero)
            T.buffer_store(y, count if mode == "TF" else count * weights[output], [row, output])

    tables = [node.constant(table) for table in (pool.firsts, pool.starts, pool.lengths, pool.items, weights)]
    shape = (rows.shape[0], len(pool.firsts) - 1)
    (y,) = emit_loops(node, "ngrams", statements, [rows, *tables], [(shape, "float32")])
    return y
