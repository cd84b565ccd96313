"""What an attention problem means, in float64 NumPy: the oracle of the tests. No kernel shares code with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cache_layout import CacheLayout, GivenRing, Offset, Pages, Ring
from .expr.evaluate import evaluate
from .formula import Formula
from .problem import AttentionProblem, Mask

Given = Mapping[str, Any]
"""Arrays and numbers by the names of the problem's parameters."""


@dataclass(frozen=True)
class Dense:
    """The inputs in float64 and one order, whatever the memory looks like: q [B, Hq, S, D], k [B, Hq, T, D] and v
    [B, Hq, T, Dv], with heads repeated, and how many of the S rows each batch has. Slots that no batch has hold
    anything."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class Scores:
    """[B, Hq, S, T]: scaled scores, those after soft cap and change, what masking adds, and their sum, -inf where
    hidden."""

    raw: np.ndarray
    capped: np.ndarray
    bias: np.ndarray
    masked: np.ndarray


def reference(problem: AttentionProblem, **given: Any) -> dict[str, np.ndarray]:
    """The outputs by name, in float64 and in the shapes of the problem's parameters.

    Inputs have the shapes of those parameters and any real types; elements of a formula may be given as a mask. Masked
    scores and values are dropped by selection: NaN there does not reach Y. A row whose scores are all masked or -inf
    gives 0. Of packed rows, those of no batch are NaN.
    """
    inputs = dense(problem, given)
    s = scores(problem, inputs, given)
    extra = np.full((problem.q_heads, 1, 1), -np.inf)  # the score of the sink
    if problem.sink:
        extra = given["sink"].astype(np.float64)[:, None, None]
    with np.errstate(all="ignore"):  # masked rows may hold anything
        m = np.maximum(s.masked.max(axis=-1, keepdims=True, initial=-np.inf), extra)
        m = np.where(m == -np.inf, 0, m)
        p = np.exp(s.masked - m)
        l = p.sum(axis=-1, keepdims=True) + np.exp(extra - m)
        p = np.where(l == 0, 0, p / l)
        # One term per key, as 0 * NaN = NaN would corrupt a matmul.
        y = np.zeros((*s.raw.shape[:-1], inputs.v.shape[-1]))
        for j in range(inputs.v.shape[2]):
            term = p[..., j, None] * inputs.v[:, :, None, j, :]
            y += np.where((s.bias[..., j, None] == -np.inf) | (l == 0), 0, term)
        sinks = np.broadcast_to(extra, (*s.masked.shape[:-1], 1))
        lse = np.logaddexp.reduce(np.concatenate([s.masked, sinks], axis=-1), axis=-1)
    top = np.maximum(s.masked.max(axis=-1, initial=-np.inf), extra[..., 0])
    found = {"y": as_rows(problem, y, given), "lse": lse, "max": top}
    if problem.packed:
        found |= {name: _packed(problem, found[name], given) for name in ("lse", "max")}
    if problem.qk_mode is not None:
        found["qk"] = (s.raw, s.capped, s.masked, p)[problem.qk_mode]
    return {name: found[name] for name in problem.outputs()}


def dense(problem: AttentionProblem, given: Given) -> Dense:
    """Q, K and V out of whatever they lie in."""
    p = problem
    names = ("kv", "kv") if p.layout.joint else ("k", "v")
    k, v = (_stored(p, given, name, part) for part, name in enumerate(names))
    k, v = (np.repeat(x, p.group, axis=1) for x in (k, v))
    q = by_batch(p, "q", given["q"], given)
    return Dense(q, k, v, _row_counts(p, given) if p.packed else np.full(q.shape[0], q.shape[2]))


def by_batch(problem: AttentionProblem, name: str, x: np.ndarray, given: Given) -> np.ndarray:
    """q, y, qk or lse as [B, Hq, S, ...]; packed rows that a batch does not have are 0."""
    if not problem.packed:
        return heads_first(x, problem.row_axes, problem.q_heads) if name in ("q", "y") else x
    if name in ("q", "y"):
        x = heads_first(x[None], "b" + problem.row_axes, problem.q_heads)[0].swapaxes(0, 1)
    counts = _row_counts(problem, given)
    found = np.zeros((len(counts), x.shape[1], _most_rows(problem, given), *x.shape[2:]))
    for b, count in enumerate(counts):
        first = int(given["row_starts"][b])
        found[b, :, :count] = x[first : first + count].swapaxes(0, 1)
    return found


def _most_rows(problem: AttentionProblem, given: Given) -> int:
    return int(given.get("most_rows", problem.q_len or 0))


def _row_counts(problem: AttentionProblem, given: Given) -> np.ndarray:
    """How many packed rows each batch has."""
    starts = given["row_starts"]
    return np.clip(starts[1:] - starts[:-1], 0, _most_rows(problem, given))


def heads_first(x: np.ndarray, axes: str, heads: int) -> np.ndarray:
    """An array with these axes, b among them, as [B, H, L, D], in float64."""
    x = x.astype(np.float64)
    if "e" in axes:
        at = axes.index("e")
        x = x.reshape(*x.shape[:at], heads, x.shape[at] // heads)
        axes = axes.replace("e", "hd")
    return x.transpose([axes.index(axis) for axis in "bhtd"])


def as_rows(problem: AttentionProblem, y: np.ndarray, given: Given) -> np.ndarray:
    """[B, Hq, S, D] in the form of the rows of Q."""
    axes = problem.row_axes.replace("e", "hd")
    if problem.packed:
        y = _packed(problem, y, given).transpose(["thd".index(axis) for axis in axes])
    else:
        y = y.transpose(["bhtd".index(axis) for axis in axes])
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1]) if "e" in problem.row_axes else y


def _packed(problem: AttentionProblem, x: np.ndarray, given: Given) -> np.ndarray:
    """[B, H, S, ...] as [N, H, ...], NaN where no batch has a row."""
    tokens = given["q"].shape[problem.row_axes.index("t")]
    found = np.full((tokens, x.shape[1], *x.shape[3:]), np.nan)
    for b, count in enumerate(_row_counts(problem, given)):
        first = int(given["row_starts"][b])
        found[first : first + count] = x[b, :, :count].swapaxes(0, 1)
    return found


def _stored(problem: AttentionProblem, given: Given, name: str, part: int) -> np.ndarray:
    """Keys (part 0) or values (1) of all batches, [B, Hkv, T, D] in float64: looked up slot by slot if need be."""
    layout, heads = problem.layout, problem.kv_heads
    x: Any = given[name]
    if layout.packing > 1:
        x = np.stack([x & 15, x >> 4], axis=-1).astype(np.int64).reshape(*x.shape[:-1], 2 * x.shape[-1]) - 8
    x = x.astype(np.float64)
    if layout.codec is not None:
        scale = given[f"{name}_scale"].astype(np.float64)
        if layout.codec.channels:
            scale = _by_channel(layout, scale, part)
        elif layout.codec.group:
            scale = np.repeat(scale, layout.codec.group, axis=-1)
        elif layout.joint:
            scale = scale[part]
        with np.errstate(invalid="ignore", over="ignore"):
            x = x * scale
            x = x.astype(np.float16).astype(np.float64) if layout.codec.rounds else x
    axes = layout.axes
    for axis, index in (("c", part), ("l", layout.layer)):
        if axis in axes:
            x, axes = x.take(index, axis=axes.index(axis)), axes.replace(axis, "")
    if "e" in axes:
        x, axes = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), axes.replace("e", "hd")
    if not layout.looked_up:
        return x.transpose([axes.index(axis) for axis in "bhtd"])
    x = x.transpose([axes.index(axis) for axis in "bpthd" if axis in axes])
    batch = len(given["row_starts"]) - 1 if problem.packed else given["q"].shape[problem.row_axes.index("b")]
    keys = int(given.get("most_keys", problem.kv_len or 0)) if layout.mapped else x.shape[-3]
    found = np.zeros((batch, heads, keys, x.shape[-1]))
    for b in range(batch):
        for j in range(keys):
            place = _place(layout, given, batch, b, j, part)
            found[b, :, j] = x[tuple(min(max(n, 0), size - 1) for n, size in zip(place, x.shape))]
    return found


def _by_channel(layout: CacheLayout, scale: np.ndarray, part: int) -> np.ndarray:
    """Scales [heads, D], or of both parts, in the shape of the buffer, with 1 for its other axes."""
    scale = scale[part] if layout.joint else scale
    if "e" in layout.axes:
        return scale.reshape(-1)
    heads, size = scale.shape
    return scale.reshape([{"h": heads, "d": size}.get(axis, 1) for axis in layout.axes.replace("d", "")] + [size])


def _place(layout: CacheLayout, given: Given, batch: int, b: int, j: int, part: int) -> tuple[int, ...]:
    """Where key j of batch b of so many is on the axes b, p and t, of which the cache has some."""
    row, slot = b, j
    if layout.beams is not None:
        request, beam = divmod(b, layout.beams.count)
        columns = given["beam_of"].shape[2]
        source = 0 if j < given["prompts"][request] else given["beam_of"][request, beam, min(j, columns - 1)]
        row = request * layout.beams.count + min(max(int(source), 0), layout.beams.count - 1)
        row = min(row, batch - 1)
    if layout.ring is not None:
        sinks, first, capacity = _ring(layout.ring, given)
        slot = j if j < sinks else first + (j - sinks) % max(capacity, 1)
    if isinstance(layout.slots, Offset):
        return (int(given["slot_starts"][b]) + slot,)
    if isinstance(layout.slots, Pages):
        pages = given["pages"][row, part] if layout.slots.apart else given["pages"][row]
        column, rest = divmod(slot, layout.slots.size) if layout.slots.size is not None else (0, slot)
        entry = int(pages[min(column, len(pages) - 1)])
        return (entry, rest) if layout.slots.entries == "page" else (entry + rest,)
    return row, slot


def _ring(ring: Ring | GivenRing, given: Given) -> tuple[int, int, int]:
    """Sinks, first slot and capacity."""
    if isinstance(ring, GivenRing):
        sinks, first, capacity = map(int, given["ring"])
        return sinks, first, capacity
    return ring.sinks, ring.first, ring.capacity


def scores(problem: AttentionProblem, inputs: Dense, given: Given) -> Scores:
    """The scores of all pairs."""
    with np.errstate(all="ignore"):
        scale = float(given["scale"][0]) if problem.scale is None else problem.scale
        raw = scale * (inputs.q @ inputs.k.swapaxes(-1, -2))
        capped = problem.softcap * np.tanh(raw / problem.softcap) if problem.softcap else raw
        if problem.score is not None:
            point = dict(zip("bhij", np.ogrid[tuple(slice(n) for n in raw.shape)])) | {"s": capped}
            capped = np.broadcast_to(evaluate(problem.score.value, point, given, exact="float64"), raw.shape)
        bias = _bias(problem, raw.shape, inputs.rows, given)
        return Scores(raw, capped, bias, np.where(bias == -np.inf, -np.inf, capped + bias))


def _bias(problem: AttentionProblem, shape: tuple[int, ...], rows: np.ndarray, given: Given) -> np.ndarray:
    """Everything that is added after the soft cap, as [B, Hq, S, T]: the mask, and -inf where a key is hidden."""
    batch, _, most_rows, keys = shape
    if not batch:
        return np.zeros(shape)
    i, j = np.arange(most_rows)[:, None], np.arange(keys)[None, :]
    bias = np.zeros(shape) + _mask(problem, shape, rows, given)
    for b in range(batch):
        bias[b][:, ~sees(problem, b, i, j, int(rows[b]), given)] = -np.inf
    return bias


def sees(problem: AttentionProblem, b: int, i: np.ndarray, j: np.ndarray, rows: int, given: Given) -> np.ndarray:
    """Whether row i of batch b sees key j, before the mask."""
    window, lengths = problem.window, given.get("lengths")
    seen = (i < rows) & (j >= 0)
    if lengths is not None:
        seen = seen & (j < lengths[b])
    if window is None or (window.free and b < given["free_batches"]):
        return seen
    behind = 0 if lengths is None else int(lengths[b])
    offset = {"zero": 0, "past": given.get("past", 0), "lengths": behind - rows, "behind": behind}
    p = i + offset[window.offset]
    if window.left is not None:
        left = max(int(given["lefts"][b]), 0) if window.left == "given" else window.left
        sinks = int(given["sink_keys"][b]) if window.sinks == "given" else window.sinks
        seen = seen & ((j >= p - left) | (j < sinks))
    if window.right is not None:
        seen = seen & (j <= p + window.right)
    return seen


def _mask(problem: AttentionProblem, shape: tuple[int, ...], rows: np.ndarray, given: Given) -> np.ndarray:
    """What a mask adds, -inf where it hides; broadcasts to [B, Hq, S, T]."""
    record, keys = problem.mask, shape[3]
    if record is None:
        return np.zeros((1, 1, 1, 1))
    if isinstance(record, Formula) and "mask" not in given:
        return _elements(record, shape, given)
    mask = given["mask"]
    values = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    if not isinstance(record, Mask):
        return values
    if problem.packed:
        values = _mask_of_packed_rows(values, shape, rows, given)
    if record.starts:
        starts = given["key_starts"]
        several = values.shape[0] > 1
        values = np.concatenate(
            [_keys(values[b * several][None], max(int(first), 0), keys) for b, first in enumerate(starts)]
        )
    elif record.pad:
        values = _keys(values, 0, keys)
    return values


def _keys(values: np.ndarray, first: int, count: int) -> np.ndarray:
    """So many keys of a mask from `first` on, those that it has not hidden."""
    missing = max(0, first + count - values.shape[-1])
    return np.pad(values, [(0, 0)] * 3 + [(0, missing)], constant_values=-np.inf)[..., first : first + count]


def _mask_of_packed_rows(values: np.ndarray, shape: tuple[int, ...], rows: np.ndarray, given: Given) -> np.ndarray:
    """[1, mh, N, mt] as [B, mh, S, mt]; a mask that is the same for all rows stays."""
    if values.shape[2] == 1:
        return values
    found = np.zeros((shape[0], values.shape[1], shape[2], values.shape[3]))
    for b, count in enumerate(rows):
        start = int(given["row_starts"][b])
        found[b, :, :count] = values[0, :, start : start + count]
    return found


def _elements(formula: Formula, shape: tuple[int, ...], given: Given) -> np.ndarray:
    """The elements of a formula as what is added."""
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    values = evaluate(formula.value, {"b": b, "h": h, "i": i, "j": j}, given)
    values = np.where(values, 0.0, -np.inf) if values.dtype == bool else values.astype(np.float64)
    return np.broadcast_to(np.where(j >= given.get("mask_keys", shape[3]), -np.inf, values), shape)
