"""Random KV cache layouts and ragged batches: how they lie in memory, and data for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from lowering.attention.record.cache_layout import (
    Beams,
    CacheLayout,
    GivenRing,
    KvQuantization,
    Offset,
    Pages,
    Ring,
    Whole,
)
from lowering.attention.record.problem import AttentionProblem

_LAYERS = 3


def layout(rng: random.Random) -> CacheLayout:
    """Draw mostly a dense layout; else any axes, slot map, ring, beams and quantization that go together."""
    if rng.random() < 0.4:
        return CacheLayout(rng.choice(["bhtd", "bte"]))
    slots = rng.choice([Whole(), Offset(), Pages(rng.choice([1, 4, 16]), "page", rng.random() < 0.3), Pages(8, "slot")])
    beams = Beams(rng.choice([1, 2])) if not isinstance(slots, Offset) and rng.random() < 0.2 else None
    ring = None
    if rng.random() < 0.2:
        sinks = rng.choice([0, 2, 5])
        ring = Ring(sinks, sinks + rng.choice([0, 3]), rng.choice([1, 7, 16]))
    quantization = None
    if rng.random() < 0.4:
        quantization = KvQuantization(
            rng.choice(["int8", "float8_e4m3fn"]), rng.choice([0, 8, 4]), rng.choice(["float32", "float16"])
        )
        if not quantization.group:
            four, channels = rng.random() < 0.35, rng.random() < 0.5
            quantization = replace(quantization, dtype="int4" if four else quantization.dtype, channels=channels)
    axes = list({Whole: "b", Offset: "", Pages: "p"}[type(slots)])
    if getattr(slots, "entries", "page") == "slot":
        axes = []
    if rng.random() < 0.4:
        axes, last = [*axes, "t"], "e"
    else:
        axes, last = [*axes, "t", "h"], "d"
    joint = isinstance(slots, Pages) and slots.apart
    axes += [axis for axis in "lc" if rng.random() < 0.3 and not (joint and axis == "c")]
    rng.shuffle(axes)
    return CacheLayout("".join(axes) + last, slots, ring, beams, quantization, rng.randrange(_LAYERS))


def make_dynamic(rng: random.Random, layout: CacheLayout) -> CacheLayout:
    """Return the layout with some of its numbers passed at each call."""
    if layout.ring is not None and rng.random() < 0.4:
        layout = replace(layout, ring=GivenRing())
    pages = layout.slots
    if isinstance(pages, Pages) and pages.entries == "page" and rng.random() < 0.3:
        layout = replace(layout, slots=replace(pages, size=None))
    return layout


def row_starts(rng: np.random.Generator, batch: int, limit: int) -> np.ndarray:
    """Draw cumulative offsets of packed rows: some batches are empty, one has `limit` rows."""
    counts = rng.integers(0, limit + 1, batch) * (rng.random(batch) < 0.8)
    if batch:
        counts[rng.integers(batch)] = limit
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def arrays(p: AttentionProblem, batch: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draw keys and values, and the arrays that locate them. Slots of two batches differ; unused ones are random."""
    layout, inputs, ring = p.layout, dict[str, Any](), p.layout.ring
    if isinstance(ring, GivenRing):
        sinks = int(rng.choice([0, 2, 5]))
        ring = Ring(sinks, sinks + int(rng.choice([0, 3])), int(rng.choice([1, 7, 16])))
        inputs["ring"] = np.array([ring.sinks, ring.first, ring.capacity])
    needed = keys if ring is None else ring.first + ring.capacity
    sizes = {"b": batch + 2 * layout.has_lookup, "h": p.kv_heads, "t": keys}
    sizes |= {"l": _LAYERS, "c": 2}
    if ring is not None:
        sizes["t"] = needed + 1
    if isinstance(layout.slots, Offset):
        gaps = rng.integers(0, 3, batch)
        inputs["slot_starts"] = np.cumsum(gaps + needed) - needed
        sizes["t"] = int((gaps + needed).sum()) + 2
    elif isinstance(layout.slots, Pages):
        size = layout.slots.size or needed + 1
        columns, planes = -(-needed // size) + 1, [2] if layout.slots.apart else []
        count = int(np.prod([batch, *planes, columns])) + 1
        entries = rng.permutation(count)[: count - 1].reshape(batch, *planes, columns)
        if layout.slots.entries == "page":
            sizes |= {"p": count, "t": size}
        else:
            entries, sizes["t"] = entries * size, count * size
        inputs["pages"] = entries.astype(np.int64)
    if layout.beams is not None:
        requests = -(-batch // layout.beams.count)
        inputs["prompts"] = rng.integers(0, keys + 2, requests)
        inputs["beam_of"] = rng.integers(0, layout.beams.count, (requests, layout.beams.count, keys + 1))
    if layout.is_mapped and p.kv_len is None:
        inputs["most_keys"] = keys
    for name, dim in ("kv", p.head_dim), ("k", p.head_dim), ("v", p.v_head_dim):
        if (name == "kv") == layout.is_joint:
            inputs |= _rows(p, name, sizes, dim, rng)
    return inputs


def _rows(
    p: AttentionProblem, name: str, sizes: dict[str, int], dim: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw a buffer of the cache, and its scales."""
    quantization, axes = p.layout.quantization, p.layout.axes

    def draw(elements: int) -> np.ndarray:
        return rng.standard_normal([(sizes | {"d": elements, "e": p.kv_heads * elements})[axis] for axis in axes])

    if quantization is None:
        return {name: draw(dim).astype(p.v_dtype if name == "v" else p.dtype)}
    if quantization.dtype == "int4":
        quantized = (draw(dim // 2) * 80).round().astype(np.int64).astype(np.uint8)
    else:
        quantized = (draw(dim) * 30).round().clip(-127, 127).astype(quantization.dtype)
    planes = [2] if name == "kv" else []
    if quantization.channels:
        scale = rng.standard_normal([*planes, p.kv_heads, dim])
    else:
        scale = draw(dim // quantization.group) if quantization.group else rng.standard_normal(planes or 1)
    return {name: quantized, f"{name}_scale": (abs(scale) / 30 + 1e-3).astype(quantization.scale_dtype)}
