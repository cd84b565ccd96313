"""Random stores of keys and values, and packed rows: how they lie in memory, and data for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from lowering.attention.cache_layout import Beams, CacheLayout, GivenRing, KvQuantization, Offset, Pages, Ring, Whole
from lowering.attention.problem import AttentionProblem

_LAYERS = 3


def layout(rng: random.Random) -> CacheLayout:
    """Mostly a dense one; else any axes, slot map, ring, beams and codec that go together."""
    if rng.random() < 0.4:
        return CacheLayout(rng.choice(["bhtd", "bte"]))
    slots = rng.choice([Whole(), Offset(), Pages(rng.choice([1, 4, 16]), "page", rng.random() < 0.3), Pages(8, "slot")])
    beams = Beams(rng.choice([1, 2])) if not isinstance(slots, Offset) and rng.random() < 0.2 else None
    ring = None
    if rng.random() < 0.2:
        sinks = rng.choice([0, 2, 5])
        ring = Ring(sinks, sinks + rng.choice([0, 3]), rng.choice([1, 7, 16]))
    codec = None
    if rng.random() < 0.4:
        codec = KvQuantization(
            rng.choice(["int8", "float8_e4m3fn"]), rng.choice([0, 8, 4]), rng.choice(["float32", "float16"])
        )
        if not codec.group:
            four, channels = rng.random() < 0.35, rng.random() < 0.5
            codec = replace(codec, dtype="int4" if four else codec.dtype, channels=channels)
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
    return CacheLayout("".join(axes) + last, slots, ring, beams, codec, rng.randrange(_LAYERS))


def given(rng: random.Random, layout: CacheLayout) -> CacheLayout:
    """The cache, some of whose numbers are told by a call."""
    if layout.ring is not None and rng.random() < 0.4:
        layout = replace(layout, ring=GivenRing())
    pages = layout.slots
    if isinstance(pages, Pages) and pages.entries == "page" and rng.random() < 0.3:
        layout = replace(layout, slots=replace(pages, size=None))
    return layout


def row_starts(rng: np.random.Generator, batch: int, most: int) -> np.ndarray:
    """Of packed rows: some batches have none, one has the most."""
    counts = rng.integers(0, most + 1, batch) * (rng.random(batch) < 0.8)
    if batch:
        counts[rng.integers(batch)] = most
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def arrays(p: AttentionProblem, batch: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    """Keys and values, and where they are. Slots of different batches differ; those of none hold what others do."""
    layout, found, ring = p.layout, dict[str, Any](), p.layout.ring
    if isinstance(ring, GivenRing):
        sinks = int(rng.choice([0, 2, 5]))
        ring = Ring(sinks, sinks + int(rng.choice([0, 3])), int(rng.choice([1, 7, 16])))
        found["ring"] = np.array([ring.sinks, ring.first, ring.capacity])
    needed = keys if ring is None else ring.first + ring.capacity
    sizes = {"b": batch + 2 * layout.has_lookup, "h": p.kv_heads, "t": keys}
    sizes |= {"l": _LAYERS, "c": 2}
    if ring is not None:
        sizes["t"] = needed + 1
    if isinstance(layout.slots, Offset):
        gaps = rng.integers(0, 3, batch)
        found["slot_starts"] = np.cumsum(gaps + needed) - needed
        sizes["t"] = int((gaps + needed).sum()) + 2
    elif isinstance(layout.slots, Pages):
        size = layout.slots.size or needed + 1
        each, planes = -(-needed // size) + 1, [2] if layout.slots.apart else []
        count = int(np.prod([batch, *planes, each])) + 1
        entries = rng.permutation(count)[: count - 1].reshape(batch, *planes, each)
        if layout.slots.entries == "page":
            sizes |= {"p": count, "t": size}
        else:
            entries, sizes["t"] = entries * size, count * size
        found["pages"] = entries.astype(np.int64)
    if layout.beams is not None:
        requests = -(-batch // layout.beams.count)
        found["prompts"] = rng.integers(0, keys + 2, requests)
        found["beam_of"] = rng.integers(0, layout.beams.count, (requests, layout.beams.count, keys + 1))
    if layout.is_mapped and p.kv_len is None:
        found["most_keys"] = keys
    for name, dim in ("kv", p.head_dim), ("k", p.head_dim), ("v", p.v_head_dim):
        if (name == "kv") == layout.is_joint:
            found |= _rows(p, name, sizes, dim, rng)
    return found


def _rows(
    p: AttentionProblem, name: str, sizes: dict[str, int], dim: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A buffer of the cache, and its scales."""
    codec, axes = p.layout.quantization, p.layout.axes

    def drawn(elements: int) -> np.ndarray:
        return rng.standard_normal([(sizes | {"d": elements, "e": p.kv_heads * elements})[axis] for axis in axes])

    if codec is None:
        return {name: drawn(dim).astype(p.v_dtype if name == "v" else p.dtype)}
    if codec.dtype == "int4":
        codes = (drawn(dim // 2) * 80).round().astype(np.int64).astype(np.uint8)
    else:
        codes = (drawn(dim) * 30).round().clip(-127, 127).astype(codec.dtype)
    parts = [2] if name == "kv" else []
    if codec.channels:
        scale = rng.standard_normal([*parts, p.kv_heads, dim])
    else:
        scale = drawn(dim // codec.group) if codec.group else rng.standard_normal(parts or 1)
    return {name: codes, f"{name}_scale": (abs(scale) / 30 + 1e-3).astype(codec.scale_dtype)}
