"""The features of a random gpt_attention case: their values, contradictions between them, and pairs of them.

A feature fixes a static property of a compiled call: attributes, dtypes, ranks, the set of arguments. A feature without
a meaning has the value NA, so that a pair counts only where both have a meaning.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NA = "n/a"

Values = Mapping[str, Any]  # feature: value
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Features:
    """One configuration. DOMAINS lists the values of every field."""

    dtype: str
    heads: tuple[int, int]  # num_heads, num_kv_heads
    head_size: int
    rows: str
    parts: str  # qkv as one array or as a list of three
    qkv_bias: bool
    phase: str
    chunks: str  # of context requests: only the first chunk (past 0), or later ones too
    cache: str
    pool: str  # rank, and whether a mapping names pool and layer
    holder: str  # past_key_value, or a list host_kv_cache_pool_pointers
    offsets_rank: Any
    entries: str  # numbered by a manager; K and V anywhere; read-only blocks shared
    tokens_per_block: Any
    layer: int
    quantized: str
    scales: str
    attend_current_unquantized: bool
    fp8_context_fmha: bool
    window: str
    windows_per_layer: bool
    sinks: str  # bubble: not a multiple of the tokens per block
    sink_form: str
    one_more_block: bool
    streamingllm: bool
    beams: Any  # none: no cache_indirection
    long_lengths: bool  # sequence_length (B*bw)
    mask: str
    mask_form: str
    homo_head_pattern: Any
    tp: tuple[int, int]  # tp_size, tp_rank
    position: str
    scaling: str
    rope_config: str
    table: str
    rotary_dim: str
    relative_bias: str
    relative_dtype: str
    slopes: str
    logn: bool
    softcap: bool
    q_scaling: float
    cross: str  # wide: qkv has K and V columns
    cross_rows: str
    fp8_output: bool
    compat: bool
    splits: Any  # multi_block_mode
    lengths_dtype: str
    names: bool  # enumerations by name
    redundant: bool  # unused arguments are passed, too
    poison_invisible: bool  # cached keys and biases that the mask type hides are NaN, too


DOMAINS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "float16", "bfloat16"),
    "heads": ((1, 1), (3, 3), (4, 4), (4, 2), (6, 2), (8, 2), (5, 1), (4, 1)),
    "head_size": (8, 16, 32),
    "rows": ("packed", "padded"),
    "parts": ("one", "three"),
    "qkv_bias": (False, True),
    "phase": ("context", "generation", "mixed"),
    "chunks": (NA, "first", "later"),
    "cache": ("none", "contiguous", "paged"),
    "pool": (NA, "rank 5", "rank 6", "mapped", "many"),
    "holder": (NA, "array", "list"),
    "offsets_rank": (NA, 4, 5),
    "entries": (NA, "manager", "anywhere", "shared"),
    "tokens_per_block": (NA, 2, 4, 8),
    "layer": (0, 1, 2),
    "quantized": ("none", "int8", "fp8"),
    "scales": (NA, "one", "two"),
    "attend_current_unquantized": (True, False),
    "fp8_context_fmha": (False, True),
    "window": ("none", "wide", "narrow"),
    "windows_per_layer": (False, True),
    "sinks": ("none", "zero", "whole blocks", "bubble"),
    "sink_form": (NA, "int", "array"),
    "one_more_block": (False, True),
    "streamingllm": (False, True),
    "beams": ("none", 1, 2, 3),
    "long_lengths": (False, True),
    "mask": (
        "padding", "causal", "sliding_window_causal", "bidirectional", "bidirectionalglm", "blocksparse", "custom_mask",
    ),
    "mask_form": (NA, "bool", "bits uint32", "bits int32", "both"),
    "homo_head_pattern": (NA, False, True),
    "tp": ((1, 0), (2, 1), (3, 1)),
    "position": (
        "learned_absolute", "rope_gptj", "rope_gpt_neox", "long_rope", "alibi", "alibi_with_scale", "relative", "yarn",
    ),
    "scaling": (NA, "none", "linear", "dynamic", "longrope", "llama3", "yarn"),
    "rope_config": (NA, "default", "partial", "full"),
    "table": (NA, "none", "inv_freq", "cos_sin", "cos_sin flat"),
    "rotary_dim": (NA, "zero", "two", "half", "all"),
    "relative_bias": ("none", "explicit", "implicit", "bidirectional"),
    "relative_dtype": (NA, "T", "float32"),
    "slopes": (NA, "given", "formula"),
    "logn": (False, True),
    "softcap": (False, True),
    "q_scaling": (1.0, 0.7),
    "cross": ("none", "wide", "narrow"),
    "cross_rows": (NA, "packed", "padded", "absent"),
    "fp8_output": (False, True),
    "compat": (False, True),
    "splits": (None, False, True, 3),
    "lengths_dtype": ("int32", "int64"),
    "names": (False, True),
    "redundant": (False, True),
    "poison_invisible": (False, True),
}  # fmt: skip

# drawn first, weighted, so that features of paged caches do not crowd out the others
FIRST: dict[str, tuple[Any, ...]] = {"cache": ("none", "contiguous", "contiguous", "paged", "paged", "paged")}

# the usual values of a plain case, so that not every case has all features at once
PLAIN: dict[str, Any] = {
    "qkv_bias": False, "quantized": "none", "window": "none", "sinks": "none", "streamingllm": False, "beams": "none",
    "mask": "causal", "relative_bias": "none", "logn": False, "softcap": False, "cross": "none", "fp8_output": False,
    "compat": False, "tp": (1, 0), "fp8_context_fmha": False, "one_more_block": False,
}  # fmt: skip

ROPE = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
ALIBI = ("alibi", "alibi_with_scale")


def _exclude(feature: str, *values: Any) -> tuple[Any, ...]:
    return tuple(value for value in DOMAINS[feature] if value not in values)


def _forbid(**clause: Any) -> dict[str, tuple[Any, ...]]:
    return {name: values if isinstance(values, tuple) else (values,) for name, values in clause.items()}


def _only_where(feature: str, values: tuple[Any, ...], *dependants: str) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Yield clauses: dependants are NA exactly where the feature has none of the values."""
    for name in dependants:
        yield {feature: _exclude(feature, *values), name: _exclude(name, NA)}
        yield {feature: values, name: (NA,)}


