"""The semantics of an attention problem in float64 NumPy: the oracle of the tests. No kernel shares code with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .expr.evaluate import evaluate
from .record.cache_layout import CacheLayout, GivenRing, Offset, Pages, Ring
from .record.formula import Formula
from .record.problem import AttentionProblem, Mask

NamedArrays = Mapping[str, Any]
"""Arrays and numbers by the names of the problem's parameters."""


@dataclass(frozen=True)
class DenseInputs:
    """The inputs in float64 and one order, whatever their memory layout.

    q is [B, Hq, S, D], k [B, Hq, T, D] and v [B, Hq, T, Dv], with heads repeated. rows are the numbers of the S rows
    that each batch has. Slots of no batch have arbitrary values.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class ReferenceScores:
    """[B, Hq, S, T]: scaled scores, scores after soft cap and modification, the bias of masking, and the sum of both.

    The bias and the sum are -inf where a key is masked.
    """

    raw: np.ndarray
    capped: np.ndarray
    bias: np.ndarray
    masked: np.ndarray


def compute_reference(problem: AttentionProblem, **arrays: Any) -> dict[str, np.ndarray]:
    """Return the outputs by name, in float64 and in the shapes of the problem's parameters.

    Inputs have the shapes of those parameters and any real types; elements of a formula may be passed as a mask. Masked
    scores and values are dropped by selection: NaN there does not reach Y. A row whose scores are all masked or -inf
    gives 0. Ragged rows that belong to no batch are NaN.
    """
    inputs = read_dense_inputs(problem, arrays)
    s = compute_scores(problem, inputs, arrays)
    extra = np.full((problem.q_heads, 1, 1), -np.inf)  # the score of the sink
    if problem.sink:
        extra = arrays["sink"].astype(np.float64)[:, None, None]
    with np.errstate(all="ignore"):  # masked rows may have arbitrary values
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
    results = {"y": convert_to_rows(problem, y, arrays), "lse": lse, "max": top}
    if problem.is_ragged:
        results |= {name: _concatenate_rows(problem, results[name], arrays) for name in ("lse", "max")}
    if problem.qk_mode is not None:
        results["qk"] = (s.raw, s.capped, s.masked, p)[problem.qk_mode]
    return {name: results[name] for name in problem.outputs()}


def read_dense_inputs(problem: AttentionProblem, arrays: NamedArrays) -> DenseInputs:
    """Return Q, K and V, read from their memory layouts."""
    p = problem
    names = ("kv", "kv") if p.layout.is_joint else ("k", "v")
    k, v = (_read_cache(p, arrays, name, kv_index) for kv_index, name in enumerate(names))
    k, v = (np.repeat(x, p.group, axis=1) for x in (k, v))
    q = split_batches(p, "q", arrays["q"], arrays)
    return DenseInputs(q, k, v, _count_rows(p, arrays) if p.is_ragged else np.full(q.shape[0], q.shape[2]))


def split_batches(problem: AttentionProblem, name: str, x: np.ndarray, arrays: NamedArrays) -> np.ndarray:
    """Return q, y, qk or lse as [B, Hq, S, ...]; ragged rows that a batch does not have are 0."""
    if not problem.is_ragged:
        return heads_first(x, problem.row_axes, problem.q_heads) if name in ("q", "y") else x
    if name in ("q", "y"):
        x = heads_first(x[None], "b" + problem.row_axes, problem.q_heads)[0].swapaxes(0, 1)
    counts = _count_rows(problem, arrays)
    batches = np.zeros((len(counts), x.shape[1], _count_max_rows(problem, arrays), *x.shape[2:]))
    for b, count in enumerate(counts):
        first = int(arrays["row_starts"][b])
        batches[b, :, :count] = x[first : first + count].swapaxes(0, 1)
    return batches


def _count_max_rows(problem: AttentionProblem, arrays: NamedArrays) -> int:
    return int(arrays.get("most_rows", problem.q_len or 0))


def _count_rows(problem: AttentionProblem, arrays: NamedArrays) -> np.ndarray:
    """Return the number of ragged rows of each batch."""
    starts = arrays["row_starts"]
    return np.clip(starts[1:] - starts[:-1], 0, _count_max_rows(problem, arrays))


def heads_first(x: np.ndarray, axes: str, heads: int) -> np.ndarray:
    """Return an array with these axes, b among them, as [B, H, L, D], in float64."""
    x = x.astype(np.float64)
    if "e" in axes:
        axis_index = axes.index("e")
        x = x.reshape(*x.shape[:axis_index], heads, x.shape[axis_index] // heads)
        axes = axes.replace("e", "hd")
    return x.transpose([axes.index(axis) for axis in "bhtd"])


def convert_to_rows(problem: AttentionProblem, y: np.ndarray, arrays: NamedArrays) -> np.ndarray:
    """Return [B, Hq, S, D] in the layout of the rows of Q."""
    axes = problem.row_axes.replace("e", "hd")
    if problem.is_ragged:
        y = _concatenate_rows(problem, y, arrays).transpose(["thd".index(axis) for axis in axes])
    else:
        y = y.transpose(["bhtd".index(axis) for axis in axes])
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1]) if "e" in problem.row_axes else y


def _concatenate_rows(problem: AttentionProblem, x: np.ndarray, arrays: NamedArrays) -> np.ndarray:
    """Return [B, H, S, ...] as [N, H, ...], NaN where no batch has a row."""
    tokens = arrays["q"].shape[problem.row_axes.index("t")]
    rows = np.full((tokens, x.shape[1], *x.shape[3:]), np.nan)
    for b, count in enumerate(_count_rows(problem, arrays)):
        first = int(arrays["row_starts"][b])
        rows[first : first + count] = x[b, :, :count].swapaxes(0, 1)
    return rows


def _read_cache(problem: AttentionProblem, arrays: NamedArrays, name: str, kv_index: int) -> np.ndarray:
    """Return keys (kv_index 0) or values (1) of all batches, [B, Hkv, T, D] in float64.

    They are looked up slot by slot if the layout needs it.
    """
    layout, heads = problem.layout, problem.kv_heads
    x: Any = arrays[name]
    if layout.packing > 1:
        x = np.stack([x & 15, x >> 4], axis=-1).astype(np.int64).reshape(*x.shape[:-1], 2 * x.shape[-1]) - 8
    x = x.astype(np.float64)
    if layout.quantization is not None:
        scale = arrays[f"{name}_scale"].astype(np.float64)
        if layout.quantization.channels:
            scale = _reshape_channel_scales(layout, scale, kv_index)
        elif layout.quantization.group:
            scale = np.repeat(scale, layout.quantization.group, axis=-1)
        elif layout.is_joint:
            scale = scale[kv_index]
        with np.errstate(invalid="ignore", over="ignore"):
            x = x * scale
            x = x.astype(np.float16).astype(np.float64) if layout.quantization.has_rounded_scaling else x
    axes = layout.axes
    for axis, index in (("c", kv_index), ("l", layout.layer)):
        if axis in axes:
            x, axes = x.take(index, axis=axes.index(axis)), axes.replace(axis, "")
    if "e" in axes:
        x, axes = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), axes.replace("e", "hd")
    if not layout.has_lookup:
        return x.transpose([axes.index(axis) for axis in "bhtd"])
    x = x.transpose([axes.index(axis) for axis in "bpthd" if axis in axes])
    batch = len(arrays["row_starts"]) - 1 if problem.is_ragged else arrays["q"].shape[problem.row_axes.index("b")]
    keys = int(arrays.get("most_keys", problem.kv_len or 0)) if layout.is_mapped else x.shape[-3]
    dense = np.zeros((batch, heads, keys, x.shape[-1]))
    for b in range(batch):
        for j in range(keys):
            slot_indices = _find_slot(layout, arrays, batch, b, j, kv_index)
            dense[b, :, j] = x[tuple(min(max(n, 0), size - 1) for n, size in zip(slot_indices, x.shape))]
    return dense


def _reshape_channel_scales(layout: CacheLayout, scale: np.ndarray, kv_index: int) -> np.ndarray:
    """Return scales [heads, D], or of keys and values, in the shape of the buffer, with 1 for its other axes."""
    scale = scale[kv_index] if layout.is_joint else scale
    if "e" in layout.axes:
        return scale.reshape(-1)
    heads, size = scale.shape
    return scale.reshape([{"h": heads, "d": size}.get(axis, 1) for axis in layout.axes.replace("d", "")] + [size])


def _find_slot(layout: CacheLayout, arrays: NamedArrays, batch: int, b: int, j: int, kv_index: int) -> tuple[int, ...]:
    """Return the index of key j of batch b on those of the axes b, p and t that the cache has."""
    row, slot = b, j
    if layout.beams is not None:
        request, beam = divmod(b, layout.beams.count)
        columns = arrays["beam_of"].shape[2]
        source = 0 if j < arrays["prompts"][request] else arrays["beam_of"][request, beam, min(j, columns - 1)]
        row = request * layout.beams.count + min(max(int(source), 0), layout.beams.count - 1)
        row = min(row, batch - 1)
    if layout.ring is not None:
        sinks, first, capacity = _read_ring(layout.ring, arrays)
        slot = j if j < sinks else first + (j - sinks) % max(capacity, 1)
    if isinstance(layout.slots, Offset):
        return (int(arrays["slot_starts"][b]) + slot,)
    if isinstance(layout.slots, Pages):
        pages = arrays["pages"][row, kv_index] if layout.slots.apart else arrays["pages"][row]
        column, rest = divmod(slot, layout.slots.size) if layout.slots.size is not None else (0, slot)
        entry = int(pages[min(column, len(pages) - 1)])
        return (entry, rest) if layout.slots.entries == "page" else (entry + rest,)
    return row, slot


def _read_ring(ring: Ring | GivenRing, arrays: NamedArrays) -> tuple[int, int, int]:
    """Return sinks, first slot and capacity."""
    if isinstance(ring, GivenRing):
        sinks, first, capacity = map(int, arrays["ring"])
        return sinks, first, capacity
    return ring.sinks, ring.first, ring.capacity


def compute_scores(problem: AttentionProblem, inputs: DenseInputs, arrays: NamedArrays) -> ReferenceScores:
    """Return the scores of all pairs."""
    with np.errstate(all="ignore"):
        scale = float(arrays["scale"][0]) if problem.scale is None else problem.scale
        raw = scale * (inputs.q @ inputs.k.swapaxes(-1, -2))
        capped = problem.softcap * np.tanh(raw / problem.softcap) if problem.softcap else raw
        if problem.score is not None:
            point = dict(zip("bhij", np.ogrid[tuple(slice(n) for n in raw.shape)])) | {"s": capped}
            capped = np.broadcast_to(evaluate(problem.score.value, point, arrays, float_dtype="float64"), raw.shape)
        bias = _compute_bias(problem, raw.shape, inputs.rows, arrays)
        return ReferenceScores(raw, capped, bias, np.where(bias == -np.inf, -np.inf, capped + bias))


def _compute_bias(
    problem: AttentionProblem, shape: tuple[int, ...], rows: np.ndarray, arrays: NamedArrays
) -> np.ndarray:
    """Return all terms added after the soft cap, as [B, Hq, S, T]: the mask, and -inf where a key is masked."""
    batch, _, most_rows, keys = shape
    if not batch:
        return np.zeros(shape)
    i, j = np.arange(most_rows)[:, None], np.arange(keys)[None, :]
    bias = np.zeros(shape) + _compute_mask(problem, shape, rows, arrays)
    for b in range(batch):
        bias[b][:, ~find_visible_keys(problem, b, i, j, int(rows[b]), arrays)] = -np.inf
    return bias


def find_visible_keys(
    problem: AttentionProblem, b: int, i: np.ndarray, j: np.ndarray, rows: int, arrays: NamedArrays
) -> np.ndarray:
    """Return whether row i of batch b sees key j, before the mask."""
    window, lengths = problem.window, arrays.get("lengths")
    seen = (i < rows) & (j >= 0)
    if lengths is not None:
        seen = seen & (j < lengths[b])
    if window is None or (window.free and b < arrays["free_batches"]):
        return seen
    length = 0 if lengths is None else int(lengths[b])
    offset = {"zero": 0, "past": arrays.get("past", 0), "lengths": length - rows, "behind": length}
    p = i + offset[window.offset]
    if window.left is not None:
        left = max(int(arrays["lefts"][b]), 0) if window.left == "given" else window.left
        sinks = int(arrays["sink_keys"][b]) if window.sinks == "given" else window.sinks
        seen = seen & ((j >= p - left) | (j < sinks))
    if window.right is not None:
        seen = seen & (j <= p + window.right)
    return seen


def _compute_mask(
    problem: AttentionProblem, shape: tuple[int, ...], rows: np.ndarray, arrays: NamedArrays
) -> np.ndarray:
    """Return the bias of a mask, -inf where it masks; broadcasts to [B, Hq, S, T]."""
    record, keys = problem.mask, shape[3]
    if record is None:
        return np.zeros((1, 1, 1, 1))
    if isinstance(record, Formula) and "mask" not in arrays:
        return _evaluate_formula(record, shape, arrays)
    mask = arrays["mask"]
    values = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    if not isinstance(record, Mask):
        return values
    if problem.is_ragged:
        values = _split_mask_rows(values, shape, rows, arrays)
    if record.starts and not mask.shape[3]:  # as without a mask
        return np.zeros((1, 1, 1, 1))
    if record.starts:
        starts = arrays["key_starts"]
        several = values.shape[0] > 1
        values = np.concatenate(
            [_select_keys(values[b * several][None], max(int(first), 0), keys) for b, first in enumerate(starts)]
        )
    elif record.pad:
        values = _select_keys(values, 0, keys)
    return values


def _select_keys(values: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return `count` keys of a mask from `first` on; keys that it does not have are masked."""
    missing = max(0, first + count - values.shape[-1])
    return np.pad(values, [(0, 0)] * 3 + [(0, missing)], constant_values=-np.inf)[..., first : first + count]


def _split_mask_rows(values: np.ndarray, shape: tuple[int, ...], rows: np.ndarray, arrays: NamedArrays) -> np.ndarray:
    """Return [1, mh, N, mt] as [B, mh, S, mt]; a mask that is the same for all rows stays."""
    if values.shape[2] == 1:
        return values
    batches = np.zeros((shape[0], values.shape[1], shape[2], values.shape[3]))
    for b, count in enumerate(rows):
        start = int(arrays["row_starts"][b])
        batches[b, :, :count] = values[0, :, start : start + count]
    return batches


def _evaluate_formula(formula: Formula, shape: tuple[int, ...], arrays: NamedArrays) -> np.ndarray:
    """Return the elements of a formula as biases."""
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    values = evaluate(formula.value, {"b": b, "h": h, "i": i, "j": j}, arrays)
    values = np.where(values, 0.0, -np.inf) if values.dtype == bool else values.astype(np.float64)
    return np.broadcast_to(np.where(j >= arrays.get("mask_keys", shape[3]), -np.inf, values), shape)
