"""ONNX TfIdfVectorizer (https://onnx.ai/onnx/operators/onnx__TfIdfVectorizer.html): how often n-grams of a pool occur.

The pool is sorted by the places of the result when the model is compiled. Each place looks for its own n-grams at each
place of a row. Strings are codes, which are equal where the strings are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing.node import Node
from ..importing.values import Value
from ..tensorir.independent import independent
from . import op
from .kernels import let, loops, serial
from .reshape import reshape_to

_MODES = ("TF", "IDF", "TFIDF")
_MOST_PLACES = 2**24


@dataclass(frozen=True)
class _Pool:
    """N-grams, sorted by the place of the result that counts them: where each place's begin, where each one's items
    begin and how many they are, and all items."""

    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    items: np.ndarray


@op("TfIdfVectorizer", since=9)
def tfidf_vectorizer(node: Node, x: Value) -> Value:
    """[max(ngram_indexes) + 1] of X [C], or [N, max(ngram_indexes) + 1] of X [N, C]."""
    mode = node.attr("mode")
    if mode not in _MODES:
        raise node.error(f"attribute mode is '{mode}'.", f"Use one of {', '.join(_MODES)}.")
    if x.rank not in (1, 2):
        raise node.error(f"input X has rank {x.rank}.", "Make it [C] or [N, C].")
    pool = _read_pool(node, x.dtype)
    weights = _weights_of_places(node, len(pool.firsts) - 1)
    dtype = "string" if x.dtype == "string" else "int64"
    rows = x if x.dtype == dtype else node.emit(relax.op.astype(node.tensor(x), dtype))
    rows = reshape_to(node, rows, x.shape if x.rank == 2 else (1, *x.shape))
    y = _counted(node, rows, pool, weights, mode)
    return reshape_to(node, y, (*x.shape[:-1], len(pool.firsts) - 1))


def _read_pool(node: Node, dtype: str) -> _Pool:
    numbers, texts = node.attr("pool_int64s", None), node.attr("pool_strings", None)
    if (numbers is None) == (texts is None):
        raise node.error("it needs one of the attributes pool_int64s and pool_strings.", "Give one of them.")
    if (texts is None) == (dtype == "string"):
        raise node.error(f"input X is {dtype}, and the pool holds {'integers' if texts is None else 'strings'}.")
    items = numbers if texts is None else node.string_codes(np.array(texts, object)).tolist()
    places = _places_of_ngrams(node, items)
    ordered = sorted(places, key=lambda ngram: places[ngram])
    count = max(node.attr("ngram_indexes"), default=-1) + 1
    lengths = np.array([len(ngram) for ngram in ordered], np.int64)
    return _Pool(
        np.searchsorted([places[ngram] for ngram in ordered], np.arange(count + 1)).astype(np.int64),
        np.append(np.cumsum(lengths) - lengths, 0),
        np.append(lengths, 0),
        np.array([item for ngram in ordered for item in ngram] + [0], np.int64 if texts is None else np.int32),
    )


def _places_of_ngrams(node: Node, items: list[int]) -> dict[tuple[int, ...], int]:
    """Return the place of the result that counts each n-gram of a length that counts. Of equal ones the last is it."""
    counts, indexes = list(node.attr("ngram_counts")), list(node.attr("ngram_indexes"))
    shortest, longest = node.attr("min_gram_length"), node.attr("max_gram_length")
    ends = [*counts[1:], len(items)]
    ngrams: list[tuple[int, ...]] = []
    for length, (start, end) in enumerate(zip(counts, ends), start=1):
        if not 0 <= start <= end <= len(items) or (end - start) % length:
            raise node.error(
                f"attribute ngram_counts is {counts}, for a pool of {len(items)} items.",
                "Make it where the n-grams of each length begin in the pool.",
            )
        ngrams += [tuple(items[at : at + length]) for at in range(start, end, length)]
    if len(ngrams) != len(indexes) or min(indexes, default=-1) < 0:
        raise node.error(
            f"attribute ngram_indexes has {len(indexes)} elements from {min(indexes, default=0)} on, for {len(ngrams)} "
            "n-grams.",
            "Give each n-gram a place of the result.",
        )
    if max(indexes, default=0) >= _MOST_PLACES:
        raise node.error(
            f"attribute ngram_indexes asks for {max(indexes) + 1} places of the result.", f"Use {_MOST_PLACES} at most."
        )
    if not 1 <= shortest <= longest:
        raise node.error(f"attributes min_gram_length and max_gram_length are {shortest} and {longest}.")
    return {ngram: place for ngram, place in zip(ngrams, indexes) if shortest <= len(ngram) <= longest}


def _weights_of_places(node: Node, count: int) -> np.ndarray:
    """Return the weights of the places of the result, which are those of the n-grams that they count."""
    indexes, weights = list(node.attr("ngram_indexes")), node.attr("weights", None)
    of_places = np.ones(count, np.float32)
    if weights is None:
        return of_places
    if len(weights) != len(indexes):
        raise node.error(f"it has {len(weights)} weights, for {len(indexes)} n-grams.", "Give one for each.")
    of_places[indexes] = weights
    if not np.array_equal(of_places[indexes], np.asarray(weights, np.float32), equal_nan=True):
        raise node.error("attribute weights has different ones for n-grams of one place.", "Make them equal.")
    return of_places


def _counted(node: Node, rows: Value, pool: _Pool, weights: np.ndarray, mode: str) -> Value:
    """Emit the counts [N, places], weighed as the mode says, of rows [N, C]."""
    skips, columns = node.attr("max_skip_count"), rows.shape[1]
    if skips < 0:
        raise node.error(f"attribute max_skip_count is {skips}.", "Make it 0 or more.")
    one, zero = (tirx.const(number, "float32") for number in (1.0, 0.0))

    def statements(x: Any, firsts: Any, starts: Any, lengths: Any, items: Any, weights: Any, y: Any) -> None:
        with independent(*y.shape) as (row, place):
            total, is_here = T.alloc_buffer((1,), "float32"), T.alloc_buffer((1,), "bool")
            T.buffer_store(total, zero, [0])
            with serial(let(firsts[place + 1] - firsts[place])) as k:
                start, length = let(starts[firsts[place] + k]), let(lengths[firsts[place] + k])
                # Of one element there is nothing to skip, and none skips more than a row has.
                most = tirx.min(tirx.const(skips + 1, "int64"), tirx.const(0, "int64") + columns)
                distances = let(tirx.Select(length > 1, most, tirx.const(1, "int64")))
                with serial(distances) as skip, serial(columns) as at:
                    T.buffer_store(is_here, at + (length - 1) * (skip + 1) < columns, [0])
                    with serial(length) as item:
                        element = x[row, tirx.min(at + item * (skip + 1), columns - tirx.const(1, "int64"))]
                        T.buffer_store(is_here, tirx.all(is_here[0], tirx.EQ(element, items[start + item])), [0])
                    T.buffer_store(total, total[0] + tirx.Select(is_here[0], one, zero), [0])
            count = total[0] if mode != "IDF" else tirx.Select(total[0] > zero, one, zero)
            T.buffer_store(y, count if mode == "TF" else count * weights[place], [row, place])

    tables = [node.constant(table) for table in (pool.firsts, pool.starts, pool.lengths, pool.items, weights)]
    shape = (rows.shape[0], len(pool.firsts) - 1)
    (y,) = loops(node, "ngrams", statements, [rows, *tables], [(shape, "float32")])
    return y