# a case must not match all features of a clause
FORBIDDEN: tuple[dict[str, tuple[Any, ...]], ...] = (
    *_only_where("phase", ("context", "mixed"), "chunks"),
    *_only_where("cache", ("paged",), "pool", "holder", "offsets_rank", "entries", "tokens_per_block"),
    *_only_where("quantized", ("int8", "fp8"), "scales"),
    *_only_where("sinks", _exclude("sinks", "none"), "sink_form"),
    *_only_where("mask", ("custom_mask",), "mask_form"),
    *_only_where("mask", ("blocksparse",), "homo_head_pattern"),
    *_only_where("position", ROPE, "scaling", "table", "rotary_dim"),
    *_only_where("position", ALIBI, "slopes"),
    *_only_where("scaling", ("longrope", "llama3", "yarn"), "rope_config"),
    *_only_where("relative_bias", _exclude("relative_bias", "none"), "relative_dtype"),
    *_only_where("cross", ("wide", "narrow"), "cross_rows"),
    # without a cache: contexts alone, and no argument of a cache
    _forbid(cache="none", phase=("generation", "mixed")),
    _forbid(cache="none", chunks="later"),
    _forbid(cache="none", quantized=("int8", "fp8")),
    _forbid(cache="none", beams=(1, 2, 3)),
    _forbid(cache="none", streamingllm=True),
    _forbid(rows="padded", phase="mixed"),
    _forbid(pool="many", offsets_rank=4),
    _forbid(pool="many", holder="array"),
    _forbid(quantized=("none", "int8"), fp8_context_fmha=True),
    _forbid(fp8_context_fmha=True, logn=True),  # the order of rounding to e4m3 and logn is undefined
    _forbid(window="none", windows_per_layer=True),
    _forbid(cache=("none", "contiguous"), one_more_block=True),
    _forbid(streamingllm=True, beams=(2, 3)),
    _forbid(streamingllm=True, chunks="later"),
    _forbid(streamingllm=True, compat=True, scaling="dynamic"),  # the length that counts is undefined
    _forbid(beams=("none", 1), long_lengths=True),
    _forbid(beams=(2, 3), window="narrow"),
    _forbid(position="long_rope", scaling=_exclude("scaling", "longrope")),
    _forbid(position="yarn", scaling=_exclude("scaling", "yarn")),
    _forbid(position="relative", relative_bias="none"),
    _forbid(rotary_dim="zero", table=_exclude("table", "none")),
    _forbid(rotary_dim="zero", scaling=_exclude("scaling", "none")),
    # cross attention
    _forbid(cross=("wide", "narrow"), position=ALIBI),
    _forbid(cross=("wide", "narrow"), relative_bias=_exclude("relative_bias", "none")),
    _forbid(cross=("wide", "narrow"), streamingllm=True),
    _forbid(cross=("wide", "narrow"), sinks=("whole blocks", "bubble")),
    _forbid(cross="narrow", parts="three"),
    _forbid(phase="generation", cross_rows=("packed", "padded")),
    _forbid(phase=("context", "mixed"), cross_rows="absent"),
)

_CLAUSES: dict[str, list[dict[str, tuple[Any, ...]]]] = {
    name: [clause for clause in FORBIDDEN if name in clause] for name in DOMAINS
}


def is_contradictory(values: Values, name: str) -> bool:
    """Return whether the value of one feature contradicts the other values so far."""
    return any(
        all(feature in values and values[feature] in allowed for feature, allowed in clause.items())
        for clause in _CLAUSES[name]
    )


