"""The cache as a CacheLayout: blocks of tokens of one kind (K or V) and one layer, which a table finds.

A paged cache is a pool of such blocks. A contiguous one, [rows, 2, heads, tokens, size], is a pool as well, in which
each row has one long block of keys and one of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from ...attention.cache_layout import Beams, CacheLayout, Codec, GivenRing, Pages
from ...attention.kv_write import Columns, KvWrite, Rotary
from ...attention.parameters import int64
from ...importing import symbolic
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, prod, static
from ..asserted import asserted, required
from ..kernels import compute
from ..kv_write import kv_write
from .requests import Requests, as_int64, at_least_one, check_ints
from .rows import Projections
from .settings import Settings

Read = Callable[..., Any]


@dataclass(frozen=True)
class Cache:
    """The pool [blocks, heads, tokens, size] and its table, as the record and the kernels know them; shape is that of
    the array which the pool is a view of. factors [2] are what numbers are multiplied by to be codes."""

    layout: CacheLayout
    tensors: dict[str, Value]
    shape: Shape
    factors: Value | None

    @property
    def scales(self) -> Value | None:
        """[2]: what codes mean."""
        return self.tensors.get("kv_scale")


def tokens_per_block(node: Node, pool: Value, paged: bool) -> int:
    """Of a paged cache; 0 of a contiguous one."""
    if not paged:
        if pool.rank != 5:
            raise node.error(f"past_key_value has rank {pool.rank}.", "Make it [rows, 2, heads, tokens, size].")
        return 0
    if pool.rank not in (5, 6):
        raise node.error(
            f"past_key_value has rank {pool.rank}.", "Make a pool [blocks, (layers,) 2, heads, tokens, size]."
        )
    tokens = number(node, "the number of tokens in a block of past_key_value", pool.shape[-2])
    if tokens < 1 or tokens & (tokens - 1):
        raise node.error(f"blocks of past_key_value have {tokens} tokens.", "Make it a power of two.")
    return tokens


def slots_of(given: Mapping[str, Value], block: int) -> Size:
    """How many tokens a sequence has room for."""
    if not block:
        return given["past_key_value"].shape[-2]
    return given["kv_cache_block_offsets"].shape[-1] * block


def cache_of(
    node: Node, settings: Settings, given: Mapping[str, Value], requests: Requests, beams: int, ringed: bool, dtype: str
) -> Cache:
    pool, offsets = given["past_key_value"], given.get("kv_cache_block_offsets")
    wanted = settings.codes or dtype
    if pool.dtype != wanted:
        raise node.error(
            f"past_key_value is {pool.dtype}; qkv is {dtype} and kv_cache_quant_mode asks for {wanted}.",
            f"Make it {wanted}.",
        )
    heads, size = settings.kv_heads, settings.size
    for axis, extent, what in ((-4, 2, "K and V"), (-3, heads, "num_kv_heads"), (-1, size, "hidden_size_per_head")):
        if isinstance(pool.shape[axis], int) and pool.shape[axis] != extent:
            raise node.error(
                f"dimension {axis} of past_key_value is {pool.shape[axis]}.", f"Make it {extent} ({what})."
            )
    pool = asserted(node, pool, (*pool.shape[:-4], 2, heads, pool.shape[-2], size))
    pool = at_least_one(node, "past_key_value", pool, *range(pool.rank - 4), pool.rank - 2)
    if offsets is None:
        rows, text = pool.shape[0], "past_key_value has {} rows, for {} requests and beams."
        pool = required(node, pool, symbolic.less_or_equal(requests.sequences, rows), text, rows, requests.sequences)
    block = tokens_per_block(node, pool, offsets is not None)
    count = node.simplify(prod(pool.shape[:-4]) * 2)
    view = node.reshaped(pool, (count, heads, pool.shape[-2], size))
    table = _rows(node, requests, beams, settings) if offsets is None else None
    if offsets is not None:
        table = _blocks(node, settings, offsets, given.get("host_kv_cache_pool_mapping"), requests, beams, pool)
    assert table is not None
    codec = Codec(settings.codes, 0) if settings.codes else None
    layout = CacheLayout("phtd", Pages(block or None, "page", apart=True), GivenRing() if ringed else None, None, codec)
    tensors = {"kv": view, "pages": table, **({"ring": requests["ring"]} if ringed else {})}
    if codec is None:
        return Cache(layout, tensors, pool.shape, None)
    scales = {name: _scales(node, name, given.get(name)) for name in ("kv_quant_orig_scale", "kv_orig_quant_scale")}
    tensors["kv_scale"] = scales["kv_quant_orig_scale"]
    return Cache(layout, tensors, pool.shape, scales["kv_orig_quant_scale"])


def read_by_beams(node: Node, cache: Cache, requests: Requests, indirection: Value, beams: int) -> Cache:
    """The cache, in which keys behind a prompt are those of the beams that cache_indirection names."""
    given = {"prompts": requests["prompts"], "beam_of": as_int64(node, indirection)}
    return replace(cache, layout=replace(cache.layout, beams=Beams(beams)), tensors={**cache.tensors, **given})


def appended(
    node: Node,
    cache: Cache,
    rows: Value,
    columns: Columns,
    heads: int,
    given: Mapping[str, Value | None],
    rotary: Rotary | None,
    batch: Size,
) -> Cache:
    """The cache with new rows. given has row_starts, row_counts and starts, and bias and angles or None for these."""
    size = cache.tensors["kv"].shape[-1]
    present = {name: value for name, value in given.items() if value is not None}
    record = KvWrite(
        static(batch),
        heads,
        size,
        size,
        rows.dtype,
        cache.layout,
        columns,
        bias="bias" in present,
        rotary=rotary if "angles" in present else None,
    )
    present |= {"new": rows, **cache.tensors}
    if cache.factors is not None:
        present["factor"] = cache.factors
    return replace(cache, tensors={**cache.tensors, **kv_write(node, record, present)})


def projected(node: Node, cache: Cache, rows: Projections, requests: Requests) -> Cache:
    """The cache with the keys and values of this call; StreamingLLM's keys before rotation."""
    settings = rows.settings
    first, rotary = settings.heads * settings.size, settings.rotary
    columns = Columns(first, first + settings.kv_heads * settings.size, settings.width)
    turn = None if rotary is None else Rotary(rotary.dim, rotary.interleaved)
    given = {
        "row_starts": requests["firsts"],
        "row_counts": requests["counts"],
        "starts": requests["past"],
        "bias": rows.bias,
        "angles": None if settings.streaming else rows.angles,
    }
    return appended(node, cache, rows.qkv, columns, settings.kv_heads, given, turn, requests.sequences)


