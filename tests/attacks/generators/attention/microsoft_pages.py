"""com.microsoft PagedAttention: wild tables of blocks, lengths and slots, quantized values that do not fit their
scales, broken shapes; microsoft_caches.py says which calls are legal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Attack, Unspecified, attacks, require
from tests.attacks.draw import Draw
from tests.attacks.generators.attention.microsoft_caches import (
    FLOATS,
    SIGNED,
    Tensors,
    attack,
    check_shapes,
    check_types,
)
from tests.ops.microsoft import test_paged_attention as paged
from tests.ops.microsoft.paged_attention_reference import paged_attention

_TABLES = {"cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping"}
_NEEDED = {"query", "key_cache", *_TABLES} - {"slot_mapping"}
_PAGED: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "rotary_offset"), int),
    **dict.fromkeys(("local_window_size", "is_causal", "v_head_size"), int),
    **dict.fromkeys(("softcap", "scale", "qk_norm_epsilon"), float),
    **dict.fromkeys(("kv_cache_layout", "k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype"), str),
}
_PAGED_NUMBERS = {
    **dict.fromkeys(("query", "key", "value", "cos_cache", "sin_cache"), (-1,)),
    **dict.fromkeys(("key_cache", "value_cache"), (1, 2, 3)),
    **dict.fromkeys(("head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale"), (0, 1, 2)),
}


@attacks("PagedAttention", domain=MICROSOFT)
def blocks(d: Draw, op: str) -> Attack:
    case = paged.drawn(random.Random(d.int(0, 2**31)))
    if case.codes and d.chance(0.8):  # else float32 decides how keys are quantized
        case = replace(case, angles=0, offset=0, norms=False)

    def call(hostile: bool) -> Tensors:
        batch, columns = d.int(1, 4), d.int(1, 4)
        tokens = d.int(1, min(20, columns * case.block))
        sizes = batch, tokens, batch * columns + 1, columns
        tensors = paged.arrays(replace(case, hostile=hostile and case.hostile), d.rng, sizes)
        if d.chance(0.8):
            tensors["cumulative_sequence_length"][-1] = tokens  # all rows are somebody's
        return tensors

    def results(tensors: Tensors) -> list[tuple[str, int]]:
        caches = [tensors[name].dtype.name for name in paged.CACHES if name in tensors]
        return [(tensors["query"].dtype.name, 2), *((kind, 4) for kind in caches)]

    attributes = case.attributes
    return attack(
        d, op, paged.INPUTS, call, _paged, attributes, _PAGED, _TABLES, _NEEDED, results, _PAGED_NUMBERS
    )  # fmt: skip


def _paged(tensors: Tensors, said: dict[str, Any]) -> Sequence[np.ndarray]:
    for name in _NEEDED:
        require(name in tensors, f"no {name}")
    check_types(tensors, FLOATS, "query")
    check_types(tensors, (tensors["query"].dtype.name,), "key", "value")
    check_types(tensors, SIGNED, *_TABLES)
    check_types(tensors, ("float32",), "k_scale", "v_scale")
    size = _paged_fits(tensors, said)
    _scales_fit(tensors, said, size)
    for name in ("cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight"):
        if name in tensors and tensors[name].dtype != tensors["query"].dtype:
            raise Unspecified(f"{name} of another type than query")
    for name in ("scale", "softcap", "qk_norm_epsilon"):
        if not 0 <= said.get(name, 0) < 1e30:
            raise Unspecified(name)
    for name in ("do_rotary", "is_causal", "rotary_interleaved"):
        if said.get(name, 0) not in (0, 1):
            raise Unspecified(name)
    _contents_fit(tensors, said)
    y, keys, values = paged_attention(tensors, said)
    return [y, keys, *([] if values is None else [values])]


def _paged_fits(tensors: Tensors, said: dict[str, Any]) -> int:
    """Return the head size, where attributes and shapes fit."""
    heads, kv_heads = said["num_heads"], said["kv_num_heads"]
    require(heads > 0 and kv_heads > 0 and heads % kv_heads == 0, f"{heads} heads, {kv_heads} of keys")
    layout, v_size = said.get("kv_cache_layout", "SEPARATE"), said.get("v_head_size", 0)
    latent = layout == "LATENT"
    require(latent or layout == "SEPARATE", layout)
    require(not latent or kv_heads == 1, "heads of a latent cache")
    require(v_size == 0 or (latent and v_size > 0), f"v_head_size {v_size}")
    require(latent == ("value_cache" not in tensors), "value_cache")
    require(
        ("value" in tensors) == ("key" in tensors and not latent) and ("key" in tensors or not latent), "key and value"
    )
    require(tensors["query"].ndim == 2, "rank of query")
    tokens, width = tensors["query"].shape
    heads_per_row = heads if "key" in tensors else heads + 2 * kv_heads
    require(width % heads_per_row == 0, f"{width} is not a multiple of {heads_per_row}")
    size = width // heads_per_row
    require(v_size <= size and (v_size in (0, size) or said.get("scale", 0)), f"v_head_size {v_size} of {size}")
    require(tensors["key_cache"].ndim == 4 and tensors["key_cache"].shape[1] > 0, "key_cache")
    require(tensors["block_table"].ndim == 2 and tensors["block_table"].shape[1] > 0, "block_table")
    batch, cache = len(tensors["block_table"]), (*tensors["key_cache"].shape[:2], kv_heads, size)
    check_shapes(
        tensors, key=(tokens, kv_heads * size), value=(tokens, kv_heads * size), key_cache=cache, value_cache=cache
    )
    check_shapes(tensors, past_seqlens=(batch,), cumulative_sequence_length=(batch + 1,), slot_mapping=(tokens,))
    check_shapes(tensors, head_sink=(heads,), q_norm_weight=(size,), k_norm_weight=(size,))
    require(("q_norm_weight" in tensors) == ("k_norm_weight" in tensors), "one of the norms")
    window = said.get("local_window_size", -1)
    require(window == -1 or window > 0, f"local_window_size {window}")
    if said.get("do_rotary"):
        require("cos_cache" in tensors and "sin_cache" in tensors, "angles")
        require(tensors["cos_cache"].ndim == 2 and tensors["cos_cache"].shape == tensors["sin_cache"].shape, "angles")
        first, angles = said.get("rotary_offset", 0), tensors["cos_cache"].shape[1]
        require(first >= 0 and first + 2 * angles <= size, f"{angles} angles from {first} of {size}")
        if not angles:
            raise Unspecified("no angles")
    if not size:
        raise Unspecified("heads of nothing")
    return size


def _scales_fit(tensors: Tensors, said: dict[str, Any], size: int) -> None:
    caches = {letter: tensors.get(name) for letter, name in zip("kv", paged.CACHES)}
    dtype = tensors["query"].dtype
    for letter, cache in caches.items():
        kind, scale = said.get(f"{letter}_quant_type", "NONE"), tensors.get(f"{letter}_scale")
        require(kind in ("NONE", "PER_TENSOR", "PER_CHANNEL"), kind)
        require((kind == "NONE") == (scale is None), f"{letter}_scale")
        if cache is None:
            require(kind == "NONE", f"{letter}_quant_type without a cache")
            continue
        require(said.get(f"{letter}_cache_dtype", "") in ("", cache.dtype.name.replace("_", "")), "type of a cache")
        require(cache.dtype == tensors["key_cache"].dtype, "two types of caches")
        require((kind == "NONE") == (cache.dtype == dtype), f"{kind} of {cache.dtype}")
        if scale is not None:
            require(cache.dtype.name in ("int8", "float8_e4m3fn"), f"quantized values of {cache.dtype}")
            require(scale.size == (said["kv_num_heads"] * size if kind == "PER_CHANNEL" else 1), f"{letter}_scale")
    if tensors["key_cache"].dtype != dtype and (said.get("do_rotary") or "q_norm_weight" in tensors):
        raise Unspecified("a key between two quantized values")


def _contents_fit(tensors: Tensors, said: dict[str, Any]) -> None:
    tokens, (blocks, block) = len(tensors["query"]), tensors["key_cache"].shape[:2]
    table = tensors["block_table"].astype(object)
    ends = [min(max(int(x), 0), tokens) for x in tensors["cumulative_sequence_length"]]
    if ends != sorted(ends):
        raise Unspecified("rows of two sequences")
    slots: list[Any] = []
    for row, past, (first, last) in zip(table, tensors["past_seqlens"].tolist(), pairwise(ends)):
        if past < 0 or past + last - first > (len(row) * block if blocks else 0):
            continue
        if said.get("do_rotary") and last > first:
            require(past + last - first <= len(tensors["cos_cache"]), "positions without angles")
        for n in range(first, last):
            t = past + n - first
            slot = row[t // block] * block + t % block if 0 <= row[t // block] < blocks else -1
            slots.append(int(tensors["slot_mapping"][n]) if "slot_mapping" in tensors else slot)
    written = [slot for slot in slots if 0 <= slot < blocks * block]
    if len(written) != len(set(written)):
        raise Unspecified("two rows in one slot")
    if said.get("do_rotary") and tokens and not len(tensors["cos_cache"]):
        raise Unspecified("no positions")