def complete(static: Values, random_: random.Random, tries: int = 60, plain: float = 0.0) -> Features | None:
    """Draw a random legal configuration with these values; None if the search does not find one.

    Each other feature has its value of PLAIN with the probability `plain`, if that is legal.
    """
    static_values: dict[str, Any] = {}
    for name, value in static.items():
        static_values[name] = value
        if is_contradictory(static_values, name):
            return None
    for _ in range(tries):
        values = dict(static_values)
        names = [name for name in DOMAINS if name not in values]
        random_.shuffle(names)
        names.sort(key=lambda name: name not in FIRST)
        for name in names:
            offered = FIRST.get(name, DOMAINS[name])
            order = random_.sample(offered, len(offered))
            if name in PLAIN and random_.random() < plain:
                order.insert(0, PLAIN[name])
            for value in order:
                values[name] = value
                if not is_contradictory(values, name):
                    break
            else:
                break  # a dead end
        else:
            return Features(**values)
    return None


def list_pairs(features: Features) -> Iterator[Pair]:
    """Yield the pairs of values of a configuration, without NA."""
    items = [(name, getattr(features, name)) for name in DOMAINS]
    return itertools.combinations([item for item in items if item[1] != NA], 2)


# three features at a time that have failed elsewhere
TRAPS: dict[str, Values] = {
    "window, sinks, paged ring with a bubble": {"window": "narrow", "sinks": "bubble", "cache": "paged"},
    "beams, paged, int8": {"beams": (2, 3), "cache": "paged", "quantized": "int8", "phase": ("generation", "mixed")},
    "beams, paged, fp8": {"beams": (2, 3), "cache": "paged", "quantized": "fp8", "phase": ("generation", "mixed")},
    "chunks, ring, quantized": {"chunks": "later", "window": "narrow", "quantized": ("int8", "fp8")},
    "dynamic, mixed": {"scaling": "dynamic", "phase": "mixed", "table": "none", "rotary_dim": ("two", "half", "all")},
    "longrope, mixed": {"scaling": "longrope", "phase": "mixed", "table": "none"},
    "custom mask, chunks, GQA": {"mask": "custom_mask", "chunks": "later", "heads": ((4, 2), (6, 2), (8, 2))},
    "streamingllm, sinks, wrap": {
        "streamingllm": True,
        "sinks": ("whole blocks", "bubble"),
        "window": "narrow",
        "phase": ("generation", "mixed"),
    },
    "window, context, T cache": {
        "window": "narrow",
        "phase": "context",
        "quantized": "none",
        "cache": ("contiguous", "paged"),
    },
    "compat, window, generation": {
        "compat": True,
        "window": "narrow",
        "phase": ("generation", "mixed"),
        "cross": "none",
    },
    "compat, dynamic, generation": {
        "compat": True,
        "scaling": "dynamic",
        "phase": ("generation", "mixed"),
        "table": "none",
    },
    "streamingllm, length of rotation": {
        "streamingllm": True,
        "scaling": ("dynamic", "longrope"),
        "window": "narrow",
        "phase": ("generation", "mixed"),
        "table": "none",
    },
    "streamingllm, window, context": {"streamingllm": True, "window": "narrow", "phase": ("context", "mixed")},
    "blocksparse, generation": {"mask": "blocksparse", "phase": "generation"},
}


def is_trapped(features: Features, trap: Values) -> bool:
    for name, allowed in trap.items():
        value = getattr(features, name)
        is_choice = isinstance(allowed, tuple) and allowed not in DOMAINS[name]
        if value not in (allowed if is_choice else (allowed,)):
            return False
    return True


def choose_values(trap: Values, random_: random.Random) -> dict[str, Any]:
    """Return one value for each feature; a tuple outside the feature's domain offers several."""
    return {
        name: random_.choice(allowed) if isinstance(allowed, tuple) and allowed not in DOMAINS[name] else allowed
        for name, allowed in trap.items()
    }


def draw_configurations(seed: int, candidates: int = 12) -> Iterator[Features]:
    """Yield configurations forever: the candidate with the most new pairs, a trap or a plain one in between.

    After every possible pair has occurred, all pairs count as new again.
    """
    random_ = random.Random(seed)
    missing: dict[Pair, None] = {}  # ordered, because the order of a set differs between runs
    traps: list[Values] = []
    for number in itertools.count():
        missing = missing or dict.fromkeys(_list_all_pairs())
        traps = traps or random_.sample(list(TRAPS.values()), len(TRAPS))
        if number % 5 == 4:
            best = complete({}, random_, plain=0.8)
            assert best is not None
            yield best
            continue
        trap = traps.pop() if number % 5 in (0, 2) else None
        drawn: list[Features] = []
        while len(drawn) < candidates:
            if trap is None and not missing:
                break
            pair = random_.choice(list(missing)) if trap is None else ()
            features = complete(dict(pair) if trap is None else choose_values(trap, random_), random_)
            if features is not None:
                drawn.append(features)
            elif trap is None:
                del missing[pair]  # type: ignore[arg-type]
        if not drawn:
            continue
        best = max(drawn, key=lambda features: sum(pair in missing for pair in list_pairs(features)))
        for new in list_pairs(best):
            missing.pop(new, None)
        yield best


def _list_all_pairs() -> Iterator[Pair]:
    items = [(name, value) for name, values in DOMAINS.items() for value in values if value != NA]
    return (pair for pair in itertools.combinations(items, 2) if pair[0][0] != pair[1][0])
