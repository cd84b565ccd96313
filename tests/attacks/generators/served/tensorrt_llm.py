"""TensorRT-LLM's GptAttention: broken attributes and shapes, and wild lengths, phases, windows, blocks and beams.

Calls are those of tests/serving, whose float64 reference answers what is legal. Shapes, types and attributes that do
not fit are refused. Contents that contradict each other, or lead outside the cache, may end in any way that harms
nobody.
"""

from __future__ import annotations

import json
import random
from typing import Any

import ml_dtypes
import numpy as np

from lowering.functions.gpt_checks import ArgumentError, check_call
from lowering.functions.gpt_checks.rows import check_qkv
from lowering.functions.gpt_checks.settings import check_settings
from lowering.ops.tensorrt_llm import DOMAIN
from lowering.ops.tensorrt_llm.gpt_attention import INPUTS
from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks
from tests.attacks.draw import ANY, Draw
from tests.attacks.generators.served.gpt_contents import contents_fit
from tests.attacks.generators.served.gpt_form import (
    ATTRIBUTES,
    BY_REQUEST,
    DEFAULTS,
    FLOAT,
    INTS,
    NUMBERS,
    PARAMETERS,
    READ,
    SIGNED,
    WILD_FLOATS,
    WILD_INTS,
    WILD_JSON,
    WILD_LENGTHS,
    WRONG_TYPES,
    Form,
    Tensors,
)
from tests.attacks.generators.served.gpt_rules import attributes_fit, check_specified, shapes_fit, types_fit
from tests.serving.gpt_attention import gpt_attention_reference as reference
from tests.serving.gpt_attention.gpt_cache_reference import E4M3, FP8_MODE, INT8_MODE, to_e4m3
from tests.serving.gpt_attention.gpt_call_drawing import Drawing
from tests.serving.gpt_attention.gpt_case_features import Features, complete


@attacks("GptAttention", domain=DOMAIN)
def gpt(d: Draw, op: str) -> Attack:
    chooser = random.Random(d.int(0, 2**31))
    fixed = {"parts": "one", "names": False}
    case = complete(fixed, chooser, 500, plain=0.85 if d.chance(0.75) else 0.3)
    assert case is not None
    seed = d.int(0, 2**31)
    first = Drawing(case, np.random.default_rng(seed))
    attributes = _attributes_of(first)
    corrupted = None
    if d.chance(0.15):
        corrupted = _corrupt_attribute(d, attributes)
    names = tuple(_inputs_of(first))
    types = {d.pick(names): d.pick((*SIGNED, *ANY))} if d.chance(0.05) else {}
    ranks = {d.pick(names): d.pick((-1, 1))} if d.chance(0.05) else {}
    holes = frozenset([d.pick(names)]) if d.chance(0.06) else frozenset[str]()
    form = Form(case, attributes, corrupted, types, ranks, holes)
    form.outputs.extend(_outputs(d, form, _inputs_of(first)))
    same = d.chance(0.75)  # of the same sizes in all calls

    def feed() -> Arrays:
        drawing = Drawing(case, np.random.default_rng(seed if same else d.int(0, 2**31)))
        return _feed(d, form, _inputs_of(drawing), same)

    return Attack(
        op,
        feed,
        lambda *arrays: _rule(form, arrays),
        outputs=len(form.outputs),
        domain=DOMAIN,
        attributes=attributes,
        parameters=[INPUTS.index(name) for name in PARAMETERS],
        numbers=[(INPUTS.index(name), axis) for name, axes in NUMBERS.items() for axis in axes],
        close=_tolerance(case),
        results=form.outputs,
    )


def _tolerance(case: Features) -> float:
    if case.fp8_output or case.fp8_context_fmha:  # a step of e4m3
        return 0.13
    return 1e-4 if case.dtype == "float32" else 2e-2


def _outputs(d: Draw, form: Form, tensors: Tensors) -> list[tuple[str, int]]:
    """Return types and ranks: the cache is an output, so that no input is written to."""
    qkv = tensors["qkv"]
    outputs = [("float8_e4m3fn" if "attention_output_orig_quant_scale" in tensors else qkv.dtype.name, qkv.ndim)]
    if form.said("use_cache") or d.chance(0.05):
        pool = tensors.get("past_key_value", qkv)
        outputs.append((pool.dtype.name, pool.ndim))
        if d.chance(0.5):
            outputs.append(("float32", qkv.ndim))
    return outputs


