"""The check that the tables of a GptAttention fit each other, its rows and its cache: its operands.

Compiled models call it at run time (runtime/native/requests_tensorrt_llm.c), and the function gpt_attention before it
runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...importing.checks import TENSORRT_LLM
from ...importing.node import Node
from ...importing.values import Size, Value, is_one, prod
from ..helpers.assertions import assert_requests
from .rotary import list_angle_tables
from .settings import CommonSettings, GptSettings, Rotation

# The order is that of runtime/native/requests_tensorrt_llm.c.
TABLES = (
    "context_lengths", "host_request_types", "host_past_key_value_lengths", "sequence_length", "host_context_lengths",
    "host_max_attention_window_sizes", "host_sink_token_length", "cache_indirection", "kv_cache_block_offsets",
    "host_kv_cache_pool_mapping", "encoder_input_lengths",
)  # fmt: skip


def check_tables(node: Node, settings: GptSettings, inputs: Mapping[str, Value], beams: int, block: int) -> Value:
    """Return context_lengths with the check attached.

    inputs are the node's inputs by name, as they are in the model, so that layers share a check. `block` is the number
    of tokens in a block of a paged cache. Ranks that do not fit are errors of the import, reported elsewhere.
    """
    shapes = {name: value.shape for name, value in inputs.items()}
    layer = settings.layer if _is_layer_dependent(shapes) else 0
    tables = [inputs.get(name) for name in TABLES]
    return assert_requests(node, TENSORRT_LLM, tables, list_numbers(settings, shapes, beams, block, layer))


Shapes: TypeAlias = Mapping[str, Sequence[Size]]  # of the inputs that are present, by name


def list_numbers(settings: CommonSettings, shapes: Shapes, beams: int, block: int, layer: int) -> list[Size]:
    """Return the numbers of the check, in the order of runtime/native/requests_tensorrt_llm.h."""
    qkv, cross = shapes["qkv"], _find_shape(shapes, "cross_kv", 2, 3)
    flags = (
        settings.has_cache,
        settings.is_cross,
        settings.is_streaming,
        settings.is_trt_compatible,
        settings.has_spare_block,
    )
    numbers: list[Size] = [int(flag) for flag in flags]
    numbers += [-1, *qkv[:2]] if len(qkv) == 3 else [qkv[0], -1, -1]
    numbers += [beams, layer, block, *_list_cache_sizes(shapes, block)]
    numbers += [-1, -1, -1] if cross is None else [0, *cross[:2]] if len(cross) == 3 else [cross[0], -1, -1]
    mask, packed_mask = (_find_shape(shapes, name, 2) for name in ("attention_mask", "attention_packed_mask"))
    numbers += [-1 if mask is None else mask[1], -1 if packed_mask is None else packed_mask[1] * 32]
    logn, bias = _find_shape(shapes, "logn_scaling", 1), _find_shape(shapes, "relative_attention_bias", 3)
    numbers += [-1 if logn is None else logn[0], *((-1, -1) if bias is None else bias[1:])]
    return [*numbers, *_list_angle_sizes(settings.rotary, shapes)]


def _is_layer_dependent(shapes: Shapes) -> bool:
    """Return whether the check depends on the node's layer."""
    windows = shapes.get("host_max_attention_window_sizes")
    has_layers = "host_kv_cache_pool_mapping" in shapes or len(shapes.get("past_key_value", ())) == 6
    return has_layers or (windows is not None and not (len(windows) == 1 and is_one(windows[0])))


def _list_cache_sizes(shapes: Shapes, block: int) -> tuple[Size, Size, Size]:
    """Return the slots in a row of a contiguous cache, the blocks of a pool, and the pool's layers."""
    pool = _find_shape(shapes, "past_key_value", 5, 6)
    if pool is None:
        return -1, -1, -1
    if not block:
        return pool[-2], -1, -1
    return -1, pool[0], pool[1] if len(pool) == 6 else 0


def _list_angle_sizes(rotary: Rotation | None, shapes: Shapes) -> list[Size]:
    """Return the numbers of positions of the cosine and sine tables, and the longest length for the first of two."""
    names = [] if rotary is None else [n for n in list_angle_tables(rotary.scaling, shapes) if n.endswith("cos_sin")]
    if rotary is None or not names:
        return [-1, -1, -1]
    positions = [prod(shapes[name]) // rotary.dim for name in names]
    return [*positions, rotary.original] if len(names) > 1 else [*positions, -1, -1]


def _find_shape(shapes: Shapes, name: str, *ranks: int) -> Sequence[Size] | None:
    shape = shapes.get(name)
    return shape if shape is not None and len(shape) in ranks else None
