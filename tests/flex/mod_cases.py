"""The mods of PyTorch's own tests of flex_attention (test/inductor/test_flex_attention.py, test_flex_decoding.py) and
of its users, written for captured arrays with names; and the arrays that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowering.flex import (
    and_masks,
    cast,
    clip,
    cos,
    exp,
    exp2,
    log,
    logical_not,
    maximum,
    minimum,
    or_masks,
    sigmoid,
    sin,
    sqrt,
    tan,
    tanh,
    where,
)

Shape = tuple[int, int, int, int]
"""Batches, query heads, rows and keys."""

INFINITY = float("inf")


@dataclass(frozen=True)
class Case:
    """A score_mod, a mask_mod or both, and the arrays that they read for a call of a shape.

    single: the mod converts integers to float32, as PyTorch does, where NumPy computes in float64.
    """

    name: str
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captures: Callable[[np.random.Generator, Shape], dict[str, np.ndarray]] = lambda rng, shape: {}
    single: bool = False


# -- scores that depend on the pair alone -----------------------------------------------------------------------------


def noop(s, b, h, i, j):
    return s


def causal(s, b, h, i, j):
    return where(i >= j, s, -INFINITY)


def inverse_causal(s, b, h, i, j):
    return where(i <= j, s, -INFINITY)


def windowed(offset):
    return lambda s, b, h, i, j: where(i + offset >= j, s, -INFINITY)


def rel_bias(s, b, h, i, j):
    return s + (i - j)


def rel_causal(s, b, h, i, j):
    return where(i >= j, s + (i - j), -INFINITY)


def alibi(heads):
    def mod(s, b, h, i, j):
        return s + (j - i) * exp2(-((h + 1) * 8.0 / heads))

    return mod


def times_two(s, b, h, i, j):
    return s * 2


def squared(s, b, h, i, j):
    return s * s


def trig(s, b, h, i, j):
    return sin(cos(s)) + tan(b)


def trig2(s, b, h, i, j):
    c, z = cos(s), sin(s)
    return c * z + tan(b)


def silu(s, b, h, i, j):
    return s * sigmoid(s)


def soft_cap(s, b, h, i, j):
    return 5.0 * tanh(s / 5.0)


def exponential(s, b, h, i, j):
    return exp(minimum(s, 2.0)) - log(1 + s * s) + sqrt(abs(s))


def checkerboard(s, b, h, i, j):
    s = where((i - j) % 2 == 0, s * 0.5, s)
    s = where((i - j) % 3 == 0, s * 0.25, s)
    return where(h % 2 == 0, s, -s)


def modular_indexing(s, b, h, i, j):
    return s + where((i // 3) % 2 == (j // 5) % 2, 1.0, -1.0) * cast(h % 3, "float32")


def powers(s, b, h, i, j):
    return s**3 / (1 + s**2) + 2.0 ** (-cast(abs(i - j), "float32"))


# -- scores that read arrays ------------------------------------------------------------------------------------------


def head_offset(s, b, h, i, j, *, offset):
    return s * offset[h]


def all_dims(s, b, h, i, j, *, batch_scale, head_scale, row_scale, key_scale, pair_bias, number):
    s = s * batch_scale[b] + head_scale[h]
    s = s + row_scale[i] - key_scale[j]
    return s + pair_bias[b, h, i, j] * number


def chained_brackets(s, b, h, i, j, *, bias):
    return s + bias[b][h][i, j]


def relative_table(s, b, h, i, j, *, table):
    return s + table[h, i - j + table.shape[1] // 2]


def negative_indices(s, b, h, i, j, *, table):
    return s + table[-1] * table[-i - 1] - table[i - j]


def buckets(s, b, h, i, j, *, bucket, bias):
    return s + bias[h, bucket[abs(i - j)]]


def twice_nested(s, b, h, i, j, *, order, start, bias):
    return s + bias[order[start[b]] + clip(i - j, 0, 3)]


def njt(s, b, h, i, j, *, offsets, sequence):
    row, key = i - offsets[sequence[i]], j - offsets[sequence[j]]
    return rel_causal(s, b, h, row, key)


def integers(s, b, h, i, j, *, small, wide, unsigned):
    return s + small[i] * 2 - wide[j] + unsigned[i] // 3 + (unsigned[j] >> 1) % 2


def flags(s, b, h, i, j, *, flag):
    return where(flag[i] & ~flag[j], s, s - 1) + flag[j]


def halves(s, b, h, i, j, *, half, double):
    return s + half[i] * double[j]


def closure(cap, keys, shift):
    def mod(s, b, h, i, j):
        return where(j < keys, cap * tanh(s / cap) + shift, s)

    return mod


# -- masks ------------------------------------------------------------------------------------------------------------


def causal_mask(b, h, i, j):
    return i >= j


def by_documents(b, h, i, j, *, document):
    return document[i] == document[j]


def documents_by_batch(b, h, i, j, *, documents):
    return (documents[b, i] == documents[b, j]) & (i >= j)


def clamped_documents(b, h, i, j, *, document):
    """The mod itself clips its indices, as in PyTorch's tests."""
    row, key = (clip(at, 0, document.shape[0] - 1) for at in (i, j))
    return document[row] == document[key]


def dependent_bidirectional(b, h, i, j, *, bound):
    """Causal after a bound for each batch, full before it."""
    return (i >= j) | ((i < bound[b]) & (j < bound[b]))


def windowed_causal(b, h, i, j):
    return (i >= j) & (i - j < 9)


def key_padding(b, h, i, j, *, padded):
    return ~padded[b, j]


def hidden_rows(b, h, i, j, *, hidden):
    return logical_not(hidden[i]) & (j != 1)