def present(node: Node, cache: Cache) -> Value:
    """The array after the call."""
    return node.reshaped(cache.tensors["kv"], cache.shape)


def _rows(node: Node, requests: Requests, beams: int, settings: Settings) -> Value:
    """The blocks of a contiguous cache: row s has 2 s for keys and 2 s + 1 for values."""

    def entry(index: tuple[Expr, ...]) -> Expr:
        row = index[0]
        if settings.cross:  # the cache is that of beam 0
            row = tirx.floordiv(row, int64(beams)) * beams
        return row * 2 + index[1]

    return compute(node, "blocks", entry, [], (requests.sequences, 2, 1), dtype="int64")


def _blocks(
    node: Node,
    settings: Settings,
    offsets: Value,
    mapping: Value | None,
    requests: Requests,
    beams: int,
    pool: Value,
) -> Value:
    """int64 [sequences, 2, columns]: kv_cache_block_offsets [(pools,) requests, beams, 2, columns] for this layer. What
    is negative stays so."""
    check_ints(node, "kv_cache_block_offsets", offsets, 4, 5)
    front = offsets.shape[:-4]
    offsets = asserted(node, offsets, (*front, requests.requests, offsets.shape[-3], 2, offsets.shape[-1]))
    offsets = at_least_one(node, "kv_cache_block_offsets", offsets, *range(len(front)), offsets.rank - 3)
    arrays, layers, text = [offsets], pool.rank == 6, "{} has {{}} layers, and attribute layer_idx is {}."
    if mapping is not None:
        mapping = check_ints(node, "host_kv_cache_pool_mapping", mapping, 2)
        mapping = asserted(node, mapping, (mapping.shape[0], 2))
        beyond = text.format("host_kv_cache_pool_mapping", settings.layer)
        there = symbolic.less_or_equal(settings.layer + 1, mapping.shape[0])
        arrays.append(required(node, mapping, there, beyond, mapping.shape[0]))
    elif layers:
        beyond = text.format("past_key_value", settings.layer)
        there = symbolic.less_or_equal(settings.layer + 1, pool.shape[1])
        arrays[0] = required(node, offsets, there, beyond, pool.shape[1])
    sizes = [offsets.shape[-3], *front]

    def entry(index: tuple[Expr, ...], offset: Read, *given: Any) -> Expr:
        mapped, extents = given[: len(arrays) - 1], [size - int64(1) for size in given[len(arrays) - 1 :]]
        sequence, part, column = index
        request, beam = tirx.floordiv(sequence, int64(beams)), tirx.floormod(sequence, int64(beams))
        beam = int64(0) if settings.cross else tirx.min(beam, extents[0])
        which, layer = int64(0), int64(settings.layer if layers else 0)
        if mapped:
            which, layer = (mapped[0](int64(settings.layer), int64(k)).astype("int64") for k in range(2))
        place = [tirx.max(tirx.min(which, extents[-1]), int64(0)) for _ in front]
        found = offset(*place, request, beam, part, column).astype("int64")
        return tirx.Select(found < 0, int64(-1), found + layer * 2)

    return compute(node, "blocks", entry, arrays, (requests.sequences, 2, offsets.shape[-1]), sizes, dtype="int64")


def _scales(node: Node, name: str, value: Value | None) -> Value:
    """[2]: one number for keys and values, or one for each."""
    if value is None:
        raise node.error(f"{name} is missing, and kv_cache_quant_mode asks for codes.", "Give it.")
    if value.dtype != "float32" or value.rank != 1:
        raise node.error(f"{name} is {value.dtype} of rank {value.rank}.", "Make it float32 [1] or [2].")
    count = number(node, f"the size of {name}", value.shape[0])
    if count not in (1, 2):
        raise node.error(f"{name} has {count} elements.", "Make it one, or one for keys and one for values.")
    return compute(node, "scales", lambda i, x: x(tirx.min(i[0], int64(count - 1))), [value], (2,))
