"""`gpt_attention`: TensorRT-LLM's operator over NumPy arrays, implemented by a compiled model of one node.

A model is compiled for each configuration: attributes, element types and ranks, the arguments that are present, and the
sizes that kernels are specialized for (heads, head size, tokens in a block). It serves any number of requests, lengths
and blocks, and every layer. Models are cached while the process lives.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from ..ops.tensorrt_llm import DOMAIN
from ..ops.tensorrt_llm.gpt_attention import INPUTS
from ..ops.tensorrt_llm.settings import MASKS, POSITIONS, SCALINGS
from .gpt_checks import check_call, refuse_unknown

if TYPE_CHECKING:
    from ..runtime import Model

Array: TypeAlias = Any
Dims: TypeAlias = tuple[int | str, ...]

MAX_CACHED_MODELS = 256

_ENUMERATIONS = {
    "position_embedding_type": POSITIONS,
    "rotary_embedding_scale_type": SCALINGS,
    "mask_type": MASKS,
}
_IGNORED = ("host_kv_cache_block_offsets", "max_context_length", "cross_kv_length", "host_kv_cache_pool_pointers")
# Dimensions that kernels are specialized for, counted from the last axis.
_STATIC_AXES = {
    "qkv": (-1,),
    "past_key_value": (-4, -3, -1),
    "cache_indirection": (1,),
    "kv_cache_block_offsets": (-2,),
    "kv_orig_quant_scale": (0,),
    "kv_quant_orig_scale": (0,),
    "attention_output_orig_quant_scale": (0,),
    "rotary_inv_freq": (0,),
    "rotary_cos_sin": (-2, -1),
    "long_rope_rotary_inv_freq": (0,),
    "long_rope_rotary_cos_sin": (-2, -1),
    "alibi_slopes": (0,),
    "cross_kv": (-1,),
    "qkv_bias": (0,),
}


def gpt_attention(
    qkv: Array | Sequence[Array],
    *,
    past_key_value: Array | None = None,
    attention_mask: Array | None = None,
    attention_packed_mask: Array | None = None,
    sequence_length: Array | None = None,
    host_past_key_value_lengths: Array | None = None,
    host_max_attention_window_sizes: Array | None = None,
    host_sink_token_length: Array | int | None = None,
    context_lengths: Array | None = None,
    cache_indirection: Array | None = None,
    host_request_types: Array | None = None,
    layer_idx: int = 0,
    num_heads: int,
    num_kv_heads: int | None = None,
    hidden_size_per_head: int,
    q_scaling: float = 1.0,
    attn_logit_softcapping_scale: float = 0.0,
    rotary_embedding_dim: int = 0,
    rotary_embedding_base: float = 10000.0,
    rotary_embedding_scale_type: int | str = 0,
    rotary_embedding_short_m_scale: float | None = None,
    rotary_embedding_long_m_scale: float | None = None,
    rotary_embedding_scale: float = 1.0,
    rotary_embedding_max_positions: int = 1024,
    rotary_embedding_original_max_positions: int = 1024,
    rope_scaling_config: Mapping[str, Any] | None = None,
    position_embedding_type: int | str = 0,
    rotary_inv_freq: Array | None = None,
    rotary_cos_sin: Array | None = None,
    long_rope_rotary_inv_freq: Array | None = None,
    long_rope_rotary_cos_sin: Array | None = None,
    kv_orig_quant_scale: Array | None = None,
    kv_quant_orig_scale: Array | None = None,
    attention_output_orig_quant_scale: Array | None = None,
    kv_cache_quant_mode: int = 0,
    max_context_length: int | None = None,
    mask_type: int | str = 1,
    block_sparse_block_size: int = 64,
    block_sparse_homo_head_pattern: bool = False,
    block_sparse_num_local_blocks: int = 16,
    block_sparse_vertical_stride: int = 8,
    alibi_slopes: Array | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    kv_cache_block_offsets: Array | None = None,
    host_kv_cache_block_offsets: Array | None = None,
    host_kv_cache_pool_pointers: Sequence[Array] | None = None,
    host_kv_cache_pool_mapping: Array | None = None,
    do_cross_attention: bool = False,
    cross_kv: Array | None = None,
    cross_kv_length: Array | int | None = None,
    encoder_input_lengths: Array | None = None,
    relative_attention_bias: Array | None = None,
    max_distance: int = 0,
    logn_scaling: Array | None = None,
    host_context_lengths: Array | None = None,
    qkv_bias: Array | None = None,
    use_cache: bool = True,
    streamingllm: bool = False,
    use_one_more_block: bool = False,
    use_fp8_context_fmha: bool = False,
    multi_block_mode: bool | int | None = None,
    attend_current_unquantized: bool = True,
    trt_mmha_compat: bool = False,
    relative_attention_bidirectional: bool = False,
    return_lse: bool = False,
    check: bool = True,
    target: str = "cpu",
    **others: Any,
) -> Any:
    """Compute attention of requests in context and generation phases.

    The semantics are those of tensorrt_llm.functional.gpt_attention. docs/serving.md has shapes, element types and
    formulas by argument.

    Args:
        qkv: [rows, (Hq + 2 Hkv) D], or [requests, rows, (Hq + 2 Hkv) D] with rows of padding, or a list of q, k and v.
        return_lse: return the pair of context and lse, float32.
        check: check what depends on the contents of arrays, too.
        target: the target, as in `lowering.compile`.
        **others: further arguments of TensorRT-LLM, with values that ask for nothing.

    Returns:
        context, of the type of qkv, or float8_e4m3fn if attention_output_orig_quant_scale is given. The cache,
        past_key_value or the pools, is updated in place; no other argument is written to.

    Raises:
        ArgumentError: an argument is illegal; it is a ValueError, raised before anything is written.
        NotImplementedError: a further argument of TensorRT-LLM asks for something.
        TypeError: TensorRT-LLM has no argument of this name.
    """
    arguments = dict(locals())
    own = ("qkv", "return_lse", "check", "target", "others")
    requested = {name: value for name, value in arguments.items() if name not in own}
    refuse_unknown(others)
    arrays = check_call(qkv, requested, contents=check)
    pool, shared = _make_contiguous(arrays)
    settings = _dump_attributes(requested)
    inputs = tuple((name, arrays[name].dtype.name, _name_dims(name, arrays)) for name in INPUTS if name in arrays)
    width = num_heads * hidden_size_per_head
    is_quantized = attention_output_orig_quant_scale is not None
    dtype = "float8_e4m3fn" if is_quantized else arrays["qkv"].dtype.name
    model = _compile_model(inputs, settings, return_lse, width, dtype, target)
    results = model.run(arrays)
    if shared is not None and pool is not None:
        shared[...] = pool
    return (results["context"], results["lse"]) if return_lse else results["context"]


def _make_contiguous(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Replace a strided cache by a contiguous copy; return the copy, and the cache to write it back to."""
    cache = arrays.get("past_key_value")
    if cache is None or cache.flags.c_contiguous:
        return cache, None
    arrays["past_key_value"] = np.ascontiguousarray(cache)
    return arrays["past_key_value"], cache


