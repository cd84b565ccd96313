"""Random configurations of PPL's operators for ragged requests with a key-value cache, and data for calls of them.

A configuration fixes what a model fixes: attributes, types, ranks, heads, and which inputs there are. A call draws
requests, lengths, and where the cache has their tokens. What no request may read is NaN, or a number that leads
nowhere: slots of other layers, slots of no request, those that the call itself stores, columns of attn_mask of other
requests or of none, and entries of the page table past a request's keys.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cache_attention_reference as reference
import numpy as np

Feature: TypeAlias = str | int
Features: TypeAlias = dict[str, Feature]
Pair: TypeAlias = tuple[tuple[str, Feature], tuple[str, Feature]]

INPUTS = {
    "KeyValueCache": (
        *("current_key", "current_value", "seqstarts", "kvstarts", "cachestarts", "start_pos"),
        *("max_seqlen", "max_kvlen", "cache", "scale"),
    ),
    "MultiHeadAttention": (
        *("query", "key", "value", "seqstarts", "kvstarts", "decoding_batches"),
        *("max_seqlen", "max_kvlen", "attn_mask"),
    ),
    "MultiHeadCacheAttention": (
        *("query", "current_key", "current_value", "seqstarts", "kvstarts", "cachestarts", "start_pos"),
        *("decoding_batches", "max_seqlen", "max_kvlen", "cache", "scale", "attn_mask"),
    ),
}
_CACHE = {
    "num_layer": 1,
    "layer_idx": 0,
    "quant_bit": 0,
    "quant_group": 8,
    "cache_mode": 0,
    "cache_layout": 0,
    "page_size": 128,
}
_HEADS = {"is_causal": 1, "is_alibi": 0, "num_kv_heads": 0}
DEFAULTS = {
    "KeyValueCache": {**_CACHE, "num_repeat": 1},
    "MultiHeadAttention": _HEADS,
    "MultiHeadCacheAttention": {**_HEADS, **_CACHE},
}
# Axes of the cache in each layout: p is the slot of a token, l the layer, k key or value, h the head, d its channel.
_AXES = {0: "plkhd", 1: "lpkhd", 2: "lkphd", 3: "lkhpd"}
_NOWHERE = (-1, -7, -(2**31), -(2**62), 2**31, 2**40, 2**62)


@dataclass(frozen=True)
class Case:
    """A configuration. attributes has what its node has: one that equals its default may be missing.

    scale is "stored" where the cache has codes; else "absent", "empty" (without elements), or "unused" (shaped as if it
    had). mask is "absent", "empty" (of rank 1), "2-D" or "3-D". Scalars are of rank scalar_rank, 0 or 1. num_kv_heads
    counts heads: unlike the attribute it is never 0.
    """

    name: str
    operator: str
    domain: str
    attributes: dict[str, int] = field(hash=False)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scale_dtype: str
    scale: str
    mask: str
    scalar_rank: int

    def attribute(self, name: str) -> int:
        """Its value, or its default."""
        return (DEFAULTS[self.operator] | self.attributes)[name]

    def inputs(self) -> dict[str, tuple[str, tuple[int | str, ...]]]:
        """Type and shape of every input there is, in order. Sizes of calls have names; a mask's row count is N."""
        ints, heads, own = "int64", self.num_heads, (self.num_kv_heads, self.head_dim)
        scalar: tuple[int | str, ...] = (1,) * self.scalar_rank
        types: dict[str, tuple[str, tuple[int | str, ...]]] = {
            "query": (self.dtype, ("N", heads, self.head_dim)),
            "current_key": (self.dtype, ("N", *own)),
            "current_value": (self.dtype, ("N", *own)),
            "key": (self.dtype, ("NK", *own)),
            "value": (self.dtype, ("NK", *own)),
            "seqstarts": (ints, ("B+1",)),
            "kvstarts": (ints, ("B+1",)),
            "start_pos": (ints, ("B",)),
            "decoding_batches": (ints, scalar),
            "max_seqlen": (ints, scalar),
            "max_kvlen": (ints, scalar),
        }
        if self.mask != "absent":
            shapes: dict[str, tuple[int | str, ...]]
            shapes = {"empty": (0,), "2-D": ("N", "M"), "3-D": (heads, "N", "M")}
            types["attn_mask"] = (self.dtype, shapes[self.mask])
        if self.operator != "MultiHeadAttention":
            paged, coded = self.attribute("cache_mode"), self.attribute("quant_bit")
            types["cachestarts"] = (ints, ("B", "MaxP") if paged else ("B",))
            sizes: dict[str, int | str] = {
                "p": "MaxT",
                "l": self.attribute("num_layer"),
                "k": 2,
                "h": self.num_kv_heads,
            }
            slots: tuple[int | str, ...] = tuple(sizes[axis] for axis in _AXES[self.attribute("cache_layout")][:-1])
            types["cache"] = ("int8" if coded else self.dtype, (*slots, self.head_dim))
            if self.scale != "absent":
                shape = (0,) if self.scale == "empty" else (*slots, self.head_dim // self.attribute("quant_group"))
                types["scale"] = (self.scale_dtype, shape)
        return {name: types[name] for name in INPUTS[self.operator] if name in types}

    def features(self) -> Features:
        """What cases are drawn of, and pairs are counted of: see `missing_pairs`."""
        found: Features = {
            "domain": self.domain,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "scalar_rank": self.scalar_rank,
        }
        if self.operator != "MultiHeadAttention":
            found |= {name: self.attribute(name) for name in ("cache_mode", "cache_layout", "num_layer", "layer_idx")}
            found["page_size"] = self.attribute("page_size") if self.attribute("cache_mode") else 0
            found["quant_group"] = self.attribute("quant_group") if self.attribute("quant_bit") else 0
            found |= {"scale": self.scale, "scale_dtype": self.scale_dtype}
        if self.operator == "KeyValueCache":
            return found | {"num_repeat": self.attribute("num_repeat")}
        names = {1: "one", self.num_heads: "all" if self.attribute("num_kv_heads") else "0"}
        found["num_kv_heads"] = names.get(self.num_kv_heads, "some")
        return found | {"mask": self.mask} | {name: self.attribute(name) for name in ("is_causal", "is_alibi")}

    def arrays(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The inputs of one call by name, in order, of those that there are.

        Sizes of a call differ from `inputs` where a mask of rank 2 or 3 has 0 for M, so no elements: it is as none.
        """
        rows, past, decoding = _requests(rng)
        keys = past + rows
        n, nk, scalar = int(rows.sum()), int(keys.sum()), (1,) * self.scalar_rank
        found = {
            "query": rng.standard_normal((n, self.num_heads, self.head_dim)),
            "key": rng.standard_normal((nk, self.num_kv_heads, self.head_dim)),
            "value": rng.standard_normal((nk, self.num_kv_heads, self.head_dim)),
            "seqstarts": np.concatenate([[0], np.cumsum(rows)]),
            "kvstarts": np.concatenate([[0], np.cumsum(keys)]),
            "start_pos": past,
            "decoding_batches": np.full(scalar, decoding),
            "max_seqlen": np.full(scalar, rows.max()),
            "max_kvlen": np.full(scalar, keys.max()),
        }
        if self.operator != "MultiHeadAttention":
            found |= self._stored(rng, rows, past)
        if self.mask != "absent":
            found["attn_mask"] = _mask(rng, self.mask, self.num_heads, rows, keys, self.dtype)
        return {name: found[name].astype(dtype) for name, (dtype, _) in self.inputs().items()}

    def _stored(self, rng: np.random.Generator, rows: np.ndarray, past: np.ndarray) -> dict[str, np.ndarray]:
        """Current keys and values, the cache, and where it has each request's tokens."""
        shape = (int(rows.sum()), self.num_kv_heads, self.head_dim)
        group = self.attribute("quant_group") if self.attribute("quant_bit") else self.head_dim
        found = {name: _tokens(rng, shape, group) for name in ("current_key", "current_value")}
        page_size = self.attribute("page_size") if self.attribute("cache_mode") else 0
        keys = past + rows
        found["cachestarts"], slots = _pages(rng, past, keys, page_size) if page_size else _regions(rng, keys)
        # The last page or region may be cut: of that, a call needs no more than its request's tokens.
        max_t = max(1, *(int(own.max(initial=-1)) + 1 for own in slots)) + int(rng.choice([0, 0, 1, 5]))
        if page_size and rng.random() < 0.5:
            max_t = -(-max_t // page_size) * page_size
        known = np.concatenate([own[:count] for own, count in zip(slots, past)])
        return found | self._cache(rng, known, max_t)

    def _cache(self, rng: np.random.Generator, known: np.ndarray, max_t: int) -> dict[str, np.ndarray]:
        """cache and scale of max_t slots: data at the slots `known`, of past tokens, in the layer used; else NaN."""
        coded, layer, group = (self.attribute(name) for name in ("quant_bit", "layer_idx", "quant_group"))
        canonical = (self.attribute("num_layer"), 2, self.num_kv_heads, max_t)  # layout 3
        cache = np.full((*canonical, self.head_dim), np.nan)
        scale = np.full((*canonical, self.head_dim // group), np.nan)
        there, shape = np.isin(np.arange(max_t), known), (2, self.num_kv_heads, max_t, 1)
        there = np.broadcast_to(there[:, None], shape)
        if coded:
            cache = rng.integers(-128, 128, cache.shape)  # codes of unknown slots may be any: their scales are NaN
            cache[layer] = np.where(there & (cache[layer] == -128), 127, cache[layer])
            sizes = rng.uniform(0.2, 2.0, scale[layer].shape) / 64
            least = rng.random(sizes.shape) < 0.1
            scale[layer] = np.where(there, np.where(least, 1e-5, sizes), np.nan)
        else:
            cache[layer] = np.where(there, rng.standard_normal(cache[layer].shape), np.nan)
        order = [_AXES[3].index(axis) for axis in _AXES[self.attribute("cache_layout")]]
        found = {name: np.ascontiguousarray(x.transpose(order)) for name, x in (("cache", cache), ("scale", scale))}
        return found | ({"scale": np.zeros(0)} if self.scale == "empty" else {})


def cases(seed: int, count: int, operator: str = "MultiHeadCacheAttention") -> list[Case]:
    """So many configurations, which follow from the seed: the first of a longer list are those of a shorter one.

    Each is the one of several drawn at random that has the most pairs of features that none before it has.
    """
    rng, blocks = random.Random(seed), _blocks(operator)
    found, seen = list[Case](), set[Pair]()
    for number in range(count):
        drawn = [_case(rng, operator, number, blocks) for _ in range(8)]
        best = max(drawn, key=lambda case: len(_pairs(case.features()) - seen))
        seen |= _pairs(best.features())
        found.append(best)
    return found


def missing_pairs(drawn: Sequence[Case]) -> set[Pair]:
    """Pairs of values of two features that none of the cases, all of one operator, has, of those that go together."""
    found = set[Pair]().union(*(_pairs(case.features()) for case in drawn))
    wanted = set[Pair]()
    for one, other in itertools.combinations(_blocks(drawn[0].operator), 2):
        for a, b in itertools.product(one, other):
            wanted |= _pairs(a | b)
    return wanted - found


def expected(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the reference gives for the inputs: output in float64, or key and value; and new cache and scale."""
    given: dict[str, Any] = {**inputs, **case.attributes}
    if case.operator == "MultiHeadAttention":
        return {"output": reference.multi_head_attention(**given)}
    names: tuple[str, ...] = ("key", "value", "cache", "scale")
    results: tuple[np.ndarray | None, ...]
    if case.operator == "KeyValueCache":
        results = reference.key_value_cache(**given)
    else:
        names, results = ("output", "cache", "scale"), reference.multi_head_cache_attention(**given)
    return {name: x for name, x in zip(names, results) if x is not None}


def _pairs(features: Features) -> set[Pair]:
    return set(itertools.combinations(sorted(features.items()), 2))


def _blocks(operator: str) -> list[list[Features]]:
    """Features that go together, whatever those of other blocks are: one of each block's choices makes a case."""

    def each(name: str, *values: Feature) -> list[Features]:
        return [{name: value} for value in values]

    dims = (8, 16, 20, 40, 64, 128)
    dtypes = ("float32", "float16")
    blocks = [each("domain", "opmx.dynamic_batching", "pmx.dynamic_batching"), each("dtype", *dtypes)]
    blocks += [each("scalar_rank", 0, 1)]
    if operator == "KeyValueCache":
        blocks += [each("num_heads", *range(1, 9)), each("num_repeat", 1, 2, 3, 8)]
    else:
        heads = list[Features]()
        for count in range(1, 9):
            kinds = ["0", "all"] + ["one"] * (count > 1) + ["some"] * bool(_between(count))
            heads += [{"num_heads": count, "num_kv_heads": kind} for kind in kinds]
        blocks += [heads, each("is_causal", 0, 1), each("is_alibi", 0, 1)]
        blocks += [each("mask", "absent", "empty", "2-D", "3-D")]
    if operator == "MultiHeadAttention":
        return [*blocks, each("head_dim", *dims)]
    plain: list[Features] = [
        {"head_dim": dim, "quant_group": 0, "scale": scale} for dim in dims for scale in ("absent", "empty", "unused")
    ]
    coded: list[Features] = [
        {"head_dim": dim, "quant_group": group, "scale": "stored"} for dim in dims for group in _groups(dim)
    ]
    pages: list[Features] = [{"cache_mode": 1, "page_size": size} for size in (1, 4, 16)]
    layers: list[Features] = [{"num_layer": count, "layer_idx": i} for count in (1, 2, 3) for i in range(count)]
    blocks += [plain + coded, [{"cache_mode": 0, "page_size": 0}, *pages], layers]
    return [*blocks, each("cache_layout", *_AXES), each("scale_dtype", *dtypes)]


def _between(heads: int) -> list[int]:
    return [count for count in range(2, heads) if heads % count == 0]


def _groups(head_dim: int) -> list[int]:
    return [size for size in (4, 8, 16) if head_dim % size == 0]


def _case(rng: random.Random, operator: str, number: int, blocks: list[list[Features]]) -> Case:
    drawn: dict[str, Any] = {}
    for block in blocks:
        drawn |= rng.choice(block)
    heads, dim = drawn["num_heads"], drawn["head_dim"]
    attributes, kv_heads = {}, heads
    if operator != "KeyValueCache":
        attributes = {"num_heads": heads, "head_dim": dim}
        attributes |= {name: drawn[name] for name in ("is_causal", "is_alibi")}
        kv_heads = {"one": 1, "some": rng.choice(_between(heads) or [0])}.get(drawn["num_kv_heads"], heads)
        attributes["num_kv_heads"] = 0 if drawn["num_kv_heads"] == "0" else kv_heads
    if operator != "MultiHeadAttention":
        attributes |= {name: drawn[name] for name in ("num_layer", "layer_idx", "cache_mode", "cache_layout")}
        attributes["quant_bit"] = 8 if drawn["quant_group"] else 0
        # neither of these is used without codes, or without pages
        attributes["quant_group"] = drawn["quant_group"] or rng.choice(_groups(dim))
        attributes["page_size"] = drawn["page_size"] or rng.choice([1, 16, 128])
    if operator == "KeyValueCache":
        attributes["num_repeat"] = drawn["num_repeat"]
    defaults = DEFAULTS[operator]
    attributes = {name: x for name, x in attributes.items() if defaults.get(name) != x or rng.random() < 0.5}
    parts = [str(number), drawn["dtype"], f"{heads}_of_{kv_heads}_x_{dim}"]
    if operator != "MultiHeadAttention":
        codes = f"int8_by_{drawn['quant_group']}_{drawn['scale_dtype']}" if drawn["quant_group"] else drawn["scale"]
        slots = f"pages_{drawn['page_size']}" if drawn["cache_mode"] else "regions"
        parts += [
            f"layout_{drawn['cache_layout']}",
            slots,
            f"layer_{drawn['layer_idx']}_of_{drawn['num_layer']}",
            codes,
        ]
    if operator == "KeyValueCache":
        parts += [f"times_{drawn['num_repeat']}"]
    else:
        parts += ["causal"] * drawn["is_causal"] + ["alibi"] * drawn["is_alibi"] + [f"mask_{drawn['mask']}"]
    return Case(
        name="-".join(parts),
        operator=operator,
        domain=drawn["domain"],
        attributes=attributes,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=drawn["dtype"],
        scale_dtype=drawn.get("scale_dtype", "float32"),
        scale=drawn.get("scale", "absent"),
        mask=drawn.get("mask", "absent"),
        scalar_rank=drawn["scalar_rank"],
    )


def _requests(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Of one to six requests, their rows and past tokens, [B]; and how many of the first count as decoding."""
    batch = int(rng.integers(1, 7))

    def lengths(*ranges: tuple[int, int], p: Sequence[float]) -> np.ndarray:
        low, high = np.array(ranges)[rng.choice(len(ranges), batch, p=p)].T
        return rng.integers(low, high, endpoint=True)

    rows = lengths((0, 0), (1, 1), (2, 8), (9, 33), p=(0.05, 0.45, 0.35, 0.15))
    past = lengths((0, 0), (1, 8), (9, 40), (41, 140), p=(0.35, 0.3, 0.25, 0.1))
    decoding = int(rng.integers(0, batch + 1))
    if rng.random() < 0.5:  # as mostly, but decoding requests may have more rows
        rows[:decoding] = 1
    return rows, past, decoding


def _tokens(rng: np.random.Generator, shape: tuple[int, int, int], group: int) -> np.ndarray:
    """Keys or values, [N, heads, D], of which some groups are zeros, some small numbers, and some ties.

    Small ones have the least scale there is, or in float16 a subnormal one. A group of ties has the scale 1/64, and
    numbers halfway between two codes.
    """
    normal = rng.standard_normal((*shape[:2], shape[2] // group, group))
    small = normal * 10.0 ** rng.uniform(-7, -1.5, normal.shape[:3])[..., None]
    ties = rng.integers(-254, 254, normal.shape, endpoint=True) / 128
    ties[..., 0] = 127 / 64
    kinds = [np.zeros_like(normal), small, ties, normal]
    kind = rng.choice(4, normal.shape[:3], p=(0.05, 0.1, 0.1, 0.75))[..., None]
    return np.choose(kind, kinds).reshape(shape)


def _regions(rng: np.random.Generator, keys: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """cachestarts, [B], and every request's slots: regions in any order, with room between; nowhere without keys."""
    starts, slots = rng.choice(_NOWHERE, len(keys)), [np.zeros(0, np.int64)] * len(keys)
    end = int(rng.integers(0, 4))
    for b in rng.permutation(len(keys)):
        if keys[b]:
            starts[b], slots[b] = end, end + np.arange(keys[b])
            end += int(keys[b] + rng.integers(0, 6))
    return starts, slots


def _pages(
    rng: np.random.Generator, past: np.ndarray, keys: np.ndarray, size: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """cachestarts, [B, MaxP], and every request's slots: pages in any order, some unused, at multiples of size or not.

    Requests may have first pages in common, those which the call only reads.
    """
    counts, batch = -(-keys // size), len(keys)
    total = int(counts.sum())
    gaps = rng.integers(0, 2, total) * (size if rng.random() < 0.75 else 3)
    pages = rng.permutation(np.cumsum(gaps + size) - size)
    table = rng.choice(_NOWHERE, (batch, max(1, counts.max()) + int(rng.integers(0, 3))))
    for b, own in enumerate(np.split(pages, np.cumsum(counts)[:-1])):
        table[b, : len(own)] = own
    if rng.random() < 0.3:
        one, other = rng.integers(0, batch, 2)
        common = min(past[one], past[other]) // size
        table[one, :common] = table[other, :common]
    positions = [np.arange(count) for count in keys]
    return table, [table[b, t // size] + t % size for b, t in enumerate(positions)]


def _mask(
    rng: np.random.Generator, kind: str, heads: int, rows: np.ndarray, keys: np.ndarray, dtype: str
) -> np.ndarray:
    """attn_mask: [N, M], or [heads, N, M], or without elements. What is no request's own is NaN."""
    n, nk = int(rows.sum()), int(keys.sum())
    before = {"empty": None, "2-D": (), "3-D": (heads,)}[kind]
    if before is None:
        return np.zeros(0)
    if rng.random() < 0.1:
        return np.zeros((*before, n, 0))
    mask = np.full((*before, n, nk + int(rng.choice([0, -nk % 16, int(rng.integers(1, 8))]))), np.nan)
    for row, key, count, length in zip(np.cumsum(rows) - rows, np.cumsum(keys) - keys, rows, keys):
        own = rng.standard_normal((*before, count, length))
        hidden = rng.random(own.shape) < rng.choice([0.0, 0.3, 0.8])
        hidden |= rng.random((*own.shape[:-1], 1)) < 0.15  # whole rows
        # A lowest number is added to a score, which it swallows or not as the type has it: there must be a larger one.
        lowest = (rng.random(own.shape) < 0.05) & ~hidden[..., :1]
        lowest[..., :1] = False
        own = np.where(hidden, -np.inf, np.where(lowest, np.finfo(dtype).min, own))
        mask[..., row : row + count, key : key + length] = own
    return mask
