"""Whether the tables of a GptAttention fit each other, its rows and its cache: a check of the run."""

from __future__ import annotations

from collections.abc import Mapping

from ...importing.checks import TENSORRT_LLM
from ...importing.node import Node
from ...importing.values import Size, Value, is_one, prod
from ..asserted import legal_requests
from .rotary import tables_of_angles
from .settings import Settings

# In the order of runtime/requests_tensorrt_llm.c.
_TABLES = (
    "context_lengths", "host_request_types", "host_past_key_value_lengths", "sequence_length", "host_context_lengths",
    "host_max_attention_window_sizes", "host_sink_token_length", "cache_indirection", "kv_cache_block_offsets",
    "host_kv_cache_pool_mapping", "encoder_input_lengths",
)  # fmt: skip


def legal(node: Node, settings: Settings, given: Mapping[str, Value], beams: int, block: int) -> Value:
    """context_lengths behind the check. given are the inputs by name, as they are in the model: layers share a check
    then. Blocks of a paged cache have so many tokens. Ranks that do not fit are errors of the import, elsewhere."""
    tables = [given.get(name) for name in _TABLES]
    return legal_requests(node, TENSORRT_LLM, tables, _numbers(settings, given, beams, block))


def _numbers(settings: Settings, given: Mapping[str, Value], beams: int, block: int) -> list[Size]:
    """In the order of runtime/requests_tensorrt_llm.h."""
    qkv, cross = given["qkv"], _of(given, "cross_kv", 2, 3)
    padded, padded_cross = qkv.rank == 3, cross is not None and cross.rank == 3
    flags = (settings.use_cache, settings.cross, settings.streaming, settings.compatible, settings.one_more_block)
    found: list[Size] = [int(flag) for flag in flags]
    found += [-1, *qkv.shape[:2]] if padded else [qkv.shape[0], -1, -1]
    found += [beams, settings.layer if _by_layer(given) else 0, block, *_cache(given, block)]
    found += [-1, -1, -1] if cross is None else [0, *cross.shape[:2]] if padded_cross else [cross.shape[0], -1, -1]
    mask, words = (_of(given, name, 2) for name in ("attention_mask", "attention_packed_mask"))
    found += [-1 if mask is None else mask.shape[1], -1 if words is None else words.shape[1] * 32]
    logn, bias = _of(given, "logn_scaling", 1), _of(given, "relative_attention_bias", 3)
    found += [-1 if logn is None else logn.shape[0], *((-1, -1) if bias is None else bias.shape[1:])]
    return [*found, *_angles(settings, given)]


def _by_layer(given: Mapping[str, Value]) -> bool:
    """Whether it matters which layer the node is of."""
    windows = given.get("host_max_attention_window_sizes")
    pool = given.get("past_key_value")
    pooled = "host_kv_cache_pool_mapping" in given or (pool is not None and pool.rank == 6)
    return pooled or (windows is not None and not (windows.rank == 1 and is_one(windows.shape[0])))


def _cache(given: Mapping[str, Value], block: int) -> tuple[Size, Size, Size]:
    """Slots of a row of a contiguous cache; blocks of a pool, and its layers."""
    pool = given.get("past_key_value")
    if pool is None or pool.rank not in (5, 6):
        return -1, -1, -1
    if not block:
        return pool.shape[-2], -1, -1
    return -1, pool.shape[0], pool.shape[1] if pool.rank == 6 else 0


def _angles(settings: Settings, given: Mapping[str, Value]) -> list[Size]:
    """Positions of the tables of cosines and sines that are used, and up to which length the first of two is."""
    rotary = settings.rotary
    names = [] if rotary is None else [name for name in tables_of_angles(rotary, given) if name.endswith("cos_sin")]
    if rotary is None or not names:
        return [-1, -1, -1]
    positions = [prod(given[name].shape) // rotary.dim for name in names]
    return [*positions, rotary.original] if len(names) > 1 else [*positions, -1, -1]


def _of(given: Mapping[str, Value], name: str, *ranks: int) -> Value | None:
    value = given.get(name)
    return value if value is not None and value.rank in ranks else None