def natten(b, h, i, j):
    row, column, key_row, key_column = i // 8, i % 8, j // 8, j % 8
    center_row, center_column = clip(row, 2, 13), clip(column, 2, 5)
    return (abs(center_row - key_row) <= 2) & (abs(center_column - key_column) <= 2)


def by_head(b, h, i, j, *, window):
    return abs(i - j) <= window[h]


def nothing(b, h, i, j):
    return i + j < 0


def _captures(names):
    """Return a function of (rng, (B, H, S, T)) that draws arrays by name."""
    return lambda rng, shape: {name: np.asarray(make(rng, shape)) for name, make in names.items()}


def _floats(*axes, dtype="f"):
    return lambda rng, shape: rng.standard_normal([shape[axis] for axis in axes]).astype(dtype)


def _below(high, *axes, dtype="i4"):
    return lambda rng, shape: rng.integers(0, high, [shape[axis] for axis in axes]).astype(dtype)


def _positions(high, dtype="i4"):
    """Draw an integer for each position that rows or keys have."""
    return lambda rng, shape: rng.integers(0, high, max(shape[2:])).astype(dtype)


def _sequences(rng, shape):
    """Draw consecutive sequences: the one each position belongs to, and where they begin."""
    count = max(shape[2:])
    offsets = np.unique(np.append(0, rng.integers(0, count, 3))).astype(np.int32)
    return {"offsets": offsets, "sequence": (np.searchsorted(offsets, np.arange(count), "right") - 1).astype(np.int64)}


SCORES = (
    *(Case(mod.__name__, mod) for mod in (noop, causal, inverse_causal, rel_bias, rel_causal, times_two, squared)),
    *(Case(mod.__name__, mod) for mod in (silu, soft_cap, exponential, checkerboard, modular_indexing)),
    *(Case(mod.__name__, mod, single=True) for mod in (trig, trig2, powers)),
    Case("windowed", windowed(20)),
    Case("alibi", alibi(8), single=True),
    Case("closure", closure(2.5, 40, -1)),
    Case("head_offset", head_offset, None, _captures({"offset": _floats(1)})),
    Case(
        "all_dims",
        all_dims,
        None,
        _captures(
            {
                "batch_scale": _floats(0),
                "head_scale": _floats(1),
                "row_scale": _floats(2),
                "key_scale": _floats(3),
                "pair_bias": _floats(0, 1, 2, 3),
                "number": _floats(),
            }
        ),
    ),
    Case("chained_brackets", chained_brackets, None, _captures({"bias": _floats(0, 1, 2, 3)})),
    Case(
        "relative_table",
        relative_table,
        None,
        _captures({"table": lambda rng, shape: rng.standard_normal((shape[1], 2 * max(shape[2:]) + 1))}),
    ),
    Case(
        "negative_indices",
        negative_indices,
        None,
        _captures({"table": lambda rng, shape: rng.standard_normal(max(shape[2:])).astype("f")}),
    ),
    Case(
        "buckets",
        buckets,
        None,
        _captures({"bucket": _positions(7, "i8"), "bias": lambda rng, shape: rng.standard_normal((shape[1], 7))}),
    ),
    Case(
        "twice_nested",
        twice_nested,
        None,
        _captures(
            {
                "order": lambda rng, shape: rng.integers(0, 5, 6).astype("i2"),
                "start": _below(6, 0, dtype="u1"),
                "bias": lambda rng, shape: rng.standard_normal(8).astype("f"),
            }
        ),
    ),
    Case("njt", njt, None, _sequences),
    Case(
        "integers",
        integers,
        None,
        _captures(
            {"small": _below(5, 2, dtype="i1"), "wide": _below(5, 3, dtype="i8"), "unsigned": _positions(9, "u4")}
        ),
    ),
    Case("flags", flags, None, _captures({"flag": _positions(2, "?")})),
    Case("halves", halves, None, _captures({"half": _floats(2, dtype="f2"), "double": _floats(3, dtype="f8")})),
)


def _by_batch(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.integers(0, 3, (shape[0], max(shape[2:])))


MASKS = (
    *(Case(mod.__name__, None, mod) for mod in (causal_mask, windowed_causal, natten, nothing)),
    Case("by_documents", None, by_documents, _captures({"document": _positions(3)})),
    Case("documents_by_batch", None, documents_by_batch, _captures({"documents": _by_batch})),
    Case("clamped_documents", None, clamped_documents, _captures({"document": _positions(3, "i8")})),
    Case("dependent_bidirectional", None, dependent_bidirectional, _captures({"bound": _below(90, 0)})),
    Case("key_padding", None, key_padding, _captures({"padded": _below(2, 0, 3, dtype="?")})),
    Case("hidden_rows", None, hidden_rows, _captures({"hidden": _below(2, 2, dtype="?")})),
    Case("by_head", None, by_head, _captures({"window": _below(30, 1)})),
    Case("and", None, and_masks(causal_mask, by_documents, windowed_causal), _captures({"document": _positions(2)})),
    Case("or", None, or_masks(windowed_causal, by_documents), _captures({"document": _positions(9)})),
)  # fmt: skip

COMBINATIONS = (
    Case(
        "head_offset and documents",
        head_offset,
        by_documents,
        _captures({"offset": _floats(1), "document": _positions(3)}),
    ),
    Case(
        "one array for both",
        lambda s, b, h, i, j, *, at: s + at[i] * 0.1,
        lambda b, h, i, j, *, at: (at[i] >= at[j]) & (maximum(i, j) > 0),
        _captures({"at": _positions(50)}),
        single=True,
    ),
    Case("causal twice", causal, causal_mask),
)
