"""Quantized caches: int8, float8_e4m3fn, or packed int4, with one scale or one scale for each channel of a head.

A quantized value is the element times the inverse of its scale, in float32, rounded to even and saturated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from ....attention.record.cache_layout import KvQuantization, QuantizedType
from ....importing.node import Node
from ....importing.values import Value, prod
from ...helpers import symbolic
from ...helpers.assertions import require
from ...helpers.compute import Element
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import read_choice, require_dtype

_TYPES: dict[str, QuantizedType] = {"int8": "int8", "float8_e4m3fn": "float8_e4m3fn", "uint8": "int4"}
"""The type of quantized values, by the type of the cache."""

_QUANTIZATION_KINDS = ("NONE", "PER_TENSOR", "PER_CHANNEL")


@dataclass(frozen=True)
class CacheQuantization:
    """The quantization of caches, with format None if caches are not quantized.

    scales are arguments of the attention, factors those of the kernel that quantizes.
    """

    format: KvQuantization | None
    scales: dict[str, Value]
    factors: dict[str, Value]


def read_cache_quantization(
    node: Node, heads: tuple[int, int], dtype: str, caches: Sequence[tuple[str, Value | None, Value | None]]
) -> CacheQuantization:
    """Read the quantization of caches.

    Each cache is "k" or "v", with its tensor and its scale. heads is the number of heads, and their size. dtype is the
    type of the rows. A missing cache is treated as the first one.

    Raises:
        NodeError: the attributes, types and scales do not fit each other.
    """
    (_, first, first_scale), *_ = caches
    assert first is not None
    kinds = _read_kinds(node, dtype, caches)
    if first.dtype == dtype:
        return CacheQuantization(None, {}, {})
    if first.dtype not in _TYPES:
        raise node.error(
            "node.dtype_unsupported", f"the caches are {first.dtype}.", "Use int8, float8e4m3fn, or uint8 for 4 bits."
        )
    quantized_dtype = _TYPES[first.dtype]
    if quantized_dtype == "int4" and heads[1] % 2:
        raise node.error(
            "node.head_size_not_even",
            f"a head has {heads[1]} elements, and 4-bit values are stored in pairs.",
            "Use an even head size.",
        )
    is_per_channel = "PER_CHANNEL" in kinds.values()
    scales: dict[str, Value] = {}
    for name, cache, scale in caches:
        scale_input = first_scale if cache is None else scale
        assert scale_input is not None
        scales[f"{name}_scale"] = _read_scale(
            node, f"{name}_scale", scale_input, kinds[name], heads if is_per_channel else None
        )
    factor = _compute_factor(node, scales, heads if is_per_channel else None)
    return CacheQuantization(KvQuantization(quantized_dtype, 0, channels=is_per_channel), scales, {"factor": factor})


def _read_kinds(node: Node, dtype: str, caches: Sequence[tuple[str, Value | None, Value | None]]) -> dict[str, str]:
    """Return the kind of quantization of each cache, after checking that its type and its scale fit."""
    first = caches[0][1]
    assert first is not None
    kinds: dict[str, str] = {}
    for name, cache, scale in caches:
        kind = read_choice(node, f"{name}_quant_type", "NONE", _QUANTIZATION_KINDS)
        if cache is None:
            if kind != "NONE" or scale is not None:
                raise node.error(
                    "node.cache_missing",
                    f"{name}_quant_type or {name}_scale is given, and its cache is missing.",
                    "Remove it, or give the cache.",
                )
            kinds[name] = kinds[caches[0][0]]
            continue
        if cache.dtype != first.dtype:
            raise node.error(
                "node.dtype_mismatch", f"the caches are {first.dtype} and {cache.dtype}.", "Give them the same type."
            )
        if (kind == "NONE") != (cache.dtype == dtype):
            raise node.error(
                "node.cache_dtype_mismatch",
                f"{node.describe(cache, False)} is {cache.dtype}, query is {dtype}, and {name}_quant_type is '{kind}'.",
                f"Make it {dtype} for 'NONE', else int8, float8e4m3fn, or uint8 for 4 bits.",
            )
        if (kind == "NONE") != (scale is None):
            raise node.error(
                "node.scale_mismatch",
                f"{name}_quant_type is '{kind}', and {name}_scale is {'missing' if scale is None else 'given'}.",
                "Give a scale for quantized values only.",
            )
        kinds[name] = kind
    return kinds


def _compute_factor(node: Node, scales: Mapping[str, Value], heads: tuple[int, int] | None) -> Value:
    """Return the inverses of the scales [2], or for scales per channel [2, heads, size]; 0 for 0."""
    expanded = [node.emit(relax.op.expand_dims(node.tensor(scale), 0)) for scale in scales.values()]
    stacked = node.emit(relax.op.concat([x.expr for x in expanded], axis=0))
    shape = (2,) if heads is None else (2, *heads)

    def inverse(index: tuple[Element, ...], scale: ElementReader) -> Element:
        value, zero = scale(*index, *((tirx.const(0, "int64"),) if heads is None else ())), tirx.const(0.0, "float32")
        return tirx.Select(tirx.EQ(value, zero), zero, tirx.const(1.0, "float32") / value)

    return compute(node, "factor", inverse, [stacked], shape)


def _read_scale(node: Node, name: str, scale: Value, kind: str, heads: tuple[int, int] | None) -> Value:
    """Return the scale as [1], or for scales per channel as [heads, size]."""
    require_dtype(node, name, scale, "float32")
    expected = 1
    if kind == "PER_CHANNEL":
        assert heads is not None
        expected = heads[0] * heads[1]
    count = node.simplify(prod(scale.shape))
    text = f"{name} has {{}} elements, and quantization {kind} takes {expected}."
    scale = require(node, scale, symbolic.equal(count, expected), "node.scale_size_mismatch", text, count)
    flat = node.reshape_to(scale, (expected,))
    if heads is None:
        return flat
    if kind == "PER_CHANNEL":
        return node.reshape_to(flat, heads)
    return compute(node, name, lambda _, x: x(tirx.const(0, "int64")), [flat], heads)


def reject_quantization(node: Node, k_scale: Value | None, v_scale: Value | None) -> None:
    """Reject quantization attributes and scales of a node without caches."""
    for name in ("k_quant_type", "v_quant_type"):
        if node.attr(name, "NONE") != "NONE":
            problem = f"attribute {name} is '{node.attr(name)}', and past_key is missing."
            raise node.error(
                "group_query_attention.cache_missing",
                problem,
                "Give caches of quantized values, which may be empty: their type defines the quantization.",
            )
    if k_scale is not None or v_scale is not None:
        raise node.error(
            "group_query_attention.cache_missing",
            "k_scale or v_scale is given, and past_key is missing.",
            "Give caches of quantized values; they may be empty.",
        )


def check_cache_width(node: Node, cache_format: KvQuantization | None) -> None:
    """Raise NodeError if attribute kv_cache_bit_width is not the width of the cached values."""
    width, expected = node.attr("kv_cache_bit_width", 0), 0 if cache_format is None else 8 // cache_format.packing
    if width not in (0, expected):
        remedy = "Use caches of int8 or float8e4m3fn for 8 bits, of uint8 for 4, and k_quant_type and v_quant_type."
        raise node.error(
            "group_query_attention.bit_width_mismatch",
            f"attribute kv_cache_bit_width is {width}, for caches of {expected or 'no'} bits.",
            remedy,
        )
