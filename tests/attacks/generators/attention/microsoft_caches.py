"""com.microsoft's attention over caches with room: wild lengths, masks and beams, shapes that do not fit; and what it
has in common with that over caches in blocks (microsoft_pages.py).

Calls are those of tests/ops/microsoft, whose float64 references answer what is legal, with NaN in what nobody sees.
Shapes, types and attributes that do not fit are refused. Tables that contradict themselves may end in any way that
harms nobody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, Unspecified, attacks, require
from tests.attacks.draw import ANY, Draw
from tests.attacks.generators.served.tensorrt_llm import wild_table
from tests.ops.microsoft import test_decoder_attention as decoder

Tensors = dict[str, np.ndarray]

FLOATS = ("float32", "float16", "bfloat16")
SIGNED = ("int32", "int64")
_CLOSE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
_PARAMETERS = ("bias", "k_scale", "v_scale", "cos_cache", "sin_cache")
_WILD: dict[type, Sequence[Any]] = {
    int: (-1, 0, 1, 2, 3, 7, 64, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**63)),
    float: (0.0, -1.0, 1e38, math.inf, -math.inf, math.nan),
    str: ("", "x", "NONE", "PER_TENSOR", "PER_CHANNEL", "LATENT", "SEPARATE", "int8", "int4", "float16"),
}


def attack(
    d: Draw,
    op: str,
    names: Sequence[str],
    call: Callable[[bool], Tensors],
    rule: Callable[[Tensors, dict[str, Any]], Sequence[np.ndarray]],
    attributes: dict[str, Any],
    attribute_types: Mapping[str, type],
    tables: AbstractSet[str],
    needed: Collection[str],
    results: Callable[[Tensors], list[tuple[str, int]]],
    numbers: Mapping[str, Sequence[int]],
) -> Attack:
    """Draw an attack from `call`, whose argument says whether tables are wild; most have an error.

    `attribute_types` are the attributes and their types, `needed` inputs that ONNX does not let a model leave out.
    """
    if d.chance(0.15):
        name = d.pick(tuple(attributes) if d.chance(0.4) else tuple(attribute_types))
        attributes[name] = d.pick(_WILD[attribute_types[name]])
    first = call(False)
    input_names = tuple(first)
    types = dict.fromkeys(tables, "int64") if d.chance(0.2) else {}
    types |= {d.pick(input_names): d.pick((*SIGNED, *ANY))} if d.chance(0.07) else {}
    ranks = {d.pick(input_names): d.pick((-1, 1))} if d.chance(0.06) else {}
    holes = [name for name in input_names if name not in needed]
    hole = d.pick(holes) if d.chance(0.08) else ""
    same = d.chance(0.75)

    def feed() -> Arrays:
        tensors = {name: x.copy() for name, x in (first if same else call(d.chance(0.5))).items()}
        for name, kind in types.items():
            if name in tensors:
                with np.errstate(all="ignore"):
                    tensors[name] = tensors[name].astype(kind)
        wild = sorted(tables & tensors.keys())
        for name in [d.pick(wild) for _ in range(d.pick((0, 0, 0, 1, 1, 2))) if wild]:
            if tensors[name].dtype.name in SIGNED:
                tensors[name] = wild_table(d, tensors[name])
        for name, change in ranks.items():
            x = tensors[name]
            tensors[name] = x[None] if change > 0 else x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[:1].reshape(())
        if d.chance(0.12):
            name = d.pick(input_names)
            tensors[name] = np.resize(tensors[name], d.corrupted(tensors[name].shape)).astype(tensors[name].dtype)
        arrays: Arrays = [None if name == hole else tensors.get(name) for name in names]
        while arrays[-1] is None:
            arrays.pop()
        return arrays

    def answer(*arrays: np.ndarray | None) -> Answer:
        tensors = {name: x for name, x in zip(names, arrays) if x is not None}
        expected = rule(tensors, attributes)
        if any(np.isnan(x.astype(np.float64)).any() for x in expected[:1]):
            raise Unspecified("rows of nobody, or of numbers that are none")
        return [x.astype(kind) for x, (kind, _) in zip(expected, output_types)]

    output_types = results(first)
    return Attack(
        op,
        feed,
        answer,
        outputs=len(output_types),
        domain=MICROSOFT,
        opset=21,
        attributes=attributes,
        parameters=[names.index(name) for name in _PARAMETERS if name in names],
        numbers=[(names.index(name), axis) for name, axes in numbers.items() for axis in axes],
        close=_CLOSE[first["query"].dtype.name],
        results=output_types,
    )  # fmt: skip


def check_shapes(tensors: Tensors, **shapes: Sequence[int | None]) -> None:
    for name, shape in shapes.items():
        if name in tensors:
            fits = len(tensors[name].shape) == len(shape) and all(
                w in (None, s) for s, w in zip(tensors[name].shape, shape)
            )
            require(fits, f"{name} is {tensors[name].shape} instead of {shape}")


def check_types(tensors: Tensors, kinds: Collection[str], *names: str) -> None:
    for name in names:
        if name in tensors:
            require(tensors[name].dtype.name in kinds, f"{name} is {tensors[name].dtype}")


_OP = "DecoderMaskedMultiHeadAttention"
_DECODER: dict[str, type] = {
    **dict.fromkeys(("num_heads", "past_present_share_buffer", "output_qk"), int),
    **dict.fromkeys(("scale", "mask_filter_value"), float),
}
_LENGTHS = {"past_sequence_length", "beam_width", "cache_indirection", "mask"}
_DECODER_NUMBERS = {
    **dict.fromkeys(("query", "key", "value"), (2, 3)),
    **dict.fromkeys(("past_key", "past_value"), (1, 3)),
    "cache_indirection": (1,),
    "bias": (0,),
}


@attacks(_OP, domain=MICROSOFT)
def room(d: Draw, op: str) -> Attack:
    chooser = random.Random(d.int(0, 2**31))
    case = next(c for c in iter(lambda: decoder.drawn(chooser), None) if c["operator"] == op)
    case["dtype"] = d.pick(("float32", case["dtype"], "bfloat16", "float64"))
    outputs = 1 if case["form"] == "cross" else 4 if case["qk"] else d.pick((1, 3))

    def results(tensors: Tensors) -> list[tuple[str, int]]:
        return [(case["dtype"], rank) for rank in (3, 4, 4, 4)[:outputs]]

    def rule(tensors: Tensors, said: dict[str, Any]) -> Sequence[np.ndarray]:
        return _decoded(tensors, said, case)[:outputs]

    return attack(
        d, op, decoder.INPUTS[op], lambda _: decoder.arrays(case, d.rng), rule, decoder.attributes(case), _DECODER,
        _LENGTHS, {"query"}, results, _DECODER_NUMBERS,
    )  # fmt: skip


def _decoded(tensors: Tensors, said: dict[str, Any], case: dict[str, Any]) -> list[np.ndarray]:
    require("query" in tensors, "no query")
    check_types(tensors, (*FLOATS, "float64"), "query")
    check_types(tensors, (tensors["query"].dtype.name,), "key", "value", "past_key", "past_value", "bias")
    check_types(tensors, SIGNED, "past_sequence_length", "cache_indirection")
    check_types(tensors, ("bool", "int8", "int16", *SIGNED), "mask")
    heads, share = said["num_heads"], said.get("past_present_share_buffer", 0)
    require(heads > 0, f"{heads} heads")
    filtered = said.get("mask_filter_value", -10000.0)
    require(math.isfinite(filtered), "mask_filter_value")
    require(said.get("output_qk") or not case["qk"] or case["form"] == "cross", "output_qk")
    form, size, keys = _decoder_fits(tensors, heads, share)
    batch, past = len(tensors["query"]), keys - 1
    check_shapes(tensors, mask=(None, None))
    if "mask" in tensors and tensors["mask"].shape[1] == 1 != keys:
        raise Unspecified("a mask of one key")
    if "attention_bias" in tensors and tensors["attention_bias"].shape[-1:] == (1,) != (keys,):
        raise Unspecified("a bias of one key")
    check_shapes(tensors, mask=(batch, keys), attention_bias=(None, None, 1, keys), bias=(3 * heads * size,))
    if "attention_bias" in tensors:
        require(all(s in (1, w) for s, w in zip(tensors["attention_bias"].shape, (batch, heads))), "attention_bias")
    beams = tensors["cache_indirection"].shape[1] if form == "beams" else 1
    _best_records(tensors, said, beams, past)
    if not size or not batch or not keys:
        raise Unspecified("attention of nothing")
    told = {"scale": said.get("scale"), "filter": said.get("mask_filter_value"), "form": form, "beams": beams}
    answer = decoder.reference({**case, **told, "heads": heads, "size": size}, tensors)
    return [answer[name] for name in decoder.OUTPUTS if name in answer]


def _decoder_fits(tensors: Tensors, heads: int, share: int) -> tuple[str, int, int]:
    """Return the form of the call, the head size and the number of keys."""
    query, ranks = tensors["query"], tuple(tensors[n].ndim if n in tensors else 0 for n in ("key", "value"))
    require(query.ndim == 3 and query.shape[1] == 1, "query")
    require(ranks in ((0, 0), (3, 3), (4, 4)), "key and value")
    width = query.shape[2]
    require(width % (heads * (1 if any(ranks) else 3)) == 0, f"{heads} heads of {width}")
    batch, size = len(query), width // heads // (1 if any(ranks) else 3)
    cached = [name in tensors for name in ("past_key", "past_value", "past_sequence_length", "cache_indirection")]
    require(cached[0] == cached[1] == (ranks != (4, 4)), "caches")
    if ranks == (4, 4):
        require(not any(cached), "a cache next to an encoder")
        length = tensors["key"].shape[2]
        check_shapes(tensors, key=(batch, heads, length, size), value=(batch, heads, length, None))
        _same(size, tensors["value"].shape[3])
        return "cross", size, length
    check_shapes(
        tensors, key=(batch, 1, heads * size), value=(batch, 1, None), past_key=(None,) * 4, past_value=(None,) * 4
    )
    v_size = tensors["value"].shape[2] // heads if "value" in tensors else size
    require("value" not in tensors or tensors["value"].shape[2] % heads == 0, "value")
    slots = tensors["past_key"].shape[2]
    check_shapes(tensors, past_key=(batch, heads, None, size), past_value=(batch, heads, slots, v_size))
    require(share or not cached[3], "beams without room")
    require(not share or cached[2], "no past_sequence_length")
    form = "packed" if not any(ranks) else "shared"
    if share:
        require(tensors["past_sequence_length"].shape in ((), (1,)), "past_sequence_length")
        past = int(tensors["past_sequence_length"].ravel()[0])
        require(0 <= past < slots, f"{past} of {slots}")
        slots = past
    if cached[3]:
        beams = tensors["cache_indirection"].shape
        require(len(beams) == 3 and beams[1] and beams[0] * beams[1] == batch and beams[2] >= slots, f"beams {beams}")
    _same(size, v_size)
    if not any(ranks) and (not share or cached[3]):
        raise Unspecified("packed rows with beams or without room")
    return "beams" if cached[3] else form if share else "grown", size, slots + 1


def _same(size: int, v_size: int) -> None:
    if size != v_size:
        raise Unspecified("values of another size")


def _best_records(tensors: Tensors, said: dict[str, Any], beams: int, past: int) -> None:
    """Raise Unspecified for inputs without meaning, or where the documentation leaves the outcome open."""
    if "beam_width" in tensors:
        width = tensors["beam_width"]
        if width.dtype.name not in SIGNED or width.shape != (1,):
            raise Unspecified("beam_width of another type or shape")
        require(int(width[0]) == beams, f"beam_width {width} of {beams}")
    if "cache_indirection" in tensors:
        table = tensors["cache_indirection"][:, :, :past]
        if ((table < 0) | (table >= beams)).any():
            raise Unspecified("tokens of no beam")
    if "mask" in tensors and (tensors["mask"] <= 0).all(1).any():
        raise Unspecified("no key at all")
    if "mask" in tensors and (np.abs(tensors["mask"].astype(np.float64)) >= 2**31).any():
        raise Unspecified("a mask of large numbers")
    if "attention_bias" in tensors and tensors["attention_bias"].dtype != tensors["query"].dtype:
        raise Unspecified("attention_bias of another type")
    if not 0 <= said.get("scale", 0) < 1e30 or said.get("mask_filter_value", -1) > 0:
        raise Unspecified("numbers that nobody uses")
    if said.get("past_present_share_buffer", 0) not in (0, 1) or said.get("output_qk", 0) not in (0, 1):
        raise Unspecified("flags")
    if not said.get("past_present_share_buffer") and "past_sequence_length" in tensors:
        raise Unspecified("past_sequence_length without use")
