"""Unique, of elements and of slices, none of them included; LabelEncoder of ai.onnx.ml, of any keys; and n-grams."""

from __future__ import annotations

import numpy as np

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, normalize_axis, require
from ..draw import INTEGERS, Draw


@attacks("Unique")
def unique(d: Draw, op: str) -> Attack:
    rank, dtype, in_order = d.int(1, 3), d.dtype(("int64", "float32", "float64", *INTEGERS, "bool")), d.int(0, 1)
    axis = d.int(-rank - 1, rank) if d.chance(0.6) else None
    attributes = {"sorted": in_order} | ({} if axis is None else {"axis": axis})

    def feed() -> Arrays:
        return [(abs(d.array("int32", d.shape(rank, limit=400))) % 3).astype(dtype)]

    def rule(x: np.ndarray) -> Answer:
        along = None if axis is None else normalize_axis(axis, x.ndim)
        if along is not None and 0 in x.shape and x.shape[along]:  # NumPy takes slices of nothing for different
            rows, count = x.shape[along], 1
            y = np.take(x, [0], along)
            return [y, np.zeros(count, np.int64), np.zeros(rows, np.int64), np.full(count, rows, np.int64)]
        y, firsts, inverse, counts = np.unique(x, True, True, True, axis=along)
        inverse = inverse.ravel()
        if not in_order:
            order = np.argsort(firsts)
            y = np.take(y, order, along if along is not None else 0)
            firsts, counts, inverse = firsts[order], counts[order], np.argsort(order)[inverse]
        return [y, *(np.asarray(v, np.int64) for v in (firsts, inverse, counts))]

    return Attack(op, feed, rule, outputs=4, attributes=attributes)


@attacks("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(d: Draw, op: str) -> Attack:
    dtype, count = d.pick(("int64", "float32")), d.pick((1, 2, 7, 100))
    keys = d.array(dtype, (count,), odd=0.3)
    values = d.array("int64", (count if d.chance(0.9) else count + 1,))
    rank, default = d.int(0, 3), d.int(-3, 3)
    lists = {"int64": "keys_int64s", "float32": "keys_floats"}
    attributes = {lists[dtype]: keys.tolist(), "values_int64s": values.tolist(), "default_int64": default}

    def feed() -> Arrays:
        x = d.array(dtype, d.shape(rank), odd=0.3)
        return [np.where(d.rng.random(x.shape) < 0.5, d.rng.choice(keys, x.shape), x).astype(dtype)]

    def rule(x: np.ndarray) -> Answer:
        require(count == len(values), "keys and values")
        y = np.full(x.shape, default)
        for key, value in zip(keys, values):
            y[(x == key) | ((key != key) & (x != x))] = value
        return [y]

    return Attack(op, feed, rule, domain="ai.onnx.ml", domain_opset=4, attributes=attributes, results=[("int64", rank)])


@attacks("TfIdfVectorizer")
def tfidf_vectorizer(d: Draw, op: str) -> Attack:
    count, rank = d.pick((1, 3, 40)), d.int(1, 2)
    pool = [d.int(-2, 3) for _ in range(3 * count)]
    indexes = [d.int(0, 5) for _ in range(2 * count)]
    attributes = {
        "mode": d.pick(("TF", "IDF")), "pool_int64s": pool, "ngram_counts": [0, d.pick((count, count, count + 1))],
        "ngram_indexes": indexes, "min_gram_length": 1, "max_gram_length": 2,
        "max_skip_count": d.pick((0, 1, 7, 2**40)),
    }  # fmt: skip

    def feed() -> Arrays:
        return [d.rng.integers(-2, 4, d.shape(rank)).astype(np.int64)]

    def rule(x: np.ndarray) -> Answer:
        raise Unspecified("the values are those of tests/ops/control/test_strings.py")

    return Attack(op, feed, rule, attributes=attributes, results=[("float32", rank)])
