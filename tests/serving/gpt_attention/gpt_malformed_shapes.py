"""Calls of gpt_attention with one argument whose shape or dtype does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_call_drawing import Drawing
from tests.serving.gpt_attention.gpt_case_features import ALIBI
from tests.serving.gpt_attention.gpt_malformed_types import (
    CACHED,
    PLAIN_MASK,
    POOLS,
    SELF,
    Blame,
    Defect,
    replace_arguments,
)

LINE = "shapes or dtypes that do not fit"

Change = Callable[[np.ndarray], np.ndarray]


def _changed(argument: str, change: Change, *names: str) -> Callable[[Drawing], Blame]:
    """Replace the argument by a changed copy."""

    def corrupt(drawing: Drawing) -> Blame:
        drawing.arguments[argument] = change(drawing.arguments[argument]).copy()
        return (argument, *names), ()

    return corrupt


def _shorter(array: np.ndarray) -> np.ndarray:
    return array[:-1]


def _longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array[-1:]])


def _narrower(array: np.ndarray) -> np.ndarray:
    return array[..., :-1]


def _wider(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array[..., -1:]], axis=-1)


def _doubles(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _singles(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def _deeper(array: np.ndarray) -> np.ndarray:
    return array[None]


# rows


def _change_projection(which: int, change: Change) -> Callable[[Drawing], Blame]:
    def corrupt(drawing: Drawing) -> Blame:
        projections = drawing.arguments["qkv"]
        projections[which] = change(projections[which]).copy()
        return ("qkv",), ()

    return corrupt


def _list_rows() -> Iterator[Defect]:
    single = {"parts": "one", "qkv_bias": False} | SELF
    separate = {"parts": "three", "qkv_bias": False} | SELF
    for name, change in (("narrow qkv", _narrower), ("wide qkv", _wider)):
        yield Defect(LINE, name, single, _changed("qkv", change, "num_heads", "num_kv_heads", "hidden_size_per_head"))
    yield Defect(LINE, "qkv of rank 1", {"rows": "packed"} | single, _changed("qkv", lambda x: x[0]))
    yield Defect(LINE, "qkv of rank 4", {"rows": "padded"} | single, _changed("qkv", _deeper))
    uncached = single | {"cache": "none", "relative_bias": "none"}
    yield Defect(LINE, "qkv in float64", uncached, _changed("qkv", _doubles))
    yield Defect(LINE, "qkv of integers", uncached, _changed("qkv", lambda x: np.zeros(x.shape, np.int32)))
    yield Defect(LINE, "narrow K", separate, _change_projection(1, _narrower))
    yield Defect(LINE, "V of fewer rows", separate, _change_projection(2, _shorter))
    yield Defect(LINE, "Q of another rank", separate, _change_projection(0, _deeper))
    yield Defect(LINE, "V of another dtype", separate, _change_projection(2, _doubles))
    padded = {"rows": "padded"} | single | PLAIN_MASK
    yield Defect(LINE, "one padded request too few", padded, _changed("qkv", _shorter, "context_lengths"))
    bias = {"qkv_bias": True}
    yield Defect(LINE, "a short bias", bias, _changed("qkv_bias", _shorter))
    yield Defect(LINE, "a bias in float64", bias, _changed("qkv_bias", _doubles))
    heads = {"heads": (4, 2), "tp": (1, 0)} | SELF
    sizes = ("num_heads", "hidden_size_per_head", "qkv")
    blame = ("num_kv_heads", *sizes)
    yield Defect(LINE, "heads that do not divide", heads, replace_arguments(blame, num_kv_heads=3))
    yield Defect(LINE, "no heads", SELF, replace_arguments(sizes, num_heads=0))
    yield Defect(LINE, "heads without channels", SELF, replace_arguments(sizes, hidden_size_per_head=0))


# lengths


def _list_lengths() -> Iterator[Defect]:
    several = CACHED | {"beams": ("none", 1)}
    for argument in ("host_request_types", "host_past_key_value_lengths", "sequence_length"):
        blame = "context_lengths"
        yield Defect(LINE, f"{argument} too long", several, _changed(argument, _longer, blame))
        yield Defect(LINE, f"{argument} too short", several, _changed(argument, _shorter, blame))
        yield Defect(LINE, f"{argument} of rank 2", several, _changed(argument, _deeper, blame))
        yield Defect(LINE, f"{argument} in float32", several, _changed(argument, _singles))
    yield Defect(LINE, "context_lengths in float32", {}, _changed("context_lengths", _singles))
    beams = {"beams": (2, 3), "phase": ("generation", "mixed")} | SELF
    indirection = "cache_indirection"
    yield Defect(LINE, "cache_indirection of rank 2", beams, _changed(indirection, lambda x: x[0]))
    yield Defect(LINE, "cache_indirection in float32", beams, _changed(indirection, _singles))
    yield Defect(LINE, "cache_indirection of other requests", beams, _changed(indirection, _longer))
    yield Defect(LINE, "cache_indirection that ends early", beams, _short_indirection)
    windowed = {"window": "narrow"} | SELF
    sizes = "host_max_attention_window_sizes"
    yield Defect(LINE, "no window sizes", windowed, _changed(sizes, lambda x: x[:0]))
    yield Defect(LINE, "window sizes in float32", windowed, _changed(sizes, _singles))
    sinks = {"sink_form": "array"} | SELF
    yield Defect(LINE, "two sink lengths", sinks, _changed("host_sink_token_length", _longer))


def _short_indirection(drawing: Drawing) -> Blame:
    lengths = drawing.lengths
    read = {
        b: lengths.past[b] for b, step in enumerate(lengths.generation) if step and lengths.prompt[b] < lengths.past[b]
    }
    if not read:
        return None
    longest = max(read.values())
    drawing.arguments["cache_indirection"] = drawing.arguments["cache_indirection"][:, :, : longest - 1].copy()
    return ("cache_indirection",), tuple(b for b, past in read.items() if past == longest)


# masks and biases


def _longest(drawing: Drawing) -> tuple[int, tuple[int, ...]]:
    """Return the largest number of keys of a request, and the requests with that many."""
    keys = drawing.lengths.encoder if drawing.cross else drawing.lengths.total
    return max(keys), tuple(b for b, length in enumerate(keys) if length == max(keys))


def _few_mask_columns(drawing: Drawing) -> Blame:
    keys, requests = _longest(drawing)
    drawing.arguments["attention_mask"] = drawing.arguments["attention_mask"][:, : keys - 1].copy()
    return ("attention_mask",), requests


def _few_mask_lanes(drawing: Drawing) -> Blame:
    keys, _ = _longest(drawing)
    lanes = -(-keys // 32)
    lengths = drawing.lengths.encoder if drawing.cross else drawing.lengths.total
    packed = drawing.arguments["attention_packed_mask"]
    drawing.arguments["attention_packed_mask"] = packed[:, : lanes - 1].copy()
    return ("attention_packed_mask",), tuple(b for b, length in enumerate(lengths) if length > 32 * (lanes - 1))


def _few_positions(drawing: Drawing) -> Blame:
    longest = max(drawing.lengths.total)
    name = "relative_attention_bias"
    axis = drawing.number(1, 2)
    table = drawing.arguments[name]
    drawing.arguments[name] = table[:, : longest - 1].copy() if axis == 1 else table[:, :, : longest - 1].copy()
    return (name,), _longest(drawing)[1]


def _few_logn(drawing: Drawing) -> Blame:
    longest = max(drawing.lengths.total)
    drawing.arguments["logn_scaling"] = drawing.arguments["logn_scaling"][: longest - 1].copy()
    return ("logn_scaling",), tuple(b for b, length in enumerate(drawing.lengths.total) if length == longest)


def _list_masks() -> Iterator[Defect]:
    mask = {"mask_form": "bool"}
    yield Defect(LINE, "a mask of fewer rows", mask, _changed("attention_mask", _shorter))
    yield Defect(LINE, "a mask of fewer columns", mask, _few_mask_columns)
    yield Defect(LINE, "a mask in float32", mask, _changed("attention_mask", _singles))
    yield Defect(LINE, "a mask of rank 3", mask, _changed("attention_mask", _deeper))
    packed = {"mask_form": ("bits uint32", "bits int32")}
    name = "attention_packed_mask"
    yield Defect(LINE, "a packed mask of fewer rows", packed, _changed(name, _shorter))
    yield Defect(LINE, "a packed mask of fewer 32-bit words", packed, _few_mask_lanes)
    yield Defect(LINE, "a packed mask in int64", packed, _changed(name, lambda x: x.astype(np.int64)))
    slopes = {"position": ALIBI, "slopes": "given"}
    yield Defect(LINE, "slopes too few", slopes, _changed("alibi_slopes", _shorter))
    yield Defect(LINE, "slopes in float64", slopes, _changed("alibi_slopes", _doubles))
    name = "relative_attention_bias"
    for kind in ("explicit", "implicit"):
        bias = {"relative_bias": kind}
        yield Defect(LINE, f"{kind} bias of more heads", bias, _changed(name, _longer))
        yield Defect(LINE, f"{kind} bias in float64", bias, _changed(name, _doubles))
        yield Defect(LINE, f"{kind} bias of another rank", bias, _changed(name, _deeper))
    unshifted = {"streamingllm": False}
    yield Defect(LINE, "bias of few positions", {"relative_bias": "explicit"} | unshifted, _few_positions)
    yield Defect(LINE, "logn of few positions", {"logn": True} | unshifted, _few_logn)
    yield Defect(LINE, "logn in float64", {"logn": True}, _changed("logn_scaling", _doubles))
    name = "attention_output_orig_quant_scale"
    yield Defect(LINE, "two output scales", {"fp8_output": True}, _changed(name, _longer))
    yield Defect(LINE, "an output scale in float64", {"fp8_output": True}, _changed(name, _doubles))


# caches


def _cut_pool(change: Change) -> Callable[[Drawing], Blame]:
    def corrupt(drawing: Drawing) -> Blame:
        changed = change(drawing.pool()).copy()
        if "past_key_value" in drawing.arguments:
            drawing.arguments["past_key_value"] = changed
        else:
            drawing.arguments["host_kv_cache_pool_pointers"][drawing.pool_number] = changed
        return POOLS, ()

    return corrupt


def _three_tokens(pool: np.ndarray) -> np.ndarray:
    return np.repeat(pool[..., :1, :], 3, axis=-2)


def _other_float(drawing: Drawing) -> Blame:
    other = np.float16 if np.dtype(np.float32) == drawing.T else np.float32
    return _cut_pool(lambda pool: pool.astype(other))(drawing)


def _wrong_layer(drawing: Drawing) -> Blame:
    drawing.arguments["layer_idx"] = 9
    return ("layer_idx", *POOLS), ()


def _wrong_mapping(column: int) -> Callable[[Drawing], Blame]:
    def corrupt(drawing: Drawing) -> Blame:
        drawing.arguments["host_kv_cache_pool_mapping"][drawing.case.layer, column] = 7
        return ("host_kv_cache_pool_mapping",), ()

    return corrupt


def _short_mapping(drawing: Drawing) -> Blame:
    mapping = drawing.arguments["host_kv_cache_pool_mapping"]
    drawing.arguments["host_kv_cache_pool_mapping"] = mapping[: drawing.case.layer].copy()
    return ("host_kv_cache_pool_mapping", "layer_idx"), ()


def _few_rows(drawing: Drawing) -> Blame:
    rows = len(drawing.lengths.past) * drawing.beams
    if rows == 1:
        return None
    drawing.arguments["past_key_value"] = drawing.arguments["past_key_value"][: rows - 1].copy()
    return ("past_key_value",), ()


def _list_caches() -> Iterator[Defect]:
    for kind, where in (("cache", "contiguous"), ("pool", "paged")):
        features: dict[str, Any] = {"cache": where}
        yield Defect(LINE, f"{kind} of fewer channels", features, _cut_pool(_narrower))
        yield Defect(LINE, f"{kind} of more heads", features, _cut_pool(lambda x: np.repeat(x, 2, axis=-3)))
        yield Defect(LINE, f"{kind} without V", features, _cut_pool(lambda x: x[..., :1, :, :, :]))
        yield Defect(
            LINE, f"{kind} of another rank", features | {"head_size": (16, 32)}, _cut_pool(lambda x: x[..., 0])
        )
        yield Defect(LINE, f"{kind} of another float", features | {"quantized": "none"}, _other_float)
    yield Defect(LINE, "cache of fewer rows", {"cache": "contiguous"}, _few_rows)
    plain = {"window": "none", "sinks": "none", "phase": "context", "chunks": "first", "tokens_per_block": 2} | SELF
    yield Defect(LINE, "3 tokens per block", plain | {"pool": ("rank 5", "rank 6")}, _cut_pool(_three_tokens))
    yield Defect(LINE, "a layer beyond the pool", {"pool": "rank 6", "window": "none"}, _wrong_layer)
    yield Defect(LINE, "a pool beyond the list", {"pool": ("mapped", "many")}, _wrong_mapping(0))
    yield Defect(LINE, "a mapped layer beyond the pool", {"pool": ("mapped", "many")}, _wrong_mapping(1))
    yield Defect(LINE, "a mapping of fewer layers", {"pool": "mapped", "window": "none"}, _short_mapping)
    wide = _changed("host_kv_cache_pool_mapping", _wider)
    yield Defect(LINE, "a mapping of three columns", {"pool": ("mapped", "many")}, wide)
    name = "kv_cache_block_offsets"
    rank_4 = {"offsets_rank": 4}
    yield Defect(LINE, "blocks of rank 3", rank_4, _changed(name, lambda x: x[0], *POOLS))
    yield Defect(LINE, "blocks of K alone", rank_4, _changed(name, lambda x: x[:, :, :1]))
    yield Defect(LINE, "blocks of other requests", rank_4, _changed(name, _longer))
    yield Defect(LINE, "blocks of one more beam", rank_4 | {"beams": ("none", 1, 3)}, _changed(name, _beam_more))
    yield Defect(LINE, "blocks in float32", rank_4, _changed(name, _singles))
    yield Defect(LINE, "blocks of one pool of several", {"pool": "many"}, _changed(name, lambda x: x[0], *POOLS))
    for name in ("kv_orig_quant_scale", "kv_quant_orig_scale"):
        scaled = {"quantized": ("int8", "fp8")}
        yield Defect(LINE, f"three of {name}", scaled, _changed(name, lambda x: np.ones(3, np.float32)))
        yield Defect(LINE, f"{name} in float64", scaled, _changed(name, _doubles))


def _beam_more(offsets: np.ndarray) -> np.ndarray:
    return np.concatenate([offsets, offsets[:, -1:]], axis=1)


# rotation and cross attention


def _few_angles(drawing: Drawing) -> Blame:
    longest = max(drawing.lengths.total)
    table = drawing.arguments["rotary_cos_sin"]
    drawing.arguments["rotary_cos_sin"] = table[: longest - 1].copy()
    return ("rotary_cos_sin",), tuple(b for b, length in enumerate(drawing.lengths.total) if length == longest)


def _short_factors(drawing: Drawing) -> Blame:
    config = dict(drawing.arguments["rope_scaling_config"])
    for name in ("short_factor", "long_factor"):
        config[name] = [*config[name], 1.0]
    drawing.arguments["rope_scaling_config"] = config
    return ("rope_scaling_config", "short_factor", "long_factor"), ()


def _short_encoder(drawing: Drawing) -> Blame:
    """Cut padded cross_kv below the longest encoder input in it."""
    lengths, cross_kv = drawing.lengths, drawing.arguments["cross_kv"]
    new = {
        b: lengths.encoder[b]
        for b, (step, past) in enumerate(zip(lengths.generation, lengths.past))
        if not step and past == 0
    }
    longest = max(new.values())
    drawing.arguments["cross_kv"] = cross_kv[:, : longest - 1].copy()
    return ("cross_kv", "encoder_input_lengths"), tuple(b for b, length in new.items() if length == longest)


def _list_rotation() -> Iterator[Defect]:
    rotated = {"position": ("rope_gptj", "rope_gpt_neox"), "rotary_dim": ("two", "half", "all")}
    plain = rotated | {"table": "none", "scaling": "none"}
    name = "rotary_embedding_dim"
    for value in (3, 64, -2):
        yield Defect(LINE, f"{name} {value}", plain, replace_arguments((name,), rotary_embedding_dim=value))
    table = "rotary_inv_freq"
    usual = {"scaling": ("none", "linear", "dynamic")}
    frequencies = rotated | usual | {"table": "inv_freq"}
    yield Defect(LINE, "one frequency too many", frequencies, _changed(table, _longer))
    yield Defect(LINE, "frequencies in float64", frequencies, _changed(table, _doubles))
    table = "rotary_cos_sin"
    flat = rotated | usual | {"table": "cos_sin flat"}
    yield Defect(LINE, "half an angle", flat, _changed(table, _shorter))
    angles = rotated | usual | {"table": "cos_sin", "streamingllm": False}
    yield Defect(LINE, "angles in float64", angles, _changed(table, _doubles))
    yield Defect(LINE, "angles of few positions", angles, _few_angles)
    yield Defect(LINE, "one factor too many", {"scaling": "longrope", "table": "none"}, _short_factors)
    cross: dict[str, Any] = {"cross": ("wide", "narrow")}
    yield Defect(LINE, "narrow cross_kv", cross | {"cross_rows": ("packed", "padded")}, _changed("cross_kv", _narrower))
    packed = _changed("cross_kv", _shorter, "encoder_input_lengths")
    yield Defect(LINE, "cross_kv of fewer tokens", cross | {"cross_rows": "packed"}, packed)
    padded = cross | {"cross_rows": "padded"}
    yield Defect(LINE, "cross_kv of other requests", padded, _changed("cross_kv", _longer))
    yield Defect(LINE, "cross_kv that ends early", padded, _short_encoder)
    yield Defect(LINE, "cross_kv in float64", padded, _changed("cross_kv", _doubles))
    lengths = _changed("encoder_input_lengths", _longer, "context_lengths")
    yield Defect(LINE, "encoder lengths of other requests", cross, lengths)


SHAPES: tuple[Defect, ...] = (*_list_rows(), *_list_lengths(), *_list_masks(), *_list_caches(), *_list_rotation())