def _dump_attributes(requested: Mapping[str, Any]) -> str:
    """Return the attributes, as JSON with sorted keys."""
    attributes: dict[str, Any] = {}
    for name, value in requested.items():
        if name in (*INPUTS, *_IGNORED) or value is None:
            continue
        if name in _ENUMERATIONS and isinstance(value, str):
            value = _ENUMERATIONS[name].index(value)
        if name == "rope_scaling_config":
            value = json.dumps({key: _to_json_value(item) for key, item in value.items()}, sort_keys=True)
        attributes[name] = _to_json_value(value)
    attributes["layer_idx"] = 0
    return json.dumps(attributes, sort_keys=True)


def _to_json_value(value: Any) -> Any:
    """Convert NumPy's numbers and arrays to values that JSON can represent."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def _name_dims(name: str, arrays: Mapping[str, np.ndarray]) -> Dims:
    """Return the shape, with names for the sizes that differ between calls."""
    array = arrays[name]
    static_axes = {axis % array.ndim for axis in _STATIC_AXES.get(name, ()) if -array.ndim <= axis < array.ndim}
    if name == "past_key_value" and "kv_cache_block_offsets" in arrays:
        static_axes.add(array.ndim - 2)
    if name == "relative_attention_bias":
        static_axes |= {0} | ({1} if array.ndim == 2 else set())
    return tuple(size if axis in static_axes else f"{name}_{axis}" for axis, size in enumerate(array.shape))


@functools.lru_cache(maxsize=MAX_CACHED_MODELS)
def _compile_model(
    inputs: tuple[tuple[str, str, Dims], ...], settings: str, lse: bool, width: int, dtype: str, target: str
) -> Model:
    from ..compiling.compiler import compile

    # Arguments were checked by the caller, or must not be.
    return compile(build_one_node_model(inputs, settings, lse, width, dtype), target, checks=False)


def build_one_node_model(
    inputs: tuple[tuple[str, str, Dims], ...], settings: str, lse: bool, width: int, dtype: str
) -> onnx.ModelProto:
    """Return the model of a GptAttention.

    It has inputs of these names, types and dimensions, and attributes `settings` (JSON). Its result has rows of `width`
    elements.
    """
    infos = {name: (kind, dims) for name, kind, dims in inputs}
    names = [name if name in infos else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    rank = len(infos["qkv"][1])
    outputs = ["context", "", "lse"] if lse else ["context"]
    node = helper.make_node("GptAttention", names, outputs, "gpt_attention", domain=DOMAIN, **json.loads(settings))
    row_dims = [f"row_{axis}" for axis in range(rank - 1)]
    results = [_make_value_info("context", dtype, (*row_dims, width))]
    if lse:
        results.append(_make_value_info("lse", "float32", (*row_dims, "heads")))
    graph = helper.make_graph([node], "gpt_attention", [_make_value_info(n, *infos[n]) for n in infos], results)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def _make_value_info(name: str, dtype: str, dims: Dims) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return helper.make_tensor_value_info(name, kind, dims)