# -- what is drawn ----------------------------------------------------------------------------------------------------


def _attributes_of(drawing: Drawing) -> dict[str, Any]:
    """Return the arguments that are not arrays, as a node has them."""
    attributes: dict[str, Any] = {}
    for name, value in drawing.arguments.items():
        if name not in ATTRIBUTES or value is None:
            continue
        if name == "rope_scaling_config":
            value = json.dumps(value)
        elif name in FLOAT:
            value = float(np.float32(value))
        attributes[name] = int(value) if isinstance(value, (bool, np.bool_)) else value
    return attributes


def _inputs_of(drawing: Drawing) -> Tensors:
    """Return the arrays by name; of several pools the one of the layer."""
    arguments = dict(drawing.arguments)
    tensors = {name: np.asarray(arguments[name]) for name in INPUTS if arguments.get(name) is not None}
    if drawing.case.cache != "none":
        tensors["past_key_value"] = drawing.pool()
    if "host_sink_token_length" in tensors:
        tensors["host_sink_token_length"] = tensors["host_sink_token_length"].reshape(1).astype(drawing.ints)
    return tensors


def _corrupt_attribute(d: Draw, attributes: dict[str, Any]) -> str:
    """Change or remove an attribute, in half of the cases one that the node has; return its name."""
    name = d.pick(tuple(attributes) if d.chance(0.5) else ATTRIBUTES)
    if d.chance(0.05):
        attributes.pop(name, None)
    elif d.chance(0.1):
        attributes[name] = d.pick(WRONG_TYPES)
    elif name == "rope_scaling_config":
        attributes[name] = d.pick(WILD_JSON)
    elif name in FLOAT:
        attributes[name] = float(np.float32(d.pick(WILD_FLOATS)))
    else:
        attributes[name] = d.pick((*WILD_INTS, attributes.get(name, 0) + 1))
    return name


def _feed(d: Draw, form: Form, tensors: Tensors, same: bool) -> Arrays:
    """Return the inputs of a call in order, most of the time with an error."""
    ints = [name for name in (*INTS, *READ) if name in tensors and name not in form.holes]
    for _ in range(d.pick((0, 0, 0, 1, 1, 1, 2, 3))):
        name = d.pick(ints)
        tensors[name] = wild_table(d, tensors[name])
    if d.chance(0.04):
        tensors = _without_requests(tensors)
    for name, change in form.ranks.items():
        tensors[name] = tensors[name][None] if change > 0 else _flatter(tensors[name])
    if d.chance(0.08 if same else 0.15):
        name = d.pick(tuple(tensors))
        shape = list(d.corrupted(tensors[name].shape))
        if shape and d.chance(0.4):
            shape[d.int(0, len(shape) - 1)] = 0
        tensors[name] = np.resize(tensors[name], shape).astype(tensors[name].dtype)
    arrays: Arrays = [None if name in form.holes else tensors.get(name) for name in INPUTS]
    while arrays[-1] is None:
        arrays.pop()
    with np.errstate(all="ignore"):
        for name, kind in form.types.items():
            k = INPUTS.index(name)
            array = arrays[k] if k < len(arrays) else None
            if array is not None:
                arrays[k] = array.astype(kind)
    return arrays


def wild_table(d: Draw, array: np.ndarray) -> np.ndarray:
    """Corrupt an input that gives positions."""
    if not array.size:
        return array
    ends, result = np.iinfo(array.dtype), array.astype(np.int64)
    way = d.int(0, 6)
    if way == 0:
        return np.ascontiguousarray(array[::-1])
    if way == 1:
        result = result + d.pick((-1, 1, 3, 100))
    elif way == 2:
        result = np.full_like(result, min(max(d.pick(WILD_LENGTHS), ends.min), ends.max))
    elif way == 3:
        result = d.rng.integers(-2, 40, result.shape)
    else:
        for _ in range(d.int(1, 3)):
            k = d.int(0, result.size - 1)
            near = int(result.flat[k]) + d.pick((-1, 1))
            result.flat[k] = min(max(d.pick((near, near, *WILD_LENGTHS)), ends.min), ends.max)
    return np.clip(result, ends.min, ends.max).astype(array.dtype)


