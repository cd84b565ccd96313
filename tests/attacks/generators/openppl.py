"""OpenPPL's operators for packed requests with a cache: wild starts, positions and pages, shapes that do not fit.

The float64 reference of tests/serving answers calls whose contents say what is so. What contradicts itself, or leads
outside the cache, may end in any way that harms nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import cache_attention_reference as reference
import numpy as np
from cache_attention_cases import DEFAULTS, INPUTS

from lowering.ops.openppl import DOMAINS

from ..attack import Answer, Arrays, Attack, Illegal, Unspecified, attacks, check_elements, require
from ..draw import ANY, WILD, Draw

Tensors = Mapping[str, np.ndarray]

_REFERENCES: dict[str, Any] = {
    "MultiHeadCacheAttention": reference.multi_head_cache_attention,
    "KeyValueCache": reference.key_value_cache,
    "MultiHeadAttention": reference.multi_head_attention,
}
# Attributes and their defaults; num_heads and head_dim have none.
_DEFAULTS: dict[str, dict[str, int]] = {
    operator: ({} if operator == "KeyValueCache" else {"num_heads": 0, "head_dim": 0}) | defaults
    for operator, defaults in DEFAULTS.items()
}

_FLOATS = ("float32", "float16", "bfloat16")
_KEYS = ("current_key", "current_value", "key", "value")
_ROWS = ("query", *_KEYS)
_STARTS = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
_MOST = ("max_seqlen", "max_kvlen")
_NUMBERS = ("decoding_batches", *_MOST)
_OPTIONAL = ("scale", "attn_mask")

# Axes of a cache by layout: slot of a token, layer, key or value, head, channel.
_AXES = ("plkhd", "lpkhd", "lkphd", "lkhpd")
_WILD_ATTRIBUTES = (-1, 0, 2, 3, 4, 7, 8, 2**31, 2**62, 2**63 - 1, -(2**63))
_WRONG_TYPES: tuple[Any, ...] = (1.0, "one", [1])
_NOWHERE = (-1, -7, 2**31, 2**40, *WILD)


@dataclass(frozen=True)
class _Form:
    """The properties that all calls of an attack share."""

    op: str
    attributes: dict[str, Any]
    heads: int
    kv_heads: int
    size: int
    types: dict[str, str]
    scale: str  # "absent", "stored", "empty", or "other": one that an unquantized cache does not need
    mask_rank: int  # 0 without a mask
    scalar_rank: int
    ranks: dict[str, int]  # of what is drawn with another one than it should have
    holes: frozenset[str]

    def said(self, name: str) -> Any:
        return self.attributes.get(name, _DEFAULTS[self.op][name])

    def names(self) -> list[str]:
        there = {"scale": self.scale != "absent", "attn_mask": self.mask_rank > 0}
        return [name for name in INPUTS[self.op] if there.get(name, True)]


def _attack(domain: str, d: Draw, op: str) -> Attack:
    cached, attends = op != "MultiHeadAttention", op != "KeyValueCache"
    kv_heads, group, size = d.pick((1, 1, 2, 3)), d.pick((1, 1, 2, 3)) if attends else 1, d.pick((8, 8, 16, 24, 1, 5))
    heads = kv_heads * group
    dtype = d.dtype(_FLOATS)
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
        attributes[d.pick(tuple(_DEFAULTS[op]))] = d.pick(_WILD_ATTRIBUTES)
    if d.chance(0.02):
        attributes[d.pick(tuple(_DEFAULTS[op]))] = d.pick(_WRONG_TYPES)
    names = INPUTS[op]
    types = {name: "int64" if name in (*_STARTS, *_NUMBERS) else dtype for name in names}
    types |= {"cache": "int8" if quantized else dtype, "scale": d.pick(("float32", "float16"))} if cached else {}
    if d.chance(0.05):
        types[d.pick(names)] = d.pick(("int32", "float64", *ANY))
    scale = "absent"
    if cached:
        scale = "stored" if quantized else d.pick(("absent", "absent", "empty", "other"))
    ranks = {d.pick(names): d.pick((-1, 1))} if d.chance(0.04) else {}
    holes = frozenset([d.pick(names)]) if d.chance(0.03) else frozenset[str]()
    mask_rank = d.pick((0, 0, 1, 2, 3)) if attends else 0
    form = _Form(op, attributes, heads, kv_heads, size, types, scale, mask_rank, d.int(0, 1), ranks, holes)
    outputs, lengths = _outputs(form), _lengths(d) if d.chance(0.6) else None
    return Attack(
        op,
        lambda: _feed(d, form, drawn, lengths or _lengths(d)),
        lambda *arrays: _rule(form, len(outputs), arrays),
        outputs=len(outputs),
        domain=domain,
        attributes=attributes,
        numbers=_sizes_of_the_model(form, drawn),
        close=2e-2 if types[names[0]] in ("float16", "bfloat16") else 1e-4,
        results=outputs,
    )


for _domain in DOMAINS:
    attacks(*INPUTS, domain=_domain)(partial(_attack, _domain))


def _outputs(form: _Form) -> list[tuple[str, int]]:
    """Return types and ranks: cache and scale are always outputs, so that no input is written to."""
    outputs = [(form.types[INPUTS[form.op][0]], 3)] * (2 if form.op == "KeyValueCache" else 1)
    if form.op == "MultiHeadAttention":
        return outputs
    outputs.append((form.types["cache"], 5))
    if form.scale != "absent":
        outputs.append((form.types["scale"], 1 if form.scale == "empty" else 5))
    return outputs


def _sizes_of_the_model(form: _Form, drawn: dict[str, Any]) -> list[tuple[int, int]]:
    axes = _AXES[drawn.get("cache_layout", 0)]
    static_axes: dict[str, Sequence[int]] = dict.fromkeys(_ROWS, (1, 2))
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


def _feed(d: Draw, form: _Form, drawn: dict[str, Any], lengths: _Lengths) -> Arrays:
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
    for name in _KEYS:
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
            name = d.pick([n for n in (*_STARTS, *_STARTS, *_NUMBERS) if n in tensors])
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


def _without_slots(form: _Form, drawn: dict[str, Any], tensors: Tensors, columns: bool) -> dict[str, np.ndarray]:
    """Return a cache without slots, or a table without columns."""
    if columns and drawn.get("cache_mode"):
        return {"cachestarts": tensors["cachestarts"][:, :0]}
    axis, stored = _AXES[drawn["cache_layout"]].index("p"), ("cache", "scale") if form.scale == "stored" else ("cache",)
    return {name: np.take(tensors[name], [], axis) for name in stored}


def _flatter(array: np.ndarray) -> np.ndarray:
    """Merge the first two axes, or return a number."""
    if array.ndim < 2:
        return np.array(array.ravel()[0] if array.size else 0)
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _stored(d: Draw, form: _Form, drawn: dict[str, Any], lengths: _Lengths) -> Tensors:
    """Return cachestarts, and a cache with its scales. Unread slots are NaN, or the largest quantized value."""
    keys = (lengths.past + lengths.rows).tolist()
    page = drawn["page_size"] if drawn.get("cache_mode") else 0
    starts, slots, count = _pages(d, keys, page, lengths.spare) if page else _regions(d, keys, lengths.spare)
    if lengths.is_trimmed:
        count = max((max(own) + 1 for own in slots if own), default=0)
    written = [slot for own, past in zip(slots, lengths.past.tolist()) for slot in own[:past]]
    sizes = {"p": count, "l": drawn["num_layer"], "k": 2, "h": form.kv_heads}
    axes = _AXES[drawn["cache_layout"]]
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


# -- what must come of them -------------------------------------------------------------------------------------------


def _rule(form: _Form, outputs: int, arrays: tuple[np.ndarray | None, ...]) -> Answer:
    tensors = {name: array for name, array in zip(INPUTS[form.op], arrays) if array is not None}
    missing = [name for name in INPUTS[form.op] if name not in tensors and name not in _OPTIONAL]
    require(not missing, f"no {missing}")
    rows = tensors[INPUTS[form.op][0]]
    _attributes_fit(form)
    _types_fit(form, tensors)
    _shapes_fit(form, tensors)
    _contents_fit(form, tensors)
    if (
        form.op != "MultiHeadAttention"
        and form.said("quant_bit")
        and tensors["cache"].size
        and rows.dtype == "bfloat16"
    ):
        raise Unspecified("quantized values of a type that the reference does not round to")
    if form.op == "KeyValueCache":
        check_elements([int(tensors["kvstarts"][-1]), form.kv_heads * form.said("num_repeat"), form.size])
    values = {name: x for name, x in form.attributes.items() if name in _DEFAULTS[form.op]}
    results = _REFERENCES[form.op](**{**tensors, **values})
    results = results if isinstance(results, tuple) else (results,)
    kinds = [rows.dtype, *(r.dtype for r in results[1:] if r is not None)]
    return [np.asarray(r).astype(kind) for r, kind in zip(results[:outputs], kinds)]


def _attributes_fit(form: _Form) -> None:
    wrong = [name for name, value in form.attributes.items() if not isinstance(value, int)]
    if wrong:
        raise Unspecified(f"{wrong} of another type")
    if form.op != "KeyValueCache":
        heads, kv_heads, size = form.said("num_heads"), form.said("num_kv_heads"), form.said("head_dim")
        require(heads == form.heads and size == form.size, f"{heads} heads of {size}")
        require((kv_heads or heads) == form.kv_heads, f"{kv_heads} heads of keys")
        if form.said("is_causal") not in (0, 1) or form.said("is_alibi") not in (0, 1):
            raise Unspecified("flags that are neither 0 nor 1")
    else:
        require(form.said("num_repeat") > 0, "no repeat")
    if form.op == "MultiHeadAttention":
        return
    require(0 <= form.said("layer_idx") < form.said("num_layer"), "layer_idx")
    require(form.said("quant_bit") in (0, 8), "quant_bit")
    require(form.said("cache_mode") in (0, 1), "cache_mode")
    require(form.said("cache_layout") in range(4), "cache_layout")
    require(not form.said("cache_mode") or form.said("page_size") > 0, "page_size")
    if form.said("cache_mode") and form.said("page_size") > 10**9:
        raise Unspecified("pages larger than any cache")
    group = form.said("quant_group")
    require(not form.said("quant_bit") or (group > 0 and form.size % group == 0), "quant_group")


def _types_fit(form: _Form, tensors: Tensors) -> None:
    dtype = tensors[INPUTS[form.op][0]].dtype
    require(dtype.name in _FLOATS, f"rows of {dtype}")
    for name, array in tensors.items():
        if name in _ROWS:
            require(array.dtype == dtype, f"{name} is {array.dtype} next to {dtype}")
        elif name in (*_STARTS, "decoding_batches"):
            require(array.dtype == np.int64, f"{name} is {array.dtype}")
    quantized = form.op != "MultiHeadAttention" and form.said("quant_bit")
    if "cache" in tensors:
        require(tensors["cache"].dtype == (np.int8 if quantized else dtype), "type of cache")
    if quantized:
        require("scale" in tensors, "no scale")
        require(tensors["scale"].dtype.name in ("float32", "float16"), "type of scale")
    mask = tensors.get("attn_mask")
    if mask is not None and mask.ndim > 1 and mask.size:
        require(mask.dtype.name in _FLOATS, "type of attn_mask")
    for name in ("attn_mask", *_MOST):
        expected = np.int64 if name in _MOST else dtype
        if name in tensors and tensors[name].dtype != expected:
            raise Unspecified(f"{name} is {tensors[name].dtype}")


def _shapes_fit(form: _Form, tensors: Tensors) -> None:
    starts = tensors["seqstarts"]
    require(starts.ndim == 1 and starts.size, "seqstarts")
    batch, n = starts.size - 1, tensors[INPUTS[form.op][0]].shape[0] if tensors[INPUTS[form.op][0]].ndim == 3 else -1
    own = (form.kv_heads, form.size)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (n, form.heads, form.size),
        "current_key": (n, *own),
        "current_value": (n, *own),
        "kvstarts": (batch + 1,),
        "start_pos": (batch,),
    }
    if form.op == "MultiHeadAttention":
        require(tensors["key"].ndim == 3, "key")
        shapes |= dict.fromkeys(("key", "value"), (len(tensors["key"]), *own))
    else:
        shapes |= _shapes_of_the_cache(form, tensors, batch)
    for name, shape in shapes.items():
        require(name not in tensors or tensors[name].shape == shape, f"{name} is {tensors.get(name, starts).shape}")
    if "decoding_batches" in tensors:
        require(tensors["decoding_batches"].shape in ((), (1,)), "decoding_batches")
    mask = tensors.get("attn_mask")
    if mask is not None and mask.size:
        require(mask.ndim in (2, 3), "rank of attn_mask")
        require(mask.shape[:-1] in ((n,), (form.heads, n)), f"attn_mask is {mask.shape}")
    elif mask is not None and (mask.ndim not in (1, 2, 3) or (mask.ndim > 1 and mask.shape[-1])):
        raise Unspecified("a mask without elements that has an unspecified form")
    elif mask is not None and mask.ndim > 1 and mask.shape[:-1] not in ((n,), (form.heads, n)):
        raise Unspecified("a mask without columns of other rows")
    if any(tensors[name].shape not in ((), (1,)) for name in _MOST):
        raise Unspecified("most rows or keys that are not numbers")


def _shapes_of_the_cache(form: _Form, tensors: Tensors, batch: int) -> dict[str, tuple[int, ...]]:
    cache, starts, axes = tensors["cache"], tensors["cachestarts"], _AXES[form.said("cache_layout")]
    require(cache.ndim == 5 and starts.ndim == (2 if form.said("cache_mode") else 1), "ranks of cache and cachestarts")
    count = cache.shape[axes.index("p")]
    sizes = {"p": count, "l": form.said("num_layer"), "k": 2, "h": form.kv_heads}
    slots = tuple(sizes[axis] for axis in axes[:-1])
    shapes = {"cache": (*slots, form.size), "cachestarts": (batch, *starts.shape[1:])}
    if form.said("quant_bit"):
        shapes["scale"] = (*slots, form.size // form.said("quant_group"))
    return shapes


def _contents_fit(form: _Form, tensors: Tensors) -> None:
    """Raise Illegal where inputs that give positions are wrong: runs check them."""
    seq, kv = tensors["seqstarts"].tolist(), tensors["kvstarts"].tolist()
    rows, keys = ([b - a for a, b in pairwise(starts)] for starts in (seq, kv))
    n = len(tensors[INPUTS[form.op][0]])
    if seq[0] or kv[0] or min(rows, default=0) < 0 or min(keys, default=0) < 0 or seq[-1] != n:
        raise Illegal(f"requests {seq} and {kv} of {n} rows")
    if "decoding_batches" in tensors and not 0 <= tensors["decoding_batches"].item() <= len(rows):
        raise Illegal("decoding_batches")
    if form.op == "MultiHeadAttention":
        require(kv[-1] == len(tensors["key"]), "other keys than there are")
    else:
        _slots_fit(form, tensors, rows, keys)
    mask = tensors.get("attn_mask")
    if mask is not None and mask.size and mask.shape[-1] < kv[-1]:
        raise Illegal("a mask without columns for all keys")
    if any(tensors[name].item() != max(counts, default=0) for name, counts in zip(_MOST, (rows, keys))):
        raise Unspecified("the most rows or keys are others")


def _slots_fit(form: _Form, tensors: Tensors, rows: list[int], keys: list[int]) -> None:
    past, starts = tensors["start_pos"].tolist(), tensors["cachestarts"].tolist()
    if min(past, default=0) < 0 or [p + r for p, r in zip(past, rows)] != keys:
        raise Illegal(f"start_pos {past} of {keys}")
    count = tensors["cache"].shape[_AXES[form.said("cache_layout")].index("p")]
    size = form.said("page_size") if form.said("cache_mode") else 0
    slots, new = [list[int]() for _ in keys], list[int]()
    for b, total in enumerate(keys):
        if size and -(-total // size) > len(starts[b]):
            raise Illegal("too few pages")
        require(total <= count, "more keys than slots")
        slots[b] = [starts[b][t // size] + t % size if size else starts[b] + t for t in range(total)]
        require(all(0 <= slot < count for slot in slots[b]), "slots outside of the cache")
        new += slots[b][past[b] :]
    uses = Counter(slot for own in slots for slot in own)
    require(all(uses[slot] == 1 for slot in new), "a slot of a new row that is used twice")
