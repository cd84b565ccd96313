"""Whether a call of GptAttention is legal: attributes, types, shapes and tables, by the operator's own page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.attacks.attack import Illegal, Unspecified, require
from tests.attacks.generators.served.gpt_form import (
    AT_TIMES,
    BY_REQUEST,
    ENUMERATIONS,
    FLAGS,
    FLOAT,
    FLOATS,
    LEAST,
    SCALES,
    TYPES,
    Form,
    Tensors,
)
from tests.serving.gpt_attention.gpt_cache_reference import FP8_MODE, INT8_MODE

# More than these may or may not be too many.
_MOST_RANKS, _MOST_SPLITS = 64, 256


def _active(form: Form) -> bool:
    """Return whether anything is rotated."""
    return form.said("position_embedding_type") in (1, 2, 3, 8) and form.said("rotary_embedding_dim") != 0


def _scaling(form: Form) -> int:
    return {3: 3, 8: 5}.get(form.said("position_embedding_type"), form.said("rotary_embedding_scale_type"))


def _masked(tensors: Tensors) -> bool:
    return "attention_mask" in tensors or "attention_packed_mask" in tensors


def attributes_fit(form: Form) -> None:
    for name, value in form.attributes.items():
        kind: type = str if name == "rope_scaling_config" else float if name in FLOAT else int
        if kind is not str and isinstance(value, (int, float)) and not isinstance(value, kind):
            raise Unspecified(f"{name} is a number of another type")
        if not isinstance(value, kind) and name.startswith(("rotary_", "rope_")) and not _active(form):
            raise Unspecified(f"{name} of another type, which nobody reads")
        require(isinstance(value, kind), f"{name} of another type")
    for name in ("num_heads", "hidden_size_per_head"):
        require(name in form.attributes, f"no {name}")
    for name in FLAGS:
        require(form.said(name) in (0, 1), name)
    for name, values in ENUMERATIONS.items():
        require(form.said(name) in values, name)
    for name, least in LEAST.items():
        if name in form.attributes and name not in AT_TIMES:
            require(form.said(name) >= least, name)
    heads, kv_heads, size = form.said("num_heads"), form.said("num_kv_heads"), form.said("hidden_size_per_head")
    require(not kv_heads or (kv_heads > 0 and heads % kv_heads == 0), f"{kv_heads} heads of keys for {heads}")
    require(form.said("tp_rank") < form.said("tp_size"), "tp_rank")
    require(form.said("q_scaling") > 0 and math.isfinite(form.said("q_scaling")), "q_scaling")
    softcap = form.said("attn_logit_softcapping_scale")
    require(softcap >= 0 and math.isfinite(softcap), "softcap")
    mode = form.said("kv_cache_quant_mode")
    require(mode & (INT8_MODE | FP8_MODE) != INT8_MODE | FP8_MODE, "both modes")
    require(not form.said("use_fp8_context_fmha") or mode & FP8_MODE, "use_fp8_context_fmha")
    if form.said("mask_type") == 5:
        for name in (n for n in AT_TIMES if n.startswith("block_")):
            require(form.said(name) >= LEAST[name], name)
    if _active(form):
        dim = form.said("rotary_embedding_dim")
        require(0 < dim <= size and dim % 2 == 0, f"rotary_embedding_dim {dim}")
        _config(form)


def _config(form: Form) -> dict[str, Any]:
    text = form.said("rope_scaling_config")
    try:
        config = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Illegal("rope_scaling_config")
    return config


def types_fit(form: Form, tensors: Tensors) -> None:
    require("qkv" in tensors and tensors["qkv"].dtype.name in FLOATS, "type of qkv")
    dtype = tensors["qkv"].dtype
    for name in _used(form, tensors):
        kinds: Sequence[str] = TYPES.get(name, (dtype.name,))
        if name == "relative_attention_bias":
            kinds = (dtype.name, "float32")
        if name == "past_key_value":
            mode = form.said("kv_cache_quant_mode")
            kinds = ("int8",) if mode & INT8_MODE else ("float8_e4m3fn",) if mode & FP8_MODE else kinds
        require(tensors[name].dtype.name in kinds, f"{name} is {tensors[name].dtype}")


def _used(form: Form, tensors: Tensors) -> list[str]:
    """Return the names of the inputs that mean something with these attributes and inputs."""
    unused: set[str] = set()
    if not form.said("use_cache"):
        unused |= {"past_key_value", "sequence_length", "kv_cache_block_offsets", "host_kv_cache_pool_mapping"}
        unused |= {"cache_indirection"}
    if "kv_cache_block_offsets" not in tensors:
        unused.add("host_kv_cache_pool_mapping")
    if not form.said("use_cache") or not form.said("kv_cache_quant_mode") & (INT8_MODE | FP8_MODE):
        unused |= set(SCALES)
    if not form.said("do_cross_attention"):
        unused |= {"cross_kv", "encoder_input_lengths"}
    if form.said("position_embedding_type") not in (4, 5):
        unused.add("alibi_slopes")
    for prefix in ("", "long_rope_"):
        if not _active(form) or (prefix and _scaling(form) != 3):
            unused |= {f"{prefix}rotary_inv_freq", f"{prefix}rotary_cos_sin"}
        elif f"{prefix}rotary_cos_sin" in tensors:
            unused.add(f"{prefix}rotary_inv_freq")
    return [name for name in tensors if name not in unused]


def shapes_fit(form: Form, tensors: Tensors) -> None:
    """Raise Illegal for missing inputs and for shapes that no contents fit."""
    cached, cross, used = form.said("use_cache"), form.said("do_cross_attention"), _used(form, tensors)
    needed = ["context_lengths"]
    needed += ["past_key_value", "sequence_length", *BY_REQUEST[1:3]] if cached else []
    needed += ["encoder_input_lengths"] if cross else []
    needed += SCALES if cached and form.said("kv_cache_quant_mode") & (INT8_MODE | FP8_MODE) else ()
    missing = [name for name in needed if name not in tensors]
    require(not missing, f"no {missing}")
    require(form.said("mask_type") != 6 or _masked(tensors), "custom_mask without a mask")
    heads, size, qkv = form.said("num_heads"), form.said("hidden_size_per_head"), tensors["qkv"]
    kv_heads = form.said("num_kv_heads") or heads
    width = (heads + 2 * kv_heads) * size
    require(qkv.ndim in (2, 3) and qkv.shape[-1] in (width, *([heads * size] if cross else [])), f"qkv {qkv.shape}")
    rows, requests = int(np.prod(qkv.shape[:-1])), tensors["context_lengths"].size
    beams = 1
    if "cache_indirection" in used:
        require(tensors["cache_indirection"].ndim == 3 and tensors["cache_indirection"].shape[1], "beams")
        beams = tensors["cache_indirection"].shape[1]
    require(not form.said("streamingllm") or (beams == 1 and not cross), "streamingllm")
    require(qkv.ndim == 2 or len(qkv) in (requests, requests * beams), f"qkv {qkv.shape} of {requests} requests")
    shapes: dict[str, Sequence[int | None]] = dict.fromkeys((*BY_REQUEST, "encoder_input_lengths"), (requests,))
    shapes |= {
        "cache_indirection": (requests, beams, None),
        "host_max_attention_window_sizes": (None,),
        "host_sink_token_length": (1,),
        "attention_mask": (rows, None),
        "attention_packed_mask": (rows, None),
        "attention_output_orig_quant_scale": (1,),
        "logn_scaling": (None,),
        "alibi_slopes": (heads,),
        "qkv_bias": (qkv.shape[-1],),
        "relative_attention_bias": (heads, None) if form.said("max_distance") else (heads, None, None),
    }
    if "cross_kv" in used:
        require(tensors["cross_kv"].ndim in (2, 3), "rank of cross_kv")
        shapes["cross_kv"] = (*[None] * (tensors["cross_kv"].ndim - 1), 2 * kv_heads * size)
    for name in used:
        shape = shapes.get(name)
        fits = shape is None or _fits(tensors[name].shape, shape)
        require(fits, f"{name} is {tensors[name].shape} instead of {shape}")
    if "host_max_attention_window_sizes" in used and not cross:
        require(tensors["host_max_attention_window_sizes"].size, "no windows")
    if cached:
        require(tensors["sequence_length"].shape in ((requests,), (requests * beams,)), "sequence_length")
        require(all(tensors[name].shape in ((1,), (2,)) for name in SCALES if name in used), "scales")
        _cache_fits(form, tensors, requests, beams, kv_heads)
    require(not cross or form.said("position_embedding_type") not in (4, 5), "ALiBi of an encoder")
    require(not cross or "relative_attention_bias" not in tensors, "a bias of an encoder")
    if "relative_attention_bias" in used and form.said("max_distance"):
        _buckets_fit(form, tensors["relative_attention_bias"].shape[1])
    if _active(form):
        _tables_fit(form, tensors, used)


def _fits(shape: tuple[int, ...], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(w is None or s == w for s, w in zip(shape, expected))


def _cache_fits(form: Form, tensors: Tensors, requests: int, beams: int, kv_heads: int) -> None:
    pool, offsets, size = (
        tensors["past_key_value"],
        tensors.get("kv_cache_block_offsets"),
        form.said("hidden_size_per_head"),
    )
    require(pool.ndim == 5 or (pool.ndim == 6 and offsets is not None), f"cache of rank {pool.ndim}")
    require(_fits(pool.shape[-4:], (2, kv_heads, None, size)), f"cache {pool.shape}")
    if offsets is None:
        require(len(pool) >= requests * beams, f"{len(pool)} rows of a cache for {requests} requests of {beams}")
        return
    tokens, layer, layers = pool.shape[-2], form.said("layer_idx"), pool.shape[1] if pool.ndim == 6 else 1
    require(tokens > 0 and tokens & (tokens - 1) == 0, f"blocks of {tokens}")
    require(offsets.ndim in (4, 5), "rank of kv_cache_block_offsets")
    require(_fits(offsets.shape[-4:], (requests, None, 2, None)), f"offsets {offsets.shape}")
    require(offsets.shape[-3] in (1, beams) and (offsets.ndim == 4 or len(offsets)), f"offsets {offsets.shape}")
    mapping = tensors.get("host_kv_cache_pool_mapping")
    if mapping is not None:
        require(_fits(mapping.shape, (None, 2)) and layer < len(mapping), f"mapping {mapping.shape} of layer {layer}")
    elif pool.ndim == 6:
        require(layer < layers, f"layer {layer} of {layers}")


def _buckets_fit(form: Form, buckets: int) -> None:
    exact = buckets // (4 if form.said("relative_attention_bidirectional") else 2)
    require(exact >= 1 and form.said("max_distance") > exact, f"{buckets} buckets")


def _tables_fit(form: Form, tensors: Tensors, used: Sequence[str]) -> None:
    dim = form.said("rotary_embedding_dim")
    for name in used:
        if name.endswith("rotary_inv_freq"):
            require(tensors[name].size == dim // 2, name)
        elif name.endswith("rotary_cos_sin"):
            require(tensors[name].size % dim == 0, name)
    if _scaling(form) == 3 and not any(name.endswith(("rotary_inv_freq", "rotary_cos_sin")) for name in used):
        for key in ("short_factor", "long_factor"):
            factors = _config(form).get(key)
            if factors is not None:
                require(isinstance(factors, list) and len(factors) == dim // 2, key)


def check_specified(form: Form, tensors: Tensors) -> None:
    """Raise Unspecified for inputs without meaning, or where the description leaves the outcome open."""
    used = _used(form, tensors)
    idle = [name for name in tensors if name not in used]
    if idle and (form.types or form.ranks or not form.said("use_cache")):
        raise Unspecified(f"{idle} mean nothing")
    if form.said("tp_size") > _MOST_RANKS or form.said("multi_block_mode") not in (None, *range(-1, _MOST_SPLITS + 1)):
        raise Unspecified("too many ranks or splits")
    if form.corrupted in FLOAT and form.corrupted != "q_scaling":
        raise Unspecified(f"{form.corrupted} of another size")
    if form.corrupted in (*AT_TIMES, "num_kv_heads", "rope_scaling_config", "max_distance"):
        raise Unspecified(f"{form.corrupted} that is out of use, or too large")
    if not form.said("use_cache") and len(form.outputs) > 1:
        raise Unspecified("no cache to give out")
    for name in used:
        if name.endswith("rotary_inv_freq") and tensors[name].ndim != 1:
            raise Unspecified(f"rank of {name}")
        if name.endswith("rotary_cos_sin") and tensors[name].shape[1:] not in (
            (form.said("rotary_embedding_dim") // 2, 2),
            (),
        ):
            raise Unspecified(f"shape of {name}")
    kinds = [name.replace("long_rope_", "") for name in used if "rotary" in name]
    if _scaling(form) == 3 and _active(form) and kinds and (len(kinds) < 2 or kinds[0] != kinds[1]):
        raise Unspecified("tables of two kinds")