def _flatter(array: np.ndarray) -> np.ndarray:
    if array.ndim < 2:
        return np.array(array.ravel()[0] if array.size else 0, array.dtype)
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _without_requests(tensors: Tensors) -> Tensors:
    """Return the call without requests. Caches stay."""
    axes = dict.fromkeys((*BY_REQUEST, "sequence_length", "encoder_input_lengths", "cache_indirection", "qkv"), 0)
    axes |= dict.fromkeys(("attention_mask", "attention_packed_mask", "cross_kv"), 0) | {"kv_cache_block_offsets": -4}
    return {
        name: np.take(x, [], axis=axes[name]) if name in axes and x.ndim >= -axes[name] else x
        for name, x in tensors.items()
    }


# -- what must come of them -------------------------------------------------------------------------------------------


def _rule(form: Form, arrays: tuple[np.ndarray | None, ...]) -> Answer:
    tensors = {name: array for name, array in zip(INPUTS, arrays) if array is not None}
    attributes_fit(form)
    types_fit(form, tensors)
    shapes_fit(form, tensors)
    check_specified(form, tensors)
    arguments = _arguments(form, tensors)
    try:
        check_call(tensors["qkv"], DEFAULTS | arguments, contents=False)
    except (ArgumentError, NotImplementedError) as error:
        raise Unspecified(str(error)) from error
    settings = check_settings(DEFAULTS | arguments)
    contents_fit(DEFAULTS | arguments, settings, check_qkv(tensors["qkv"], DEFAULTS | arguments, settings))
    try:
        check_call(tensors["qkv"], DEFAULTS | arguments)
    except ArgumentError as error:
        assert "differ in row" in str(error), error  # the function refuses no other legal call
        raise Unspecified(str(error)) from error  # runs compare no masks
    return _answer(form, tensors, arguments)


def _arguments(form: Form, tensors: Tensors) -> dict[str, Any]:
    """Return arguments as the function takes them: pools in a list, as many as there are tables of blocks."""
    arguments: dict[str, Any] = {name: x for name, x in tensors.items() if name != "qkv"}
    for name, value in form.attributes.items():
        if name == "rope_scaling_config":
            value = json.loads(value) if value else None
        if (name, value) != ("multi_block_mode", -1):
            arguments[name] = value
    offsets = tensors.get("kv_cache_block_offsets")
    if offsets is not None and offsets.ndim == 5:
        arguments["host_kv_cache_pool_pointers"] = [arguments.pop("past_key_value")] * len(offsets)
    return arguments


def _answer(form: Form, tensors: Tensors, arguments: dict[str, Any]) -> Answer:
    qkv, cache = tensors["qkv"], tensors.get("past_key_value")
    heads, size = form.said("num_heads"), form.said("hidden_size_per_head")
    kinds = [np.dtype(getattr(ml_dtypes, kind, kind)) for kind, _ in form.outputs]
    if not len(tensors["context_lengths"]):
        shapes = [(*qkv.shape[:-1], heads * size), (), (*qkv.shape[:-1], heads)]
        if qkv.size:
            raise Unspecified("rows of nobody")
        empty = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds)]
        return [*empty[:1], *([] if cache is None else [cache]), *empty[2:]]
    _check_certain_rounding(form, qkv, arguments)
    context, lse, caches = reference.gpt_attention(qkv, **arguments)
    if np.isnan(lse).any() or np.isnan(context).any():
        raise Unspecified("keys that are not numbers")
    mapping = tensors.get("host_kv_cache_pool_mapping")
    pool = 0 if mapping is None else int(mapping[form.said("layer_idx"), 0])
    context = to_e4m3(context.astype(np.float32)) if kinds[0] == E4M3 else context.astype(kinds[0])
    return [context, *(caches[pool : pool + 1]), lse.astype(np.float32)][: len(kinds)]


def _check_certain_rounding(form: Form, qkv: np.ndarray, arguments: dict[str, Any]) -> None:
    """Raise Unspecified where float32 may round a key to either of two quantized values."""
    if not form.said("kv_cache_quant_mode") & (INT8_MODE | FP8_MODE):
        return
    low, high = reference.cache_bounds(qkv, **arguments)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(low, high))
    if not same or reference.uncertain_keys(qkv, **arguments).any():
        raise Unspecified("a key between two quantized values")
