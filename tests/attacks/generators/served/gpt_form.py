"""The properties that all calls of an attack on GptAttention share, and tables of its inputs and attributes."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowering.functions.gpt_attention import gpt_attention
from lowering.ops.tensorrt_llm.gpt_attention import INPUTS
from tests.attacks.draw import WILD
from tests.serving.gpt_attention.gpt_case_features import Features

Tensors = dict[str, np.ndarray]

# All arguments of the function, those of which are attributes, and what these are where they are left out.
DEFAULTS = {
    name: None if parameter.default is inspect.Parameter.empty else parameter.default
    for name, parameter in inspect.signature(gpt_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("return_lse", "check", "target")
}
_FUNCTION_ONLY = (
    *("max_context_length", "cross_kv_length"),
    *("host_kv_cache_block_offsets", "host_kv_cache_pool_pointers"),
)
FLOAT = (
    *("q_scaling", "attn_logit_softcapping_scale", "rotary_embedding_base", "rotary_embedding_scale"),
    *("rotary_embedding_short_m_scale", "rotary_embedding_long_m_scale"),
)
_INT = tuple(name for name in DEFAULTS if name not in (*INPUTS, *_FUNCTION_ONLY, *FLOAT, "rope_scaling_config"))
ATTRIBUTES = (*_INT, *FLOAT, "rope_scaling_config")
FLAGS = (
    *("do_cross_attention", "use_cache", "streamingllm", "use_one_more_block", "use_fp8_context_fmha"),
    *("attend_current_unquantized", "trt_mmha_compat", "relative_attention_bidirectional"),
    "block_sparse_homo_head_pattern",
)
LEAST = {
    "num_heads": 1,
    "hidden_size_per_head": 1,
    "layer_idx": 0,
    "rotary_embedding_dim": 0,
    "rotary_embedding_max_positions": 1,
    "rotary_embedding_original_max_positions": 1,
    "block_sparse_block_size": 1,
    "block_sparse_num_local_blocks": 0,
    "block_sparse_vertical_stride": 1,
    "tp_size": 1,
    "tp_rank": 0,
    "max_distance": 0,
    "multi_block_mode": -1,
}
# Attributes whose number may mean nothing: the mask, or the rotation, is of another kind.
AT_TIMES = tuple(name for name in LEAST if name.startswith(("rotary_", "block_sparse_")))
ENUMERATIONS = {
    "position_embedding_type": set(range(10)) - {7, 9},
    "rotary_embedding_scale_type": set(range(6)),
    "mask_type": set(range(7)),
}

FLOATS = ("float32", "float16", "bfloat16")
SIGNED = ("int32", "int64")
BY_REQUEST = ("context_lengths", "host_request_types", "host_past_key_value_lengths", "host_context_lengths")
INTS = (
    *BY_REQUEST,
    *("sequence_length", "encoder_input_lengths", "host_max_attention_window_sizes", "host_sink_token_length"),
    *("cache_indirection", "kv_cache_block_offsets", "host_kv_cache_pool_mapping"),
)
READ = tuple(name for name in INTS if name not in ("sequence_length", "host_context_lengths"))
SCALES = ("kv_orig_quant_scale", "kv_quant_orig_scale")
_SINGLES = (
    *(*SCALES, "attention_output_orig_quant_scale", "logn_scaling", "alibi_slopes"),
    *("rotary_inv_freq", "rotary_cos_sin", "long_rope_rotary_inv_freq", "long_rope_rotary_cos_sin"),
)
TYPES = {
    **dict.fromkeys(INTS, SIGNED),
    **dict.fromkeys(_SINGLES, ("float32",)),
    "attention_mask": ("bool",),
    "attention_packed_mask": ("uint32", "int32"),
}
PARAMETERS = (*_SINGLES, "qkv_bias", "relative_attention_bias", "host_max_attention_window_sizes")
# Axes whose sizes kernels are made for.
NUMBERS = {
    "qkv": (-1,),
    "past_key_value": (-4, -3, -2, -1),
    "cache_indirection": (1,),
    "kv_cache_block_offsets": (-2,),
    **dict.fromkeys(("cross_kv", "qkv_bias", *_SINGLES), (-1,)),
    "logn_scaling": (),
    "rotary_cos_sin": (1, 2),
    "long_rope_rotary_cos_sin": (1, 2),
    "relative_attention_bias": (0, 1),
}

WILD_INTS = (-1, 0, 2, 3, 5, 7, 9, 10, 64, 128, 192, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**63))
WILD_FLOATS = (0.0, -1.0, 1e-38, 1e38, math.inf, -math.inf, math.nan)
WILD_JSON = (
    *("{", "[1]", "7", "null", '"x"', "", "{}", '{"factor": "x"}', '{"factor": 0}', '{"factor": -1e400}'),
    *('{"factor": null, "beta_fast": null}', '{"factor": [2]}', '{"original_max_position_embeddings": 0}'),
    *('{"high_freq_factor": 1, "low_freq_factor": 1}', '{"short_factor": [1, 2, 3], "long_factor": "x"}'),
    *('{"beta_fast": 0, "beta_slow": -1}', '{"mscale": NaN}', '{"short_factor": null}', "[" * 3000),
)
WRONG_TYPES: tuple[Any, ...] = (1, 1.0, "one", [1], [1.0])
WILD_LENGTHS = (0, 1, 2, 5, 63, 64, 2**20, 2**31 - 1, -(2**31), 2**31, 2**40, *WILD)


@dataclass(frozen=True)
class Form:
    """The properties that all calls of an attack share."""

    case: Features
    attributes: dict[str, Any]
    corrupted: str | None  # an attribute that is not the case's own
    types: dict[str, str]  # of inputs that have another one than they should have
    ranks: dict[str, int]
    holes: frozenset[str]
    outputs: list[tuple[str, int]] = field(default_factory=list)

    def said(self, name: str) -> Any:
        return self.attributes.get(name, DEFAULTS[name])
