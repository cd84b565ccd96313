"""The cache as a CacheLayout: blocks of tokens of one kind (K or V) and one layer, found by a block table.

A paged cache is a pool of such blocks. A contiguous one, [rows, 2, heads, tokens, size], is a pool, too: each row has
one long block of keys and one of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.codegen.parameters import int64
from ...attention.kv_write import Columns, KvWrite, Rotary
from ...attention.record.cache_layout import Beams, CacheLayout, GivenRing, KvQuantization, Pages
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, prod, static
from ..attention.kv_write import kv_write
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.compute import number
from ..helpers.kernels import compute
from ..helpers.requirements import require_input, require_rank, require_tensor
from .requests import GptRequests, cast_to_int64, check_ints, require_nonempty
from .rows import Projections
from .settings import GptSettings

Read = Callable[..., Any]


@dataclass(frozen=True)
class GptCache:
    """The pool [blocks, heads, tokens, size] and its table, as the attention record and the kernels use them.

    shape is that of the array that the pool is a view of. factors [2] are the numbers by which K and V are multiplied
    to be quantized.
    """

    layout: CacheLayout
    tensors: dict[str, Value]
    shape: Shape
    factors: Value | None

    @property
    def scales(self) -> Value | None:
        """Return the scales [2] of quantized values, or None."""
        return self.tensors.get("kv_scale")


def read_tokens_per_block(node: Node, pool: Value, paged: bool) -> int:
    """Return the number of tokens in a block of a paged cache; 0 for a contiguous one."""
    if not paged:
        require_rank(node, "past_key_value", pool, "[rows, 2, heads, tokens, size]")
        return 0
    form = "[blocks, 2, heads, tokens, size] or [blocks, layers, 2, heads, tokens, size]"
    require_rank(node, "past_key_value", pool, form)
    tokens = number(node, "the number of tokens in a block of past_key_value", pool.shape[-2])
    if tokens < 1 or tokens & (tokens - 1):
        raise node.error(
            "gpt_attention.block_size_unsupported",
            f"blocks of past_key_value have {tokens} tokens.",
            "Use a power of two.",
        )
    return tokens


def count_slots(inputs: Mapping[str, Value], block: int) -> Size:
    """Return the number of tokens that a sequence has room for."""
    if not block:
        return inputs["past_key_value"].shape[-2]
    return inputs["kv_cache_block_offsets"].shape[-1] * block


def read_cache(
    node: Node,
    settings: GptSettings,
    inputs: Mapping[str, Value],
    requests: GptRequests,
    beams: int,
    has_ring: bool,
    dtype: str,
) -> GptCache:
    pool, offsets = inputs["past_key_value"], inputs.get("kv_cache_block_offsets")
    expected = settings.quantized_dtype or dtype
    if pool.dtype != expected:
        raise node.error(
            "node.cache_dtype_mismatch",
            f"past_key_value is {pool.dtype}; qkv is {dtype} and kv_cache_quant_mode requires {expected}.",
            f"Make it {expected}.",
        )
    heads, size = settings.kv_heads, settings.size
    for axis, extent, meaning in ((-4, 2, "K and V"), (-3, heads, "num_kv_heads"), (-1, size, "hidden_size_per_head")):
        if isinstance(pool.shape[axis], int) and pool.shape[axis] != extent:
            raise node.error(
                "node.shape_mismatch",
                f"dimension {axis} of past_key_value is {pool.shape[axis]}.",
                f"Make it {extent} ({meaning}).",
            )
    pool = assert_shape(node, pool, (*pool.shape[:-4], 2, heads, pool.shape[-2], size))
    pool = require_nonempty(node, "past_key_value", pool, *range(pool.rank - 4), pool.rank - 2)
    if offsets is None:
        rows, text = pool.shape[0], "past_key_value has {} rows, for {} requests and beams."
        pool = require(
            node,
            pool,
            symbolic.less_or_equal(requests.sequences, rows),
            "node.cache_too_small",
            text,
            rows,
            requests.sequences,
        )
    block = read_tokens_per_block(node, pool, offsets is not None)
    count = node.simplify(prod(pool.shape[:-4]) * 2)
    view = node.reshape_to(pool, (count, heads, pool.shape[-2], size))
    table = _number_row_blocks(node, requests, beams, settings) if offsets is None else None
    if offsets is not None:
        table = _number_pool_blocks(
            node, settings, offsets, inputs.get("host_kv_cache_pool_mapping"), requests, beams, pool
        )
    assert table is not None
    quantization = KvQuantization(settings.quantized_dtype, 0) if settings.quantized_dtype else None
    layout = CacheLayout(
        "phtd", Pages(block or None, "page", apart=True), GivenRing() if has_ring else None, None, quantization
    )
    tensors = {"kv": view, "pages": table, **({"ring": requests["ring"]} if has_ring else {})}
    if quantization is None:
        return GptCache(layout, tensors, pool.shape, None)
    scales = {
        name: _read_scales(node, name, inputs.get(name)) for name in ("kv_quant_orig_scale", "kv_orig_quant_scale")
    }
    tensors["kv_scale"] = scales["kv_quant_orig_scale"]
    return GptCache(layout, tensors, pool.shape, scales["kv_orig_quant_scale"])


def redirect_to_beams(node: Node, cache: GptCache, requests: GptRequests, indirection: Value, beams: int) -> GptCache:
    """Return the cache with keys after a prompt read from the beams that cache_indirection names."""
    beam_tensors = {"prompts": requests["prompts"], "beam_of": cast_to_int64(node, indirection)}
    return replace(cache, layout=replace(cache.layout, beams=Beams(beams)), tensors={**cache.tensors, **beam_tensors})


def append_rows(
    node: Node,
    cache: GptCache,
    rows: Value,
    columns: Columns,
    heads: int,
    inputs: Mapping[str, Value | None],
    rotary: Rotary | None,
    batch: Size,
) -> GptCache:
    """Return the cache with new rows.

    inputs has row_starts, row_counts and starts, and bias and angles, which may be None.
    """
    size = cache.tensors["kv"].shape[-1]
    arguments = {name: value for name, value in inputs.items() if value is not None}
    record = KvWrite(
        static(batch),
        heads,
        size,
        size,
        rows.dtype,
        cache.layout,
        columns,
        bias="bias" in arguments,
        rotary=rotary if "angles" in arguments else None,
    )
    arguments |= {"new": rows, **cache.tensors}
    if cache.factors is not None:
        arguments["factor"] = cache.factors
    return replace(cache, tensors={**cache.tensors, **kv_write(node, record, arguments)})


def append_projections(node: Node, cache: GptCache, rows: Projections, requests: GptRequests) -> GptCache:
    """Return the cache with the keys and values of this call; StreamingLLM caches keys before rotation."""
    settings = rows.settings
    first, rotary = settings.heads * settings.size, settings.rotary
    columns = Columns(first, first + settings.kv_heads * settings.size, settings.width)
    rotation = None if rotary is None else Rotary(rotary.dim, rotary.is_interleaved)
    inputs = {
        "row_starts": requests["firsts"],
        "row_counts": requests["counts"],
        "starts": requests["past"],
        "bias": rows.bias,
        "angles": None if settings.is_streaming else rows.angles,
    }
    return append_rows(node, cache, rows.qkv, columns, settings.kv_heads, inputs, rotation, requests.sequences)


def restore_shape(node: Node, cache: GptCache) -> Value:
    """Return the cache array after the call, in its original shape."""
    return node.reshape_to(cache.tensors["kv"], cache.shape)


def _number_row_blocks(node: Node, requests: GptRequests, beams: int, settings: GptSettings) -> Value:
    """Return the blocks of a contiguous cache: row s has block 2 s for keys and 2 s + 1 for values."""

    def entry(index: tuple[Expr, ...]) -> Expr:
        row = index[0]
        if settings.is_cross:  # all beams share the cache of beam 0
            row = tirx.floordiv(row, int64(beams)) * beams
        return row * 2 + index[1]

    return compute(node, "blocks", entry, [], (requests.sequences, 2, 1), dtype="int64")


def _number_pool_blocks(
    node: Node,
    settings: GptSettings,
    offsets: Value,
    mapping: Value | None,
    requests: GptRequests,
    beams: int,
    pool: Value,
) -> Value:
    """Return kv_cache_block_offsets [(pools,) requests, beams, 2, columns] for this layer.

    The result is int64 [sequences, 2, columns]. Negative entries stay negative.
    """
    check_ints(node, "kv_cache_block_offsets", offsets, 4, 5)
    pool_axes = offsets.shape[:-4]
    offsets = assert_shape(node, offsets, (*pool_axes, requests.requests, offsets.shape[-3], 2, offsets.shape[-1]))
    offsets = require_nonempty(node, "kv_cache_block_offsets", offsets, *range(len(pool_axes)), offsets.rank - 3)
    arrays, layers, text = [offsets], pool.rank == 6, "{} has {{}} layers, and attribute layer_idx is {}."
    if mapping is not None:
        mapping = check_ints(node, "host_kv_cache_pool_mapping", mapping, 2)
        mapping = assert_shape(node, mapping, (mapping.shape[0], 2))
        message = text.format("host_kv_cache_pool_mapping", settings.layer)
        has_layer = symbolic.less_or_equal(settings.layer + 1, mapping.shape[0])
        arrays.append(require(node, mapping, has_layer, "node.layer_out_of_range", message, mapping.shape[0]))
    elif layers:
        message = text.format("past_key_value", settings.layer)
        has_layer = symbolic.less_or_equal(settings.layer + 1, pool.shape[1])
        arrays[0] = require(node, offsets, has_layer, "node.layer_out_of_range", message, pool.shape[1])
    sizes = [offsets.shape[-3], *pool_axes]

    def entry(index: tuple[Expr, ...], offset: Read, *operands: Any) -> Expr:
        mappings, extents = operands[: len(arrays) - 1], [size - int64(1) for size in operands[len(arrays) - 1 :]]
        sequence, kind, column = index
        request, beam = tirx.floordiv(sequence, int64(beams)), tirx.floormod(sequence, int64(beams))
        beam = int64(0) if settings.is_cross else tirx.min(beam, extents[0])
        pool_id, layer = int64(0), int64(settings.layer if layers else 0)
        if mappings:
            pool_id, layer = (mappings[0](int64(settings.layer), int64(k)).astype("int64") for k in range(2))
        pool_index = [tirx.max(tirx.min(pool_id, extents[-1]), int64(0)) for _ in pool_axes]
        block = offset(*pool_index, request, beam, kind, column).astype("int64")
        return tirx.Select(block < 0, int64(-1), block + layer * 2)

    return compute(node, "blocks", entry, arrays, (requests.sequences, 2, offsets.shape[-1]), sizes, dtype="int64")


def _read_scales(node: Node, name: str, value: Value | None) -> Value:
    """Return the scales [2], from one number for keys and values or one for each."""
    value = require_input(node, name, value, "Give it, as the quantized cache of kv_cache_quant_mode requires.")
    require_tensor(node, name, value, "float32", "[1] or [2]")
    count = number(node, f"the size of {name}", value.shape[0])
    if count not in (1, 2):
        raise node.error(
            "node.shape_mismatch", f"{name} has {count} elements.", "Use one, or one for keys and one for values."
        )
    return compute(node, "scales", lambda i, x: x(tirx.min(i[0], int64(count - 1))), [value], (2,))
