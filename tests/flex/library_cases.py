"""Masks and mods of the library, each with an oracle written without it: pair by pair, with Python's numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowering.flex import masks, mods

BATCHES, HEADS, KV_HEADS, SIZE = 2, 4, 2, 5


@dataclass
class Case:
    """A mask of so many rows and keys, and what it should say."""

    mod: Callable[..., Any]
    shown: Callable[[int, int, int, int], bool]
    rows: int = 17
    keys: int = 17
    captures: dict[str, Any] = field(default_factory=dict)


def near(center: int, key: int, size: int, extent: int) -> bool:
    """Return whether a key lies in the window of `size` positions around `center`, moved inside the extent."""
    first = min(max(center - size // 2, 0), max(extent - size, 0))
    return first <= key < first + size


def in_image(shape: tuple[int, ...], kernel: tuple[int, ...]) -> Callable[[int, int, int, int], bool]:
    positions = list(itertools.product(*map(range, shape)))
    return lambda b, h, i, j: all(map(near, positions[i], positions[j], kernel, shape))


def in_tiles(shape: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...]) -> Callable[..., bool]:
    positions = list(itertools.product(*map(range, shape)))
    tiled = [[x // size for x, size in zip(positions[at], tile)] for at in masks.tile_order(shape, tile)]
    extents = [extent // size for extent, size in zip(shape, tile)]
    return lambda b, h, i, j: all(map(near, tiled[i], tiled[j], window, extents))


LENGTHS = [4, 0, 1, 7, 5]
DOCUMENT = [k for k, length in enumerate(LENGTHS) for _ in range(length)]
POSITION = [position for length in LENGTHS for position in range(length)]
PREFIXES = [-1, -1, 0, 0, -1]  # documents 2 and 3 continue document 0
IDS = np.array([[5] * 6 + [-3] * 4 + [5] * 7, [0, 1] * 8 + [1]], np.int64)
SHOWN = np.random.default_rng(4).integers(0, 2, (HEADS, 4, 6)).astype(bool)

PARENTS = [-1, 0, 0, 1, 1, 2, -1, 6, 3]
MANY = [-1, *(node // 3 for node in range(69))]  # in three 32-bit words
CONTEXT = np.array([4, 0], np.int32)


def on_path(parents: list[int], node: int, other: int) -> bool:
    return node >= 0 and (node == other or on_path(parents, parents[node], other))


def in_tree(parents: list[int]) -> Callable[[int, int, int, int], bool]:
    return lambda b, h, i, j: j < CONTEXT[b] or on_path(parents, i, j - int(CONTEXT[b]))


MASKS = {
    "full": Case(masks.full, lambda b, h, i, j: True),
    "causal": Case(masks.causal, lambda b, h, i, j: j in range(i + 1)),
    "sliding_window": Case(masks.sliding_window(4), lambda b, h, i, j: j in range(i - 4, i + 1), rows=23),
    "sliding_window of 0": Case(masks.sliding_window(0), lambda b, h, i, j: i == j),
    "local": Case(masks.local(5, 2), lambda b, h, i, j: j in range(i - 5, i + 3)),
    "dilated": Case(masks.dilated(7, 3), lambda b, h, i, j: j in (*range(i, i + 8, 3), *range(i, i - 8, -3))),
    "prefix_lm": Case(masks.prefix_lm(6), lambda b, h, i, j: j in range(6) or j in range(i + 1)),
    "prefix_lm_by_batch": Case(
        masks.prefix_lm_by_batch,
        lambda b, h, i, j: j in range((9, 0)[b]) or j in range(i + 1),
        captures={"prefix": np.array([9, 0])},
    ),
    "padding": Case(
        masks.padding, lambda b, h, i, j: j in range((0, 11)[b]), captures={"lengths": np.array([0, 11], np.int32)}
    ),
    "and_masks": Case(
        masks.and_masks(masks.causal, masks.padding, masks.local(3, 9)),
        lambda b, h, i, j: j in range(i - 3, i + 1) and j in range((12, 5)[b]),
        captures={"lengths": np.array([12, 5])},
    ),
    "or_masks": Case(
        masks.or_masks(masks.sliding_window(1), lambda b, h, i, j: j % (h + 2) == 0),
        lambda b, h, i, j: j in (i - 1, i) or j in range(0, 99, h + 2),
    ),
    "shifted": Case(masks.shifted(masks.causal, 9), lambda b, h, i, j: j in range(i + 10), rows=5),
    "shifted_by_batch": Case(
        masks.shifted_by_batch(masks.sliding_window(6)),
        lambda b, h, i, j: j in range(i + (12, 3)[b] - 6, i + (12, 3)[b] + 1),
        rows=3,
        captures={"offset": np.array([12, 3])},
    ),
    "document": Case(
        masks.document(), lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], captures=masks.documents(LENGTHS)
    ),
    "document, of a prefix": Case(
        masks.document(masks.prefix_lm(3)),
        lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j] and (POSITION[j] < 3 or POSITION[j] <= POSITION[i]),
        captures=masks.documents(LENGTHS),
    ),
    "document_by_batch": Case(
        masks.document_by_batch, lambda b, h, i, j: IDS[b, i] == IDS[b, j], captures={"document": IDS}
    ),
    "shared_prefix": Case(
        masks.shared_prefix,
        lambda b, h, i, j: (
            (DOCUMENT[i] == DOCUMENT[j] and POSITION[j] <= POSITION[i]) or DOCUMENT[j] == PREFIXES[DOCUMENT[i]]
        ),
        captures=masks.documents(LENGTHS, PREFIXES),
    ),
    "tree": Case(
        masks.tree, in_tree(PARENTS), 9, 13, {"ancestors": masks.ancestors_of(PARENTS), "context": CONTEXT}
    ),
    "tree of 70 nodes": Case(
        masks.tree, in_tree(MANY), 70, 74, {"ancestors": masks.ancestors_of(MANY), "context": CONTEXT}
    ),
    "tree for each batch": Case(
        masks.tree,
        lambda b, h, i, j: in_tree([PARENTS, [-1, *range(8)]][b])(b, h, i, j),
        9,
        13,
        {"ancestors": np.stack([masks.ancestors_of(PARENTS), masks.ancestors_of([-1, *range(8)])]), "context": CONTEXT},
    ),
    "neighborhood": Case(masks.neighborhood((5, 7), 3), in_image((5, 7), (3, 3)), 35, 35),
    "neighborhood, even": Case(masks.neighborhood((5, 6), (4, 2)), in_image((5, 6), (4, 2)), 30, 30),
    "neighborhood larger than the image": Case(
        masks.neighborhood((3, 6), (9, 6)), lambda b, h, i, j: True, 18, 18
    ),
    "neighborhood of a video": Case(masks.neighborhood((3, 4, 3), (2, 3, 1)), in_image((3, 4, 3), (2, 3, 1)), 36, 36),
    "sliding_tile": Case(
        masks.sliding_tile((6, 10), (2, 2), (3, 3)), in_tiles((6, 10), (2, 2), (3, 3)), 60, 60
    ),
    "sliding_tile, even": Case(
        masks.sliding_tile((8, 6), (2, 3), (2, 4)), in_tiles((8, 6), (2, 3), (2, 4)), 48, 48
    ),
    "sliding_tile of a video": Case(
        masks.sliding_tile((4, 3, 6), (2, 1, 3), 2), in_tiles((4, 3, 6), (2, 1, 3), (2, 2, 2)), 72, 72
    ),
    "block_sparse": Case(
        masks.block_sparse((5, 3)), lambda b, h, i, j: SHOWN[0, i // 5, j // 3], captures={"shown": SHOWN[0]}
    ),
    "block_sparse for each head": Case(
        masks.block_sparse((5, 3)), lambda b, h, i, j: SHOWN[h, i // 5, j // 3], captures={"shown": SHOWN}
    ),
}  # fmt: skip


# -- scores -----------------------------------------------------------------------------------------------------------

BIAS = np.random.default_rng(5).standard_normal((HEADS, 9)).astype(np.float32)
T5 = np.random.default_rng(6).standard_normal((HEADS, 16)).astype(np.float32)
FACTORS = np.array([0.5, -1, 2, 0], np.float32)
SLOPES = mods.alibi_slopes(HEADS)
ROWS, KEYS = 19, 41
LATENT = {
    "q_rope": np.random.default_rng(7).standard_normal((BATCHES, HEADS, ROWS, 6)).astype(np.float32),
    "k_rope": np.random.default_rng(8).standard_normal((BATCHES, KEYS, 6)).astype(np.float32),
}


def t5_bucket(distance: int, exact: int, count: int, limit: int) -> int:
    """Return the bucket of Mesh TensorFlow and Transformers, corrected for their rounding of exact powers."""
    if distance < exact:
        return distance
    return min(exact + int(math.log(distance / exact) / math.log(limit / exact) * (count - exact) + 1e-9), count - 1)


def add_t5_bias(s: float, b: int, h: int, i: int, j: int) -> float:
    return s + float(T5[h, t5_bucket(abs(j - i), 4, 8, 32) + (8 if j > i else 0)])


SCORES: dict[str, tuple[Any, dict[str, Any], Callable[..., float]]] = {
    "noop": (mods.noop, {}, lambda s, b, h, i, j: s),
    "alibi": (mods.alibi, {"slopes": SLOPES}, lambda s, b, h, i, j: s - 2.0 ** (-2 * (h + 1)) * (i - j)),
    "soft_cap": (mods.soft_cap(0.7), {}, lambda s, b, h, i, j: 0.7 * math.tanh(s / 0.7)),
    "relative_position": (mods.relative_position, {}, lambda s, b, h, i, j: s + i - j),
    "relative_bias": (
        mods.relative_bias, {"bias": BIAS}, lambda s, b, h, i, j: s + float(BIAS[h, 4 + max(-4, min(4, j - i))])
    ),
    "t5_buckets": (mods.t5_buckets(16, 32), {"bias": T5}, add_t5_bias),
    "t5_buckets of a decoder": (
        mods.t5_buckets(16, 24, bidirectional=False),
        {"bias": T5},
        lambda s, b, h, i, j: s + float(T5[h, t5_bucket(max(i - j, 0), 8, 16, 24)]),
    ),
    "head_scale": (mods.head_scale, {"factors": FACTORS}, lambda s, b, h, i, j: s * float(FACTORS[h])),
    "latent": (
        mods.latent(6, 0.3),
        LATENT,
        lambda s, b, h, i, j: s + 0.3 * float(np.float64(LATENT["q_rope"][b, h, i]) @ LATENT["k_rope"][b, j]),
    ),
    "chain": (
        mods.chain(mods.alibi, mods.soft_cap(2.0), mods.relative_bias),
        {"slopes": SLOPES, "bias": BIAS},
        lambda s, b, h, i, j: (
            2 * math.tanh((s + 4.0 ** -(h + 1) * (j - i)) / 2) + float(BIAS[h, 4 + max(-4, min(4, j - i))])
        ),
    ),
    "shifted": (
        mods.shifted(mods.t5_buckets(16, 32), 22),
        {"bias": T5},
        lambda s, b, h, i, j: add_t5_bias(s, b, h, i + 22, j),
    ),
    "shifted_by_batch": (
        mods.shifted_by_batch(mods.t5_buckets(16, 32)),
        {"bias": T5, "offset": np.array([22, 3])},
        lambda s, b, h, i, j: add_t5_bias(s, b, h, i + (22, 3)[b], j),
    ),
}  # fmt: skip
