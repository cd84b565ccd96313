"""Illegal calls of gpt_attention: legal calls with one defect each, and the names that an error must contain.

Defects of lengths, requests and caches are here, those of shapes and dtypes in gpt_malformed_shapes, those of windows
and attributes in gpt_malformed_attributes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_call_drawing import Drawing
from tests.serving.gpt_attention.gpt_case_features import choose_values, complete
from tests.serving.gpt_attention.gpt_malformed_attributes import ATTRIBUTES
from tests.serving.gpt_attention.gpt_malformed_shapes import SHAPES
from tests.serving.gpt_attention.gpt_malformed_types import (
    CACHED,
    PAGED,
    PLAIN_MASK,
    POOLS,
    SELF,
    Blame,
    Defect,
    Malformed,
    list_needed_blocks,
    replace_arguments,
    slice_request,
)


def _without(argument: str, *names: str) -> Any:
    def corrupt(drawing: Drawing) -> Blame:
        del drawing.arguments[argument]
        return (argument, *names), ()

    return corrupt


# a required argument or scale missing


def _list_missing() -> Iterator[Defect]:
    line = "a required argument or scale missing"
    for argument in ("context_lengths", "host_request_types", "host_past_key_value_lengths", "sequence_length"):
        yield Defect(line, f"no {argument}", {**CACHED, "redundant": False}, _without(argument))
    yield Defect(line, "no cache", {"cache": "contiguous"}, _without("past_key_value", *POOLS))
    yield Defect(line, "no pool", PAGED | {"holder": "array"}, _without("past_key_value", *POOLS))
    yield Defect(line, "no pools", PAGED | {"holder": "list"}, _without("host_kv_cache_pool_pointers", *POOLS))
    yield Defect(
        line,
        "pools without blocks",
        PAGED | {"holder": "list", "redundant": False},
        _without("kv_cache_block_offsets", *POOLS),
    )
    for argument in ("kv_orig_quant_scale", "kv_quant_orig_scale"):
        yield Defect(line, f"no {argument}", {"quantized": ("int8", "fp8")}, _without(argument))
    cross = {"cross": ("wide", "narrow"), "cross_rows": ("packed", "padded")}
    yield Defect(line, "no lengths of the encoder", cross, _without("encoder_input_lengths"))
    yield Defect(line, "no cross_kv", cross, _without("cross_kv"))
    yield Defect(line, "no mask", {"mask": "custom_mask", "mask_form": "bool", "redundant": True}, _mask_gone)
    yield Defect(
        line,
        "no factors of longrope",
        {"scaling": "longrope", "table": "none"},
        _without("rope_scaling_config", "short_factor", "long_factor"),
    )


def _mask_gone(drawing: Drawing) -> Blame:
    del drawing.arguments["attention_mask"]
    return ("attention_mask", "mask_type"), ()


# lengths


def _longer(drawing: Drawing) -> Blame:
    """Change sequence_length of one request by -1, 1 or 3."""
    lengths = drawing.arguments["sequence_length"]
    b = drawing.number(0, len(drawing.lengths.past) - 1)
    lengths[slice_request(drawing, b)] += drawing.rng.choice([-1, 1, 3])
    return ("sequence_length", "host_past_key_value_lengths", "context_lengths"), (b,)


def _unequal(drawing: Drawing) -> Blame:
    b = drawing.number(0, len(drawing.lengths.past) - 1)
    drawing.arguments["sequence_length"][b * drawing.beams + 1] += 1
    return ("sequence_length",), (b,)


def _no_rows(drawing: Drawing) -> Blame:
    b = drawing.number(0, len(drawing.lengths.past) - 1)
    drawing.arguments["context_lengths"][b] = 0
    drawing.arguments["sequence_length"][slice_request(drawing, b)] = drawing.lengths.past[b]
    return ("context_lengths", "sequence_length"), (b,)


def _negative_past(drawing: Drawing) -> Blame:
    b = drawing.number(0, len(drawing.lengths.past) - 1)
    drawing.arguments["host_past_key_value_lengths"][b] = -2
    drawing.arguments["sequence_length"][slice_request(drawing, b)] = drawing.lengths.count[b] - 2
    return ("host_past_key_value_lengths", "sequence_length"), (b,)


def _other_host_lengths(drawing: Drawing) -> Blame:
    b = drawing.number(0, len(drawing.lengths.past) - 1)
    drawing.arguments["host_context_lengths"] = drawing.array(drawing.lengths.prompt)
    drawing.arguments["host_context_lengths"][b] += 1
    return ("host_context_lengths",), (b,)


def _small_maximum(drawing: Drawing) -> Blame:
    longest = max(drawing.lengths.count)
    drawing.arguments["max_context_length"] = longest - 1
    return ("max_context_length",), ()


def _rows_and_lengths(drawing: Drawing) -> Blame:
    """Add or drop one row of packed qkv."""
    qkv = drawing.arguments["qkv"]
    extra = drawing.number(0, 1) or len(qkv) == 1
    drawing.arguments["qkv"] = np.concatenate([qkv, qkv[:1]]) if extra else qkv[:-1].copy()
    return ("qkv", "context_lengths"), ()


def _short_pad(drawing: Drawing) -> Blame:
    """Cut S below the longest chunk."""
    counts = drawing.lengths.count
    if max(counts) == 1:
        return None
    longest = max(counts)
    drawing.arguments["qkv"] = drawing.arguments["qkv"][:, : longest - 1].copy()
    return ("qkv", "context_lengths"), tuple(b for b, count in enumerate(counts) if count == longest)


def _streaming_chunk(drawing: Drawing) -> Blame:
    drawing.arguments["streamingllm"] = True
    lengths = drawing.lengths
    wrong = [b for b, past in enumerate(lengths.past) if past and not lengths.generation[b]]
    return ("streamingllm", "host_past_key_value_lengths"), tuple(wrong)


def _uncached(**values: Any) -> Any:
    def corrupt(drawing: Drawing) -> Blame:
        for name, value in values.items():
            drawing.arguments[name] = drawing.array([value] * len(drawing.lengths.past))
        return ("use_cache", *values), ()

    return corrupt


def _cache_unused(drawing: Drawing) -> Blame:
    size = drawing.case.head_size
    drawing.arguments["past_key_value"] = np.zeros((4, 2, drawing.kv_heads, 64, size), drawing.T)
    return ("use_cache", "past_key_value"), ()


def _list_lengths() -> Iterator[Defect]:
    line = "lengths that contradict each other"
    yield Defect(line, "sequence_length", CACHED | SELF | PLAIN_MASK, _longer, times=4)
    yield Defect(line, "sequence_length of two beams", {"long_lengths": True, "beams": (2, 3)}, _unequal)
    padded = {"rows": "padded", "phase": "context", "redundant": False} | SELF | PLAIN_MASK
    yield Defect(line, "a chunk without rows", CACHED | padded, _no_rows)
    yield Defect(line, "a negative past", CACHED | padded | {"streamingllm": False}, _negative_past)
    yield Defect(line, "host_context_lengths", {}, _other_host_lengths)
    yield Defect(line, "max_context_length", {"phase": "context"}, _small_maximum)
    packed = {"rows": "packed", "parts": "one"} | SELF | PLAIN_MASK
    yield Defect(line, "rows of packed qkv", packed, _rows_and_lengths)
    yield Defect(line, "rows of padded qkv", padded | {"parts": "one"}, _short_pad)
    later = {"chunks": "later", "streamingllm": False, "beams": ("none", 1)} | CACHED | SELF
    yield Defect("section 5: streamingllm", "a second chunk", later, _streaming_chunk)
    uncached = {"cache": "none"} | SELF
    yield Defect(
        "section 2: use_cache=False", "a past without a cache", uncached, _uncached(host_past_key_value_lengths=3)
    )
    yield Defect("section 2: use_cache=False", "generation without a cache", uncached, _uncached(host_request_types=1))
    yield Defect("section 2: use_cache=False", "a cache that is not used", uncached, _cache_unused)


# requests


def _generation_first(drawing: Drawing) -> Blame:
    """Reorder the batch, with its generation requests first."""
    lengths, arguments = drawing.lengths, drawing.arguments
    steps, contexts = sum(lengths.generation), len(lengths.past) - sum(lengths.generation)
    order = np.roll(np.arange(steps + contexts), steps)
    for name in (
        "context_lengths", "host_request_types", "host_past_key_value_lengths", "sequence_length",
        "host_context_lengths",
    ):  # fmt: skip
        if name in arguments:
            arguments[name] = arguments[name][order]
    arguments["qkv"] = np.roll(arguments["qkv"], steps, axis=0)
    if drawing.case.cache == "contiguous":
        cache = arguments["past_key_value"]
        arguments["past_key_value"] = np.concatenate([cache[order], cache[len(order) :]])
    else:
        offsets = arguments["kv_cache_block_offsets"]
        arguments["kv_cache_block_offsets"] = np.take(offsets, order, axis=offsets.ndim - 4)
    return ("host_request_types",), (steps,)


def _mixed_padded(drawing: Drawing) -> Blame:
    """Turn the last request of a padded context into a step at its last position."""
    lengths, arguments = drawing.lengths, drawing.arguments
    if len(lengths.past) < 2 or lengths.total[-1] < 2:
        return None
    arguments["host_request_types"][-1] = 1
    arguments["host_past_key_value_lengths"][-1] = arguments["context_lengths"][-1] = lengths.total[-1] - 1
    return ("qkv", "host_request_types"), ()


def _list_requests() -> Iterator[Defect]:
    mixed = {"phase": "mixed", "parts": "one", "beams": "none", "relative_bias": "none"} | SELF | PLAIN_MASK
    yield Defect("context after generation", "generation first", mixed, _generation_first)
    padded: dict[str, Any] = {"rows": "padded", "phase": "context", "beams": "none", "window": "none"}
    padded |= {"streamingllm": False, "redundant": False}
    yield Defect("mixed batch padded", "a step in a padded batch", CACHED | padded | SELF | PLAIN_MASK, _mixed_padded)


# caches


def _short_cache(drawing: Drawing) -> Blame:
    slots = {token: drawing.slot(token[2]) for token in drawing.read | drawing.written}
    last = max(slots.values())
    if last == 0:
        return None
    drawing.arguments["past_key_value"] = drawing.arguments["past_key_value"][:, :, :, :last].copy()
    return ("past_key_value",), tuple({token[0] for token, slot in slots.items() if slot == last})


def _few_columns(drawing: Drawing) -> Blame:
    last = max(column for _, _, column in list_needed_blocks(drawing))
    if last == 0:
        return None
    offsets = drawing.arguments["kv_cache_block_offsets"]
    drawing.arguments["kv_cache_block_offsets"] = offsets[..., :last].copy()
    return ("kv_cache_block_offsets",), tuple({b for b, _, column in list_needed_blocks(drawing) if column == last})


def _outside(drawing: Drawing) -> Blame:
    """Set a needed entry just beyond the pool, far beyond, or negative."""
    b, beam, column = drawing.one_of(sorted(list_needed_blocks(drawing)))
    pool = drawing.pool()
    count = int(np.prod(pool.shape[:-3]))
    entry = drawing.one_of([count - 2 * drawing.layer, count, 2**31 - 1, -1, -(2**31)])
    drawing.offsets()[b, beam, drawing.number(0, 1), column] = entry
    return ("kv_cache_block_offsets",), (b,)


def _foreign_beam(drawing: Drawing) -> Blame:
    lengths = drawing.lengths
    steps = [b for b, step in enumerate(lengths.generation) if step and lengths.prompt[b] < lengths.past[b]]
    if not steps:
        return None
    b = drawing.one_of(steps)
    token = drawing.number(lengths.prompt[b], lengths.past[b] - 1)
    table = drawing.arguments["cache_indirection"]
    table[b, drawing.number(0, drawing.beams - 1), token] = drawing.one_of([drawing.beams, -1, 2**31 - 1])
    return ("cache_indirection",), (b,)


def _twice_written(drawing: Drawing) -> Blame:
    """Let K or V of one (request, beam) overwrite the K or V of another."""
    blocks = sorted(drawing.blocks_written)
    pairs = [(first, second) for first in blocks for second in blocks if first[:2] != second[:2]]
    if not pairs:
        return None
    (b, beam, column), (b2, beam2, column2) = drawing.one_of(pairs)
    offsets = drawing.offsets()
    offsets[b, beam, drawing.number(0, 1), column] = offsets[b2, beam2, drawing.number(0, 1), column2]
    return ("kv_cache_block_offsets",), tuple({b, b2})


def _list_caches() -> Iterator[Defect]:
    contiguous = {"cache": "contiguous"} | PLAIN_MASK
    paged = PAGED | PLAIN_MASK  # these masks do not hide a whole block, whose entry the call would not need
    yield Defect("a needed slot beyond the cache", "a short cache", contiguous, _short_cache, times=4)
    yield Defect("block column beyond M", "too few columns", paged, _few_columns, times=4)
    yield Defect("entry outside the pool", "an entry outside", paged, _outside, times=6)
    beams = {"beams": (1, 2, 3), "phase": ("generation", "mixed"), "window": ("none", "wide")} | SELF | PLAIN_MASK
    yield Defect("beam outside bw", "a beam outside", beams, _foreign_beam, times=4)
    line = "two (request, beam) writing one block"
    contexts = {"phase": ("context", "mixed")} | SELF
    yield Defect(line, "two requests", paged | contexts, _twice_written, times=3)
    steps = {"phase": "generation", "beams": (2, 3)} | SELF
    yield Defect(line, "two beams", paged | steps, _twice_written, times=3)
    line = "quantized mode and cache dtype that disagree, or both modes"
    blame = ("kv_cache_quant_mode", *POOLS)
    for kind, mode, other in (("int8", 64, 128), ("fp8", 128, 64)):
        quantized = {"quantized": kind, "fp8_context_fmha": False}
        yield Defect(line, f"{kind} without its mode", quantized, replace_arguments(blame, kv_cache_quant_mode=0))
        yield Defect(
            line, f"{kind} with the other mode", quantized, replace_arguments(blame, kv_cache_quant_mode=other)
        )
        yield Defect(line, f"{kind} with both modes", quantized, replace_arguments(blame, kv_cache_quant_mode=64 | 128))
        scales = {name: np.ones(1, np.float32) for name in ("kv_orig_quant_scale", "kv_quant_orig_scale")}
        plain = CACHED | {"quantized": "none"}
        yield Defect(
            line, f"mode {mode} of a cache in T", plain, replace_arguments(blame, kv_cache_quant_mode=mode, **scales)
        )
    fmha = replace_arguments(("use_fp8_context_fmha",), use_fp8_context_fmha=True)
    yield Defect("section 3: needs mode 128", "fp8 context", CACHED | {"quantized": ("none", "int8")}, fmha)
    yield Defect("section 3: exactly one of the two", "a pool twice", PAGED, _two_pools)


def _two_pools(drawing: Drawing) -> Blame:
    pool = drawing.pool()
    drawing.arguments |= {"past_key_value": pool, "host_kv_cache_pool_pointers": [pool]}
    return POOLS, ()


DEFECTS: tuple[Defect, ...] = (
    *_list_missing(), *_list_lengths(), *_list_requests(), *_list_caches(), *ATTRIBUTES, *SHAPES,
)  # fmt: skip


def corrupt_call(defect: Defect, seed: int) -> Malformed | None:
    """Return a call with this defect; None where the drawn sizes leave no room for it."""
    random_ = random.Random(seed)
    features = complete(choose_values(defect.features, random_), random_, 500)
    assert features is not None, defect
    drawing = Drawing(features, np.random.default_rng(seed))
    blame = defect.corrupt(drawing)
    if blame is None:
        return None
    names, requests = blame
    return Malformed(defect.line, defect.name, drawing.arguments, names, requests, defect.error)


def malformed(seed: int, count: int) -> Iterator[Malformed]:
    """Yield `count` illegal calls, the same for the same seed; every defect occurs before any occurs again."""
    random_ = random.Random(seed)
    deck = [defect for defect in DEFECTS for _ in range(defect.times)]
    defects: list[Defect] = []
    for _ in range(count):
        defects = defects or random_.sample(deck, len(deck))
        defect = defects.pop()
        for _ in range(200):
            call = corrupt_call(defect, random_.getrandbits(32))
            if call is not None:
                yield call
                break
        else:
            raise AssertionError(f"no room for {defect.name}")
