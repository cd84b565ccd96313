"""Random KV writes with data for them and the expected caches: for the tests of every target."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lowering.attention.kv_write import Columns, KvWrite, Rotary
from lowering.attention.record.cache_layout import GivenRing, Offset, Pages
from lowering.attention.record.problem import AttentionProblem
from tests.cases import cache_layout_cases

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A KV write and the seed of one call of it. If hostile, offsets, counts and page numbers may be any numbers."""

    record: KvWrite
    batch: int
    seed: int
    hostile: bool


def draw_cases(seed: int, calls: int) -> list[Case]:
    """Draw one KV write and `calls` calls of it from the seed."""
    rng = random.Random(seed)
    layout = cache_layout_cases.make_dynamic(rng, cache_layout_cases.layout(rng))
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
    """Draw the inputs by parameter name, caches among them, of random bits."""
    a, rng = case.record, np.random.default_rng(case.seed)
    counts = rng.integers(0, 6, case.batch) * (rng.random(case.batch) < 0.8)
    starts = rng.integers(0, 9, case.batch)
    keys = int(max(starts + counts, default=0)) + 1
    inputs = _draw_caches(case, keys, rng)
    gaps = rng.integers(0, 2, case.batch)
    firsts = np.cumsum(counts + gaps) - counts
    tokens = int((counts + gaps).sum()) + 1
    kind = np.dtype(getattr(ml_dtypes, a.dtype, a.dtype))

    def draw(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) * np.exp(rng.normal(0, 2, shape))
        return np.where(rng.random(shape) < 0.05, 0, values).astype(kind)

    if a.columns is not None:
        inputs["new"] = draw(tokens, a.columns.width)
        inputs["bias"] = draw(a.columns.width)
    else:
        inputs |= {"new_k": draw(tokens, a.heads, a.head_dim), "new_v": draw(tokens, a.heads, a.v_head_dim)}
    if a.rotary is not None:
        angle = rng.uniform(-9, 9, (tokens, a.rotary.dim // 2))
        inputs["angles"] = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    channels = (a.heads, a.head_dim) if a.layout.quantization is not None and a.layout.quantization.channels else ()
    inputs["factor"] = rng.uniform(0.5, 60, (2, *channels)).astype(np.float32)
    inputs |= {"row_starts": firsts, "row_counts": counts, "starts": starts}
    if case.hostile:
        for name in ("row_starts", "row_counts", "starts", "slot_starts", "pages", "ring"):
            if name in inputs:
                wild = rng.choice([-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1, 3], inputs[name].shape)
                inputs[name] = np.where(rng.random(inputs[name].shape) < 0.4, wild, inputs[name])
    return {name: inputs[name].astype(np.int64) if inputs[name].dtype.kind == "i" and inputs[name].itemsize > 1
            else inputs[name] for name in a.inputs()}  # fmt: skip


def _draw_caches(case: Case, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    a = case.record
    problem = AttentionProblem(
        batch=None, q_len=None, kv_len=None, q_heads=a.heads, kv_heads=a.heads, head_dim=a.head_dim,
        v_head_dim=a.v_head_dim, dtype=a.dtype, v_dtype=a.dtype, acc_dtype="float32", scale=1.0, row_axes="thd",
        layout=dataclasses.replace(a.layout, beams=None), lengths=True,
    )  # fmt: skip
    inputs = cache_layout_cases.arrays(problem, case.batch, keys, rng)
    for name in a.caches():
        bits = rng.integers(0, 256, (*inputs[name].shape, inputs[name].itemsize), np.uint8)
        inputs[name] = (
            bits.view(inputs[name].dtype)[..., 0]
            if inputs[name].itemsize > 1
            else bits[..., 0].view(inputs[name].dtype)
        )
    return inputs


def expected(case: Case, inputs: Arrays) -> Arrays:
    """Return the caches after the call."""
    a, caches = case.record, {name: inputs[name].copy() for name in case.record.caches()}
    tokens = (inputs["new"] if a.columns is not None else inputs["new_k"]).shape[0]
    for b in range(case.batch):
        first, start = int(inputs["row_starts"][b]), _saturate(inputs["starts"][b])
        count = max(min(int(inputs["row_counts"][b]), tokens - first), 0) if 0 <= first <= tokens else 0
        for i in range(count):
            for plane, dim in enumerate((a.head_dim, a.v_head_dim) if a.v_head_dim else (a.head_dim,)):
                slot = _slot(case, inputs, b, start + i, plane)
                if slot is not None and _is_written(a, inputs, start, i, count):
                    rows = _row(a, inputs, first + i, plane, dim)
                    _write(a, caches, slot, plane, rows, inputs.get("factor"))
    return caches


def _saturate(x: int) -> int:
    """Return a number of a table as slots are computed from it: sums of them do not overflow."""
    return max(-(2**60), min(int(x), 2**60))


def _ring(a: KvWrite, inputs: Arrays) -> tuple[int, int, int] | None:
    ring = a.layout.ring
    if ring is None:
        return None
    sinks, first, capacity = (
        map(_saturate, inputs["ring"]) if isinstance(ring, GivenRing) else (ring.sinks, ring.first, ring.capacity)
    )
    return sinks, first, max(capacity, 1)


def _is_written(a: KvWrite, inputs: Arrays, start: int, i: int, count: int) -> bool:
    ring = _ring(a, inputs)
    return ring is None or start + i < ring[0] or i >= count - ring[2]


def _slot(case: Case, inputs: Arrays, b: int, t: int, plane: int) -> dict[str, int] | None:
    """Return indices by axis, or None where the slot is not in the cache."""
    a = case.record
    layout, ring = a.layout, _ring(a, inputs)
    name = a.caches()[0] if layout.is_joint else a.caches()[plane]
    size = dict(zip(layout.axes, inputs[name].shape))
    if ring is not None and t >= ring[0]:
        t = max(t - ring[0], 0) % ring[2] + ring[1]
    where = {"b": b, "t": t, "l": layout.layer, "c": plane}
    if isinstance(layout.slots, Offset):
        where["t"] = _saturate(inputs["slot_starts"][b]) + t
    elif isinstance(layout.slots, Pages):
        pages = inputs["pages"][b, plane] if layout.slots.apart else inputs["pages"][b]
        column, rest = divmod(t, layout.slots.size) if layout.slots.size is not None else (0, t)
        if not 0 <= column < len(pages):
            return None
        where |= {"p": _saturate(pages[column]), "t": rest}
        if layout.slots.entries == "slot":
            where["t"] = where.pop("p") + rest
    indices = {axis: at for axis, at in where.items() if axis in size}
    return indices if all(0 <= at < size[axis] for axis, at in indices.items()) else None


def _row(a: KvWrite, inputs: Arrays, n: int, plane: int, dim: int) -> np.ndarray:
    """Return row n, [heads, dim] in float32, rounded to the type of the rows."""
    if a.columns is None:
        x = inputs[("new_k", "new_v")[plane]][n].astype(np.float32)
    else:
        at = (a.columns.k, a.columns.v)[plane]
        x = inputs["new"][n, at : at + a.heads * dim].astype(np.float32).reshape(a.heads, dim)
        if a.bias:
            x = x + inputs["bias"][at : at + a.heads * dim].astype(np.float32).reshape(a.heads, dim)
    if a.rotary is not None and plane == 0:
        r = a.rotary.dim
        cos, sin = inputs["angles"][n, :, 0], inputs["angles"][n, :, 1]
        pairs = (slice(0, r, 2), slice(1, r, 2)) if a.rotary.interleaved else (slice(0, r // 2), slice(r // 2, r))
        even, odd = x[:, pairs[0]].copy(), x[:, pairs[1]].copy()
        x[:, pairs[0]], x[:, pairs[1]] = even * cos - odd * sin, odd * cos + even * sin
    return x.astype(getattr(ml_dtypes, a.dtype, a.dtype))


def _write(
    a: KvWrite, caches: Arrays, slot: dict[str, int], plane: int, x: np.ndarray, factor: np.ndarray | None
) -> None:
    name = "kv" if a.layout.is_joint else "kv"[plane]
    quantization, dim = a.layout.quantization, x.shape[1]
    if quantization is None:
        _assign(a, caches[name], slot, x)
    elif quantization.group:
        groups = x.reshape(x.shape[0], -1, quantization.group)
        scale = np.maximum(abs(groups).max(-1) / x.dtype.type(127), x.dtype.type(1e-5))
        quantized = np.clip(np.rint((groups / scale[..., None]).astype(np.float32)), -127, 127).astype(np.int8)
        _assign(a, caches[name], slot, quantized.reshape(x.shape))
        _assign(a, caches[f"{name}_scale"], slot, scale.astype(quantization.scale_dtype))
    else:
        assert factor is not None
        value = x.astype(np.float32) * (factor[plane, :, :dim] if quantization.channels else factor[plane])
        if quantization.dtype == "int4":
            quantized = (np.clip(np.rint(value), -8, 7) + 8).astype(np.uint8)
            _assign(a, caches[name], slot, quantized[:, 0::2] | quantized[:, 1::2] << 4)
        elif quantization.dtype == "int8":
            _assign(a, caches[name], slot, np.clip(np.rint(value), -128, 127).astype(np.int8))
        else:
            _assign(a, caches[name], slot, np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn))
    assert dim == x.shape[1]


def _assign(a: KvWrite, cache: np.ndarray, slot: dict[str, int], x: np.ndarray) -> None:
    """Assign x [heads, elements] to a slot of the cache."""
    index = tuple(slot.get(axis, slice(None)) for axis in a.layout.axes)
    axes = [axis for axis in a.layout.axes if axis not in slot]
    if "e" in axes:
        cache[index] = x.reshape(-1)
    else:
        cache[index] = x if axes == ["h", "d"] else x.T


def are_equal(case: Case, actual: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether two caches are equal: bit for bit, unless rotation or bias may round the other way."""
    if actual.tobytes() == expected.tobytes():
        return True
    if case.record.rotary is None and not case.record.bias:
        return False
    quantization = case.record.layout.quantization
    if quantization is not None and quantization.dtype == "int4":
        actual, expected = (np.stack([x & 15, x >> 4]).astype(np.int8) for x in (actual, expected))
    with np.errstate(all="ignore"):
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        apart = np.abs(a - b) > 0.02 * np.abs(b) + 1e-5 + (actual.dtype == np.int8)
        bits = [x.view(np.uint8).reshape(*x.shape, -1) for x in (actual, expected)]
    return not (apart | np.isnan(a) & ~np.isnan(b))[(bits[0] != bits[1]).any(-1)].any()
