"""OpenPPL's operators for packed requests with a cache: wild starts, positions and pages, shapes that do not fit.

Attributes that fit, and the contents of a cache, are drawn first; then some of them are changed. openppl_rules.py
says what must come of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowering.ops.openppl import DOMAINS
from tests.attacks.attack import Arrays, Attack, attacks
from tests.attacks.draw import ANY, WILD, Draw
from tests.attacks.generators.served.openppl_form import (
    ATTRIBUTE_DEFAULTS,
    AXES,
    FLOATS,
    KEYS,
    NUMBERS,
    ROWS,
    STARTS,
    Form,
    Tensors,
)
from tests.attacks.generators.served.openppl_rules import answer_call
from tests.serving.cache_attention.cache_attention_cases import INPUTS

_WILD_ATTRIBUTES = (-1, 0, 2, 3, 4, 7, 8, 2**31, 2**62, 2**63 - 1, -(2**63))
_WRONG_TYPES: tuple[Any, ...] = (1.0, "one", [1])
_NOWHERE = (-1, -7, 2**31, 2**40, *WILD)


def _attack(domain: str, d: Draw, op: str) -> Attack:
    cached, attends = op != "MultiHeadAttention", op != "KeyValueCache"
    kv_heads, group, size = d.pick((1, 1, 2, 3)), d.pick((1, 1, 2, 3)) if attends else 1, d.pick((8, 8, 16, 24, 1, 5))
    heads = kv_heads * group
    dtype = d.dtype(FLOATS)
    attributes: dict[str, Any] = {}
    if attends:
        attributes |= {"num_heads": heads, "head_dim": size}
        attributes |= d.choose(is_causal=d.int(0, 1), is_alibi=d.int(0, 1))
        if group > 1 or d.chance(0.5):
            attributes["num_kv_heads"] = kv_heads
    else:
        attributes |= d.choose(num_repeat=d.pick((1, 2, 3)))
    quantized, group_size = cached and d.chance(0.5), d.pick([g for g in (1, 4, 8, size) if size % g == 0])
    if cached:
        layers = d.pick((1, 2, 3))
        attributes |= {"num_layer": layers, "layer_idx": d.int(0, layers - 1), "cache_layout": d.int(0, 3)}
        attributes |= {"quant_bit": 8, "quant_group": group_size} if quantized else {}
        paged = d.chance(0.5)
        attributes |= {"cache_mode": 1, "page_size": d.pick((1, 3, 4, 16, 16, 2**20, 10**9, 2**62))} if paged else {}
    drawn = dict(attributes)
    if d.chance(0.12):
        attributes[d.pick(tuple(ATTRIBUTE_DEFAULTS[op]))] = d.pick(_WILD_ATTRIBUTES)
    if d.chance(0.02):
        attributes[d.pick(tuple(ATTRIBUTE_DEFAULTS[op]))] = d.pick(_WRONG_TYPES)
    names = INPUTS[op]
    types = {name: "int64" if name in (*STARTS, *NUMBERS) else dtype for name in names}
    types |= {"cache": "int8" if quantized else dtype, "scale": d.pick(("float32", "float16"))} if cached else {}
    if d.chance(0.05):
        types[d.pick(names)] = d.pick(("int32", "float64", *ANY))
    scale = "absent"
    if cached:
        scale = "stored" if quantized else d.pick(("absent", "absent", "empty", "other"))
    ranks = {d.pick(names): d.pick((-1, 1))} if d.chance(0.04) else {}
    holes = frozenset([d.pick(names)]) if d.chance(0.03) else frozenset[str]()
    mask_rank = d.pick((0, 0, 1, 2, 3)) if attends else 0
    form = Form(op, attributes, heads, kv_heads, size, types, scale, mask_rank, d.int(0, 1), ranks, holes)
    outputs, lengths = _outputs(form), _lengths(d) if d.chance(0.6) else None
    return Attack(
        op,
        lambda: _feed(d, form, drawn, lengths or _lengths(d)),
        lambda *arrays: answer_call(form, len(outputs), arrays),
        outputs=len(outputs),
        domain=domain,
        attributes=attributes,
        numbers=_sizes_of_the_model(form, drawn),
        close=2e-2 if types[names[0]] in ("float16", "bfloat16") else 1e-4,
        results=outputs,
    )


for _domain in DOMAINS:
    attacks(*INPUTS, domain=_domain)(partial(_attack, _domain))


def _outputs(form: Form) -> list[tuple[str, int]]:
    """Return types and ranks: cache and scale are always outputs, so that no input is written to."""
    outputs = [(form.types[INPUTS[form.op][0]], 3)] * (2 if form.op == "KeyValueCache" else 1)
    if form.op == "MultiHeadAttention":
        return outputs
    outputs.append((form.types["cache"], 5))
    if form.scale != "absent":
        outputs.append((form.types["scale"], 1 if form.scale == "empty" else 5))
    return outputs


def _sizes_of_the_model(form: Form, drawn: dict[str, Any]) -> list[tuple[int, int]]:
    axes = AXES[drawn.get("cache_layout", 0)]
    static_axes: dict[str, Sequence[int]] = dict.fromkeys(ROWS, (1, 2))
    static_axes |= {name: [k for k in range(5) if axes[k] != "p"] for name in ("cache", "scale")}
    return [(k, axis) for k, name in enumerate(INPUTS[form.op]) for axis in static_axes.get(name, ())]


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lengths:
    """The lengths that the sizes of a call follow from.

    `spare` slots and table columns belong to no request. is_trimmed: the cache ends with the last slot in use.
    """

    rows: np.ndarray
    past: np.ndarray
    spare: int
    is_trimmed: bool
    columns: int  # of a mask, more than there are keys


def _lengths(d: Draw) -> _Lengths:
    batch = 0 if d.chance(0.06) else d.int(1, 4)
    rows = [d.pick((0, 1, 1, 1, 2, 3, 5, 9, 17)) for _ in range(batch)]
    past = [d.pick((0, 0, 1, 2, 7, 16, 33)) for _ in range(batch)]
    columns = d.pick((0, 0, 1, 8)) if d.chance(0.9) else d.pick((-1, -(10**6)))
    return _Lengths(np.array(rows, np.int64), np.array(past, np.int64), d.pick((0, 0, 1, 2)), d.chance(0.2), columns)


def _feed(d: Draw, form: Form, drawn: dict[str, Any], lengths: _Lengths) -> Arrays:
    """Return the inputs in order. `drawn` are the attributes that fit."""
    rows, keys, scalar = lengths.rows, lengths.past + lengths.rows, (1,) * form.scalar_rank
    n, nk = int(rows.sum()), int(keys.sum())
    tensors: dict[str, np.ndarray] = {
        "seqstarts": np.concatenate([[0], np.cumsum(rows)]),
        "kvstarts": np.concatenate([[0], np.cumsum(keys)]),
        "start_pos": lengths.past,
        "decoding_batches": np.full(scalar, d.int(0, len(rows))),
        "max_seqlen": np.full(scalar, rows.max(initial=0)),
        "max_kvlen": np.full(scalar, keys.max(initial=0)),
        "query": d.array("float32", (n, form.heads, form.size), scale=1.0),
    }
    for name in KEYS:
        count = nk if name in ("key", "value") else n
        tensors[name] = d.array("float32", (count, form.kv_heads, form.size), scale=1.0)
    if form.op != "MultiHeadAttention":
        tensors |= _stored(d, form, drawn, lengths)
    if form.mask_rank:
        shape = (form.heads, n, max(nk + lengths.columns, 0))[3 - form.mask_rank :] if form.mask_rank > 1 else (0,)
        tensors["attn_mask"] = d.array("float32", shape, scale=1.0)
    tensors = {name: tensors[name] for name in form.names()}
    if d.chance(0.4):
        for _ in range(d.int(1, 2)):
            name = d.pick([n for n in (*STARTS, *STARTS, *NUMBERS) if n in tensors])
            tensors[name] = _corrupt(d, tensors[name])
    if form.op != "MultiHeadAttention" and d.chance(0.05):
        tensors |= _without_slots(form, drawn, tensors, d.chance(0.3))
    for name, change in form.ranks.items():
        if name in tensors:
            tensors[name] = tensors[name][None] if change > 0 else _flatter(tensors[name])
    if d.chance(0.05):
        name = d.pick(tuple(tensors))
        shape = d.corrupted(tensors[name].shape)
        tensors[name] = np.resize(tensors[name], shape) if tensors[name].size else d.array("int8", shape)
    arrays: Arrays = [None if name in form.holes else tensors.get(name) for name in INPUTS[form.op]]
    while arrays and arrays[-1] is None:
        arrays.pop()
    with np.errstate(all="ignore"):
        return [a if a is None else a.astype(form.types[name]) for name, a in zip(INPUTS[form.op], arrays)]


def _without_slots(form: Form, drawn: dict[str, Any], tensors: Tensors, columns: bool) -> dict[str, np.ndarray]:
    """Return a cache without slots, or a table without columns."""
    if columns and drawn.get("cache_mode"):
        return {"cachestarts": tensors["cachestarts"][:, :0]}
    axis, stored = AXES[drawn["cache_layout"]].index("p"), ("cache", "scale") if form.scale == "stored" else ("cache",)
    return {name: np.take(tensors[name], [], axis) for name in stored}


def _flatter(array: np.ndarray) -> np.ndarray:
    """Merge the first two axes, or return a number."""
    if array.ndim < 2:
        return np.array(array.ravel()[0] if array.size else 0)
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _stored(d: Draw, form: Form, drawn: dict[str, Any], lengths: _Lengths) -> Tensors:
    """Return cachestarts, and a cache with its scales. Unread slots are NaN, or the largest quantized value."""
    keys = (lengths.past + lengths.rows).tolist()
    page = drawn["page_size"] if drawn.get("cache_mode") else 0
    starts, slots, count = _pages(d, keys, page, lengths.spare) if page else _regions(d, keys, lengths.spare)
    if lengths.is_trimmed:
        count = max((max(own) + 1 for own in slots if own), default=0)
    written = [slot for own, past in zip(slots, lengths.past.tolist()) for slot in own[:past]]
    sizes = {"p": count, "l": drawn["num_layer"], "k": 2, "h": form.kv_heads}
    axes = AXES[drawn["cache_layout"]]
    shape = tuple(sizes[axis] for axis in axes[:-1])
    there = np.zeros((*shape, 1), bool)
    np.moveaxis(there, axes.index("p"), 0)[written] = True
    tensors = {"cachestarts": starts}
    if drawn.get("quant_bit"):
        tensors["cache"] = np.where(there, d.rng.integers(-127, 128, (*shape, form.size)), 127)
        scales = d.rng.uniform(0.2, 2.0, (*shape, form.size // drawn["quant_group"])) / 64
        return tensors | {"scale": np.where(there, scales, np.nan)}
    tensors["cache"] = np.where(there, d.array("float32", (*shape, form.size), scale=1.0), np.nan)
    other = np.zeros(0 if form.scale == "empty" else (1, 2, 1, 1, 3), np.float32)
    return tensors if form.scale == "absent" else tensors | {"scale": other}


def _regions(d: Draw, keys: list[int], spare: int) -> tuple[np.ndarray, list[list[int]], int]:
    """Return where regions begin, in any order, nowhere without keys; the slots of each; and the count of slots."""
    starts = np.array([d.pick(_NOWHERE) for _ in keys], np.int64)
    slots: list[list[int]] = [[] for _ in keys]
    end, gap = 0, d.int(0, len(keys))
    for k, b in enumerate(d.rng.permutation(len(keys)).tolist()):
        end += spare if k == gap else 0
        if keys[b]:
            starts[b], slots[b] = end, list(range(end, end + keys[b]))
            end += keys[b]
    return starts, slots, sum(keys) + spare


def _pages(d: Draw, keys: list[int], size: int, spare: int) -> tuple[np.ndarray, list[list[int]], int]:
    """Return the table of pages, in any order, nowhere after the last of each; the slots of each request; and the count
    of slots."""
    counts = [-(-count // size) for count in keys]
    width = max(counts, default=0) + spare
    table = np.array([d.pick(_NOWHERE) for _ in range(len(keys) * width)], np.int64).reshape(len(keys), width)
    room = min(size, max(keys, default=1))  # of a huge page no more is there than is used
    pages = d.rng.permutation(sum(counts)).tolist()
    first = d.int(0, spare)
    slots: list[list[int]] = []
    for b, count in enumerate(counts):
        for column in range(count):
            table[b, column] = first + pages.pop() * room
        slots.append([int(table[b, t // size]) + t % size for t in range(keys[b])])
    return table, slots, sum(counts) * room + spare


def _corrupt(d: Draw, array: np.ndarray) -> np.ndarray:
    """Corrupt an input that gives positions."""
    array = np.array(array, np.int64)
    if not array.size:
        return array
    way = d.int(0, 5)
    if way == 0:
        return array[::-1].copy() if array.ndim else -array
    if way == 1:
        return array + d.pick((-1, 1, 3, 100))
    if way == 2:
        return np.full_like(array, d.pick((0, 1, 5, *WILD)))
    if way == 3 and array.size > 1:  # their difference is not an int64
        k = d.int(0, array.size - 2)
        array.flat[k : k + 2] = d.pick((-1, min(WILD))), max(WILD)
        return array
    for _ in range(d.int(1, 2)):
        k = d.int(0, array.size - 1)
        near = min(max(int(array.flat[k]) + d.pick((-1, 1)), min(WILD)), max(WILD))
        array.flat[k] = d.pick((near, near, 0, 2**20, 2**40, *WILD))
    return array
