"""Random configurations of PPL's operators for ragged batches with a KV cache, and data for calls of them.

A configuration fixes the static properties of a model: attributes, types, ranks, heads, and the set of inputs. A call
draws requests, lengths, and cache slots of their tokens (cache_attention_drawing.py). Data that requests must not read
is NaN, or an index out of range: slots of other layers, slots without a request, slots that the call itself writes,
columns of attn_mask of other requests, and entries of the page table after a request's keys.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tests.serving.cache_attention import cache_attention_reference as reference
from tests.serving.cache_attention.cache_attention_drawing import (
    draw_mask,
    draw_pages,
    draw_regions,
    draw_requests,
    draw_tokens,
)

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


@dataclass(frozen=True)
class Case:
    """A configuration. attributes are those of its node; an attribute that equals its default may be missing.

    scale is "stored" where the cache is quantized; else "absent", "empty" (without elements), or "unused" (of the shape
    for a quantized cache). mask is "absent", "empty" (of rank 1), "2-D" or "3-D". Scalars are of rank scalar_rank, 0
    or 1. num_kv_heads counts heads: unlike the attribute it is never 0.
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
        """Return the value of an attribute, or its default."""
        return (DEFAULTS[self.operator] | self.attributes)[name]

    def inputs(self) -> dict[str, tuple[str, tuple[int | str, ...]]]:
        """Return type and shape of every input, in order. Sizes of calls have names; a mask's row count is N."""
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
            paged, is_quantized = self.attribute("cache_mode"), self.attribute("quant_bit")
            types["cachestarts"] = (ints, ("B", "MaxP") if paged else ("B",))
            sizes: dict[str, int | str] = {
                "p": "MaxT",
                "l": self.attribute("num_layer"),
                "k": 2,
                "h": self.num_kv_heads,
            }
            slots: tuple[int | str, ...] = tuple(sizes[axis] for axis in _AXES[self.attribute("cache_layout")][:-1])
            types["cache"] = ("int8" if is_quantized else self.dtype, (*slots, self.head_dim))
            if self.scale != "absent":
                shape = (0,) if self.scale == "empty" else (*slots, self.head_dim // self.attribute("quant_group"))
                types["scale"] = (self.scale_dtype, shape)
        return {name: types[name] for name in INPUTS[self.operator] if name in types}

    def features(self) -> Features:
        """Return the features that cases are drawn from, and whose pairs are counted: see `find_missing_pairs`."""
        values: Features = {
            "domain": self.domain,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "scalar_rank": self.scalar_rank,
        }
        if self.operator != "MultiHeadAttention":
            values |= {name: self.attribute(name) for name in ("cache_mode", "cache_layout", "num_layer", "layer_idx")}
            values["page_size"] = self.attribute("page_size") if self.attribute("cache_mode") else 0
            values["quant_group"] = self.attribute("quant_group") if self.attribute("quant_bit") else 0
            values |= {"scale": self.scale, "scale_dtype": self.scale_dtype}
        if self.operator == "KeyValueCache":
            return values | {"num_repeat": self.attribute("num_repeat")}
        names = {1: "one", self.num_heads: "all" if self.attribute("num_kv_heads") else "0"}
        values["num_kv_heads"] = names.get(self.num_kv_heads, "some")
        return values | {"mask": self.mask} | {name: self.attribute(name) for name in ("is_causal", "is_alibi")}

    def arrays(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw the inputs of one call by name, in order.

        Sizes of a call differ from `inputs` where a mask of rank 2 or 3 has 0 for M. Such a mask counts as absent.
        """
        rows, past, decoding = draw_requests(rng)
        keys = past + rows
        n, nk, scalar = int(rows.sum()), int(keys.sum()), (1,) * self.scalar_rank
        arrays = {
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
            arrays |= self._draw_cache_inputs(rng, rows, past)
        if self.mask != "absent":
            arrays["attn_mask"] = draw_mask(rng, self.mask, self.num_heads, rows, keys, self.dtype)
        return {name: arrays[name].astype(dtype) for name, (dtype, _) in self.inputs().items()}

    def _draw_cache_inputs(self, rng: np.random.Generator, rows: np.ndarray, past: np.ndarray) -> dict[str, np.ndarray]:
        """Draw current keys and values, the cache, and the slots of each request's tokens."""
        shape = (int(rows.sum()), self.num_kv_heads, self.head_dim)
        group = self.attribute("quant_group") if self.attribute("quant_bit") else self.head_dim
        arrays = {name: draw_tokens(rng, shape, group) for name in ("current_key", "current_value")}
        page_size = self.attribute("page_size") if self.attribute("cache_mode") else 0
        keys = past + rows
        arrays["cachestarts"], slots = draw_pages(rng, past, keys, page_size) if page_size else draw_regions(rng, keys)
        # The last page or region may be incomplete: a call reads only its request's tokens of it.
        max_t = max(1, *(int(own.max(initial=-1)) + 1 for own in slots)) + int(rng.choice([0, 0, 1, 5]))
        if page_size and rng.random() < 0.5:
            max_t = -(-max_t // page_size) * page_size
        past_slots = np.concatenate([own[:count] for own, count in zip(slots, past)])
        return arrays | self._draw_cache(rng, past_slots, max_t)

    def _draw_cache(self, rng: np.random.Generator, past_slots: np.ndarray, max_t: int) -> dict[str, np.ndarray]:
        """Draw cache and scale of max_t slots: data at `past_slots`, in the layer of the node; else NaN."""
        is_quantized, layer, group = (self.attribute(name) for name in ("quant_bit", "layer_idx", "quant_group"))
        canonical = (self.attribute("num_layer"), 2, self.num_kv_heads, max_t)  # layout 3
        cache = np.full((*canonical, self.head_dim), np.nan)
        scale = np.full((*canonical, self.head_dim // group), np.nan)
        is_past, shape = np.isin(np.arange(max_t), past_slots), (2, self.num_kv_heads, max_t, 1)
        is_past = np.broadcast_to(is_past[:, None], shape)
        if is_quantized:
            cache = rng.integers(
                -128, 128, cache.shape
            )  # quantized values of other slots are arbitrary: their scales are NaN
            cache[layer] = np.where(is_past & (cache[layer] == -128), 127, cache[layer])
            sizes = rng.uniform(0.2, 2.0, scale[layer].shape) / 64
            least = rng.random(sizes.shape) < 0.1
            scale[layer] = np.where(is_past, np.where(least, 1e-5, sizes), np.nan)
        else:
            cache[layer] = np.where(is_past, rng.standard_normal(cache[layer].shape), np.nan)
        order = [_AXES[3].index(axis) for axis in _AXES[self.attribute("cache_layout")]]
        arrays = {name: np.ascontiguousarray(x.transpose(order)) for name, x in (("cache", cache), ("scale", scale))}
        return arrays | ({"scale": np.zeros(0)} if self.scale == "empty" else {})


def cases(seed: int, count: int, operator: str = "MultiHeadCacheAttention") -> list[Case]:
    """Return `count` configurations of the seed; the first of a longer list are those of a shorter one.

    Each is the best of several random ones: the one with the most new pairs of features.
    """
    rng, blocks = random.Random(seed), _list_blocks(operator)
    selected, seen = list[Case](), set[Pair]()
    for number in range(count):
        drawn = [_draw_case(rng, operator, number, blocks) for _ in range(8)]
        best = max(drawn, key=lambda case: len(_list_pairs(case.features()) - seen))
        seen |= _list_pairs(best.features())
        selected.append(best)
    return selected


def find_missing_pairs(drawn: Sequence[Case]) -> set[Pair]:
    """Return pairs of compatible values of two features that none of the cases, all of one operator, has."""
    covered = set[Pair]().union(*(_list_pairs(case.features()) for case in drawn))
    possible = set[Pair]()
    for first_block, second_block in itertools.combinations(_list_blocks(drawn[0].operator), 2):
        for a, b in itertools.product(first_block, second_block):
            possible |= _list_pairs(a | b)
    return possible - covered


def compute_expected(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute the reference's results: output in float64, or key and value; and new cache and scale."""
    arguments: dict[str, Any] = {**inputs, **case.attributes}
    if case.operator == "MultiHeadAttention":
        return {"output": reference.multi_head_attention(**arguments)}
    names: tuple[str, ...] = ("key", "value", "cache", "scale")
    results: tuple[np.ndarray | None, ...]
    if case.operator == "KeyValueCache":
        results = reference.key_value_cache(**arguments)
    else:
        names, results = ("output", "cache", "scale"), reference.multi_head_cache_attention(**arguments)
    return {name: x for name, x in zip(names, results) if x is not None}


def _list_pairs(features: Features) -> set[Pair]:
    return set(itertools.combinations(sorted(features.items()), 2))


def _list_blocks(operator: str) -> list[list[Features]]:
    """Return blocks of features. A case is one choice of each block; choices of different blocks are independent."""

    def list_values(name: str, *values: Feature) -> list[Features]:
        return [{name: value} for value in values]

    dims = (8, 16, 20, 40, 64, 128)
    dtypes = ("float32", "float16")
    blocks = [list_values("domain", "opmx.dynamic_batching", "pmx.dynamic_batching"), list_values("dtype", *dtypes)]
    blocks += [list_values("scalar_rank", 0, 1)]
    if operator == "KeyValueCache":
        blocks += [list_values("num_heads", *range(1, 9)), list_values("num_repeat", 1, 2, 3, 8)]
    else:
        heads = list[Features]()
        for count in range(1, 9):
            kinds = ["0", "all"] + ["one"] * (count > 1) + ["some"] * bool(_list_divisors(count))
            heads += [{"num_heads": count, "num_kv_heads": kind} for kind in kinds]
        blocks += [heads, list_values("is_causal", 0, 1), list_values("is_alibi", 0, 1)]
        blocks += [list_values("mask", "absent", "empty", "2-D", "3-D")]
    if operator == "MultiHeadAttention":
        return [*blocks, list_values("head_dim", *dims)]
    unquantized: list[Features] = [
        {"head_dim": dim, "quant_group": 0, "scale": scale} for dim in dims for scale in ("absent", "empty", "unused")
    ]
    quantized: list[Features] = [
        {"head_dim": dim, "quant_group": group, "scale": "stored"} for dim in dims for group in _list_group_sizes(dim)
    ]
    pages: list[Features] = [{"cache_mode": 1, "page_size": size} for size in (1, 4, 16)]
    layers: list[Features] = [{"num_layer": count, "layer_idx": i} for count in (1, 2, 3) for i in range(count)]
    blocks += [unquantized + quantized, [{"cache_mode": 0, "page_size": 0}, *pages], layers]
    return [*blocks, list_values("cache_layout", *_AXES), list_values("scale_dtype", *dtypes)]


def _list_divisors(heads: int) -> list[int]:
    return [count for count in range(2, heads) if heads % count == 0]


def _list_group_sizes(head_dim: int) -> list[int]:
    return [size for size in (4, 8, 16) if head_dim % size == 0]


def _draw_case(rng: random.Random, operator: str, number: int, blocks: list[list[Features]]) -> Case:
    drawn: dict[str, Any] = {}
    for block in blocks:
        drawn |= rng.choice(block)
    heads, dim = drawn["num_heads"], drawn["head_dim"]
    attributes, kv_heads = {}, heads
    if operator != "KeyValueCache":
        attributes = {"num_heads": heads, "head_dim": dim}
        attributes |= {name: drawn[name] for name in ("is_causal", "is_alibi")}
        kv_heads = {"one": 1, "some": rng.choice(_list_divisors(heads) or [0])}.get(drawn["num_kv_heads"], heads)
        attributes["num_kv_heads"] = 0 if drawn["num_kv_heads"] == "0" else kv_heads
    if operator != "MultiHeadAttention":
        attributes |= {name: drawn[name] for name in ("num_layer", "layer_idx", "cache_mode", "cache_layout")}
        attributes["quant_bit"] = 8 if drawn["quant_group"] else 0
        # unused without quantization, or without pages
        attributes["quant_group"] = drawn["quant_group"] or rng.choice(_list_group_sizes(dim))
        attributes["page_size"] = drawn["page_size"] or rng.choice([1, 16, 128])
    if operator == "KeyValueCache":
        attributes["num_repeat"] = drawn["num_repeat"]
    defaults = DEFAULTS[operator]
    attributes = {name: x for name, x in attributes.items() if defaults.get(name) != x or rng.random() < 0.5}
    labels = [str(number), drawn["dtype"], f"{heads}_of_{kv_heads}_x_{dim}"]
    if operator != "MultiHeadAttention":
        cache_label = (
            f"int8_by_{drawn['quant_group']}_{drawn['scale_dtype']}" if drawn["quant_group"] else drawn["scale"]
        )
        slots = f"pages_{drawn['page_size']}" if drawn["cache_mode"] else "regions"
        labels += [
            f"layout_{drawn['cache_layout']}",
            slots,
            f"layer_{drawn['layer_idx']}_of_{drawn['num_layer']}",
            cache_label,
        ]
    if operator == "KeyValueCache":
        labels += [f"times_{drawn['num_repeat']}"]
    else:
        labels += ["causal"] * drawn["is_causal"] + ["alibi"] * drawn["is_alibi"] + [f"mask_{drawn['mask']}"]
    return Case(
        name="-".join(labels),
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
