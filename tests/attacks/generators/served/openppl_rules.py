"""Whether a call of OpenPPL's operators is legal, by attributes, types, shapes and contents, and what it gives then.

The float64 reference of tests/serving answers calls whose contents say what is so. What contradicts itself, or leads
outside the cache, may end in any way that harms nobody.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from tests.attacks.attack import Answer, Illegal, Unspecified, check_elements, require
from tests.attacks.generators.served.openppl_form import (
    ATTRIBUTE_DEFAULTS,
    AXES,
    FLOATS,
    MOST,
    ROWS,
    STARTS,
    Form,
    Tensors,
)
from tests.serving.cache_attention import cache_attention_reference as reference
from tests.serving.cache_attention.cache_attention_cases import INPUTS

_REFERENCES: dict[str, Any] = {
    "MultiHeadCacheAttention": reference.multi_head_cache_attention,
    "KeyValueCache": reference.key_value_cache,
    "MultiHeadAttention": reference.multi_head_attention,
}
_OPTIONAL = ("scale", "attn_mask")


def answer_call(form: Form, outputs: int, arrays: tuple[np.ndarray | None, ...]) -> Answer:
    """Return the first `outputs` results. Raise Illegal or Unspecified where the call is."""
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
    values = {name: x for name, x in form.attributes.items() if name in ATTRIBUTE_DEFAULTS[form.op]}
    results = _REFERENCES[form.op](**{**tensors, **values})
    results = results if isinstance(results, tuple) else (results,)
    kinds = [rows.dtype, *(r.dtype for r in results[1:] if r is not None)]
    return [np.asarray(r).astype(kind) for r, kind in zip(results[:outputs], kinds)]


def _attributes_fit(form: Form) -> None:
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


def _types_fit(form: Form, tensors: Tensors) -> None:
    dtype = tensors[INPUTS[form.op][0]].dtype
    require(dtype.name in FLOATS, f"rows of {dtype}")
    for name, array in tensors.items():
        if name in ROWS:
            require(array.dtype == dtype, f"{name} is {array.dtype} next to {dtype}")
        elif name in (*STARTS, "decoding_batches"):
            require(array.dtype == np.int64, f"{name} is {array.dtype}")
    quantized = form.op != "MultiHeadAttention" and form.said("quant_bit")
    if "cache" in tensors:
        require(tensors["cache"].dtype == (np.int8 if quantized else dtype), "type of cache")
    if quantized:
        require("scale" in tensors, "no scale")
        require(tensors["scale"].dtype.name in ("float32", "float16"), "type of scale")
    mask = tensors.get("attn_mask")
    if mask is not None and mask.ndim > 1 and mask.size:
        require(mask.dtype.name in FLOATS, "type of attn_mask")
    for name in ("attn_mask", *MOST):
        expected = np.int64 if name in MOST else dtype
        if name in tensors and tensors[name].dtype != expected:
            raise Unspecified(f"{name} is {tensors[name].dtype}")


def _shapes_fit(form: Form, tensors: Tensors) -> None:
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
    if any(tensors[name].shape not in ((), (1,)) for name in MOST):
        raise Unspecified("most rows or keys that are not numbers")


def _shapes_of_the_cache(form: Form, tensors: Tensors, batch: int) -> dict[str, tuple[int, ...]]:
    cache, starts, axes = tensors["cache"], tensors["cachestarts"], AXES[form.said("cache_layout")]
    require(cache.ndim == 5 and starts.ndim == (2 if form.said("cache_mode") else 1), "ranks of cache and cachestarts")
    count = cache.shape[axes.index("p")]
    sizes = {"p": count, "l": form.said("num_layer"), "k": 2, "h": form.kv_heads}
    slots = tuple(sizes[axis] for axis in axes[:-1])
    shapes = {"cache": (*slots, form.size), "cachestarts": (batch, *starts.shape[1:])}
    if form.said("quant_bit"):
        shapes["scale"] = (*slots, form.size // form.said("quant_group"))
    return shapes


def _contents_fit(form: Form, tensors: Tensors) -> None:
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
    if any(tensors[name].item() != max(counts, default=0) for name, counts in zip(MOST, (rows, keys))):
        raise Unspecified("the most rows or keys are others")


def _slots_fit(form: Form, tensors: Tensors, rows: list[int], keys: list[int]) -> None:
    past, starts = tensors["start_pos"].tolist(), tensors["cachestarts"].tolist()
    if min(past, default=0) < 0 or [p + r for p, r in zip(past, rows)] != keys:
        raise Illegal(f"start_pos {past} of {keys}")
    count = tensors["cache"].shape[AXES[form.said("cache_layout")].index("p")]
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
