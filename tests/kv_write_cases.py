"""Random appends with data for them, and what they should give: for the tests of every target."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import cache_layout_cases
import ml_dtypes
import numpy as np

from lowering.attention.cache_layout import GivenRing, Offset, Pages
from lowering.attention.kv_write import Columns, KvWrite, Rotary
from lowering.attention.problem import AttentionProblem

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A KV write and the seed of one call of it. hostile: what says where things are holds any numbers."""

    record: KvWrite
    batch: int
    seed: int
    hostile: bool


def made(seed: int, calls: int) -> list[Case]:
    """One append and so many calls of it, which follow from the seed."""
    rng = random.Random(seed)
    layout = cache_layout_cases.given(rng, cache_layout_cases.layout(rng))
    if layout.quantization is not None and layout.quantization.group:
        layout = dataclasses.replace(layout, quantization=dataclasses.replace(layout.quantization, dtype="int8"))
    heads, dim = rng.randint(1, 3), rng.choice([8, 16, 24, 64])
    v_dim = dim if layout.is_joint else rng.choice([0, 8, 16, 40])
    if layout.quantization is not None and layout.quantization.channels:
        v_dim = min(v_dim, dim)
    dtype = rng.choice(["float32", "float16", "bfloat16"])
    columns, rotary = None, None
    if rng.random() < 0.5:
        first = rng.choice([0, 5])
        columns = Columns(first, first + heads * dim, first + heads * (dim + v_dim) + rng.choice([0, 3]))
    if rng.random() < 0.5:
        rotary = Rotary(rng.choice([dim, dim // 2]), rng.random() < 0.5)
    batch = rng.choice([None, None, 1, 3])
    record = KvWrite(
        batch, heads, dim, v_dim, dtype, layout, columns, columns is not None and rng.random() < 0.5, rotary
    )
    sizes = [batch if batch is not None else rng.choice([0, 1, 2, 5]) for _ in range(calls)]
    return [Case(record, size, rng.getrandbits(32), rng.random() < 0.3) for size in sizes]


def arrays(case: Case) -> Arrays:
    """The inputs by parameter name, caches among them, of random bits."""
    a, rng = case.record, np.random.default_rng(case.seed)
    counts = rng.integers(0, 6, case.batch) * (rng.random(case.batch) < 0.8)
    starts = rng.integers(0, 9, case.batch)
    keys = int(max(starts + counts, default=0)) + 1
    found = _store(case, keys, rng)
    gaps = rng.integers(0, 2, case.batch)
    firsts = np.cumsum(counts + gaps) - counts
    tokens = int((counts + gaps).sum()) + 1
    kind = np.dtype(getattr(ml_dtypes, a.dtype, a.dtype))

    def drawn(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) * np.exp(rng.normal(0, 2, shape))
        return np.where(rng.random(shape) < 0.05, 0, values).astype(kind)

    if a.columns is not None:
        found["new"] = drawn(tokens, a.columns.width)
        found["bias"] = drawn(a.columns.width)
    else:
        found |= {"new_k": drawn(tokens, a.heads, a.head_dim), "new_v": drawn(tokens, a.heads, a.v_head_dim)}
    if a.rotary is not None:
        angle = rng.uniform(-9, 9, (tokens, a.rotary.dim // 2))
        found["angles"] = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    channels = (a.heads, a.head_dim) if a.layout.quantization is not None and a.layout.quantization.channels else ()
    found["factor"] = rng.uniform(0.5, 60, (2, *channels)).astype(np.float32)
    found |= {"row_starts": firsts, "row_counts": counts, "starts": starts}
    if case.hostile:
        for name in ("row_starts", "row_counts", "starts", "slot_starts", "pages", "ring"):
            if name in found:
                wild = rng.choice([-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1, 3], found[name].shape)
                found[name] = np.where(rng.random(found[name].shape) < 0.4, wild, found[name])
    return {name: found[name].astype(np.int64) if found[name].dtype.kind == "i" and found[name].itemsize > 1
            else found[name] for name in a.inputs()}  # fmt: skip


def _store(case: Case, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    a = case.record
    problem = AttentionProblem(
        batch=None, q_len=None, kv_len=None, q_heads=a.heads, kv_heads=a.heads, head_dim=a.head_dim,
        v_head_dim=a.v_head_dim, dtype=a.dtype, v_dtype=a.dtype, acc_dtype="float32", scale=1.0, row_axes="thd",
        layout=dataclasses.replace(a.layout, beams=None), lengths=True,
    )  # fmt: skip
    found = cache_layout_cases.arrays(problem, case.batch, keys, rng)
    for name in a.caches():
        bits = rng.integers(0, 256, (*found[name].shape, found[name].itemsize), np.uint8)
        found[name] = (
            bits.view(found[name].dtype)[..., 0] if found[name].itemsize > 1 else bits[..., 0].view(found[name].dtype)
        )
    return found


def expected(case: Case, given: Arrays) -> Arrays:
    """The caches after the call."""
    a, made = case.record, {name: given[name].copy() for name in case.record.caches()}
    tokens = (given["new"] if a.columns is not None else given["new_k"]).shape[0]
    for b in range(case.batch):
        first, start = int(given["row_starts"][b]), int(given["starts"][b])
        count = max(min(int(given["row_counts"][b]), tokens - first), 0) if 0 <= first <= tokens else 0
        for i in range(count):
            for part, dim in enumerate((a.head_dim, a.v_head_dim) if a.v_head_dim else (a.head_dim,)):
                slot = _slot(case, given, b, _wrapped(start + i), part)
                if slot is not None and _stays(a, given, start, i, count):
                    rows = _row(a, given, first + i, part, dim)
                    _put(a, made, slot, part, rows, given.get("factor"))
    return made


def _wrapped(x: int) -> int:
    """The int64 that arithmetic on int64 makes of it."""
    return (x + 2**63) % 2**64 - 2**63


def _ring(a: KvWrite, given: Arrays) -> tuple[int, int, int] | None:
    ring = a.layout.ring
    if ring is None:
        return None
    sinks, first, capacity = (
        given["ring"].tolist() if isinstance(ring, GivenRing) else (ring.sinks, ring.first, ring.capacity)
    )
    return sinks, first, max(capacity, 1)


def _stays(a: KvWrite, given: Arrays, start: int, i: int, count: int) -> bool:
    ring = _ring(a, given)
    return ring is None or _wrapped(start + i) < ring[0] or i >= _wrapped(count - ring[2])


def _slot(case: Case, given: Arrays, b: int, t: int, part: int) -> dict[str, int] | None:
    """Indices by axis, or None where the slot is not in the cache."""
    a = case.record
    layout, ring = a.layout, _ring(a, given)
    name = a.caches()[0] if layout.is_joint else a.caches()[part]
    size = dict(zip(layout.axes, given[name].shape))
    if ring is not None and t >= ring[0]:
        t = _wrapped(max(_wrapped(t - ring[0]), 0) % ring[2] + ring[1])
    where = {"b": b, "t": t, "l": layout.layer, "c": part}
    if isinstance(layout.slots, Offset):
        where["t"] = _wrapped(int(given["slot_starts"][b]) + t)
    elif isinstance(layout.slots, Pages):
        pages = given["pages"][b, part] if layout.slots.apart else given["pages"][b]
        column, rest = divmod(t, layout.slots.size) if layout.slots.size is not None else (0, t)
        if not 0 <= column < len(pages):
            return None
        where |= {"p": int(pages[column]), "t": rest}
        if layout.slots.entries == "slot":
            where["t"] = _wrapped(where.pop("p") + rest)
    places = {axis: at for axis, at in where.items() if axis in size}
    return places if all(0 <= at < size[axis] for axis, at in places.items()) else None


def _row(a: KvWrite, given: Arrays, n: int, part: int, dim: int) -> np.ndarray:
    """[heads, dim] in float32, rounded to the type of the rows."""
    if a.columns is None:
        x = given[("new_k", "new_v")[part]][n].astype(np.float32)
    else:
        at = (a.columns.k, a.columns.v)[part]
        x = given["new"][n, at : at + a.heads * dim].astype(np.float32).reshape(a.heads, dim)
        if a.bias:
            x = x + given["bias"][at : at + a.heads * dim].astype(np.float32).reshape(a.heads, dim)
    if a.rotary is not None and part == 0:
        r = a.rotary.dim
        cos, sin = given["angles"][n, :, 0], given["angles"][n, :, 1]
        pairs = (slice(0, r, 2), slice(1, r, 2)) if a.rotary.interleaved else (slice(0, r // 2), slice(r // 2, r))
        one, other = x[:, pairs[0]].copy(), x[:, pairs[1]].copy()
        x[:, pairs[0]], x[:, pairs[1]] = one * cos - other * sin, other * cos + one * sin
    return x.astype(getattr(ml_dtypes, a.dtype, a.dtype))


def _put(a: KvWrite, made: Arrays, slot: dict[str, int], part: int, x: np.ndarray, factor: np.ndarray | None) -> None:
    name = "kv" if a.layout.is_joint else "kv"[part]
    codec, dim = a.layout.quantization, x.shape[1]
    if codec is None:
        _assign(a, made[name], slot, x)
    elif codec.group:
        groups = x.reshape(x.shape[0], -1, codec.group)
        scale = np.maximum(abs(groups).max(-1) / x.dtype.type(127), x.dtype.type(1e-5))
        codes = np.clip(np.rint((groups / scale[..., None]).astype(np.float32)), -127, 127).astype(np.int8)
        _assign(a, made[name], slot, codes.reshape(x.shape))
        _assign(a, made[f"{name}_scale"], slot, scale.astype(codec.scale_dtype))
    else:
        assert factor is not None
        value = x.astype(np.float32) * (factor[part, :, :dim] if codec.channels else factor[part])
        if codec.dtype == "int4":
            codes = (np.clip(np.rint(value), -8, 7) + 8).astype(np.uint8)
            _assign(a, made[name], slot, codes[:, 0::2] | codes[:, 1::2] << 4)
        elif codec.dtype == "int8":
            _assign(a, made[name], slot, np.clip(np.rint(value), -128, 127).astype(np.int8))
        else:
            _assign(a, made[name], slot, np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn))
    assert dim == x.shape[1]


def _assign(a: KvWrite, cache: np.ndarray, slot: dict[str, int], x: np.ndarray) -> None:
    """cache at that slot := x [heads, elements]."""
    index = tuple(slot.get(axis, slice(None)) for axis in a.layout.axes)
    axes = [axis for axis in a.layout.axes if axis not in slot]
    if "e" in axes:
        cache[index] = x.reshape(-1)
    else:
        cache[index] = x if axes == ["h", "d"] else x.T


def same(case: Case, found: np.ndarray, want: np.ndarray) -> bool:
    """Whether two caches are equal: bit for bit, but where rotation or bias may round the other way."""
    if found.tobytes() == want.tobytes():
        return True
    if case.record.rotary is None and not case.record.bias:
        return False
    codec = case.record.layout.quantization
    if codec is not None and codec.dtype == "int4":
        found, want = (np.stack([x & 15, x >> 4]).astype(np.int8) for x in (found, want))
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), want.astype(np.float64)
        apart = np.abs(a - b) > 0.02 * np.abs(b) + 1e-5 + (found.dtype == np.int8)
        bits = [x.view(np.uint8).reshape(*x.shape, -1) for x in (found, want)]
    return not (apart | np.isnan(a) & ~np.isnan(b))[(bits[0] != bits[1]).any(-1)].any()
