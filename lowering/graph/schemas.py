"""Schemas of what onnxruntime's optimisers write, for onnx's checker and its inference of types and shapes.

LayerNormalization came into ai.onnx with opset 17 and SimplifiedLayerNormalization not at all, but onnxruntime has both
there. Its other operators are those of lowering/ops/microsoft. The compiler's own Attention has a schema, too.
Importing this module registers all, once per process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx.reference  # first: it does not import once two operators of one name are registered
from onnx import defs

from .legality import OWN_DOMAIN

_Kind = onnx.TypeProto  # of a tensor; a dimension that is neither number nor name is unknown
_Inference = Callable[[Any], dict[int, _Kind]]

_OPTION = defs.OpSchema.FormalParameterOption
_ATTRIBUTE = {
    "int": defs.OpSchema.AttrType.INT,
    "ints": defs.OpSchema.AttrType.INTS,
    "float": defs.OpSchema.AttrType.FLOAT,
    "floats": defs.OpSchema.AttrType.FLOATS,
    "string": defs.OpSchema.AttrType.STRING,
    "strings": defs.OpSchema.AttrType.STRINGS,
}
# Types are checked by the lowerings, which say more.
_ANY = [
    f"tensor({name})"
    for name in ("float16", "bfloat16", "float", "double", "int8", "int32", "int64", "uint8", "bool", "float8e4m3fn")
]


def _register(name: str, inputs: str, outputs: str, attributes: str, infer: _Inference, domain: str) -> None:
    """inputs and outputs are names, optional ones with ?; attributes are name:type, with ! where required."""

    def parameters(names: str, letter: str) -> list[defs.OpSchema.FormalParameter]:
        return [
            defs.OpSchema.FormalParameter(
                n.rstrip("?"), f"{letter}{k}", param_option=_OPTION.Optional if n.endswith("?") else _OPTION.Single
            )
            for k, n in enumerate(names.split())
        ]

    given, made = parameters(inputs, "T"), parameters(outputs, "U")
    pairs = [text.split(":") for text in attributes.split()]
    schema = defs.OpSchema(
        name,
        domain,
        1,
        inputs=given,
        outputs=made,
        type_constraints=[(parameter.type_str, _ANY, "") for parameter in (*given, *made)],
        attributes=[
            defs.OpSchema.Attribute(n, _ATTRIBUTE[kind.rstrip("!")], "", required=kind.endswith("!"))
            for n, kind in pairs
        ],
    )
    count = len(made)

    def inference(context: Any) -> None:
        for k, kind in infer(context).items():
            if k < min(count, context.get_num_outputs()):
                context.set_output_type(k, kind)

    schema.set_type_and_shape_inference_function(inference)
    defs.register_schema(schema)


# -- inference --------------------------------------------------------------------------------------------------------


def _tensor(element: int, dims: list[Any] | None) -> _Kind:
    """dims are sizes as protobuf has them, numbers, or None; what no size can be is unknown."""
    kind = onnx.TypeProto()
    kind.tensor_type.elem_type = element
    if dims is not None:
        kind.tensor_type.shape.SetInParent()
        for dim in dims:
            made = kind.tensor_type.shape.dim.add()
            if not isinstance(dim, int | None):
                made.CopyFrom(dim)
            elif dim is not None and abs(dim) < 2**63:
                made.dim_value = dim
    return kind


def _input(context: Any, k: int) -> tuple[int, list[Any] | None]:
    """Element type and dimensions of an input: 0 and None where they are not known."""
    kind = context.get_input_type(k) if k < context.get_num_inputs() else None
    if kind is None or not kind.HasField("tensor_type"):
        return 0, None
    tensor = kind.tensor_type
    return tensor.elem_type, list(tensor.shape.dim) if tensor.HasField("shape") else None


def _number(context: Any, name: str, default: int = 0) -> int:
    attribute = context.get_attribute(name)
    return default if attribute is None else attribute.i


def _like_first(*outputs: int) -> _Inference:
    return lambda context: {k: _tensor(*_input(context, 0)) for k in outputs}


def _like_second(context: Any) -> dict[int, _Kind]:
    """The shape of the first input with the type of the second: normalisation and its scale."""
    return {0: _tensor(_input(context, 1)[0], _input(context, 0)[1])}


def _last(dims: list[Any] | None, size: Callable[[int], int | None]) -> list[Any] | None:
    """The dimensions with the last one replaced, by what follows from its number."""
    if not dims:
        return None
    return [*dims[:-1], size(dims[-1].dim_value) if dims[-1].HasField("dim_value") else None]


def _halved(context: Any) -> dict[int, _Kind]:
    element, dims = _input(context, 0)
    return {0: _tensor(element, _last(dims, lambda n: n // 2))}


def _embedding(context: Any) -> dict[int, _Kind]:
    (_, ids), (element, words) = _input(context, 0), _input(context, 2)
    dims = [*ids, words[1]] if ids is not None and words else None
    batch = None if ids is None else ids[:1]
    return {0: _tensor(element, dims), 1: _tensor(onnx.TensorProto.INT32, batch), 2: _tensor(element, dims)}


def _q_embedding(context: Any) -> dict[int, _Kind]:
    kinds = _embedding(context)
    kinds[0].tensor_type.elem_type = onnx.TensorProto.FLOAT
    return {k: kinds[k] for k in (0, 1)}


def _product(context: Any) -> dict[int, _Kind]:
    (element, a), (_, b) = _input(context, 0), _input(context, 1)
    if not a or not b or min(len(a), len(b)) < 2:
        return {0: _tensor(element, None)}
    for dims, name in ((a, "A"), (b, "B")):
        if _number(context, f"transBatch{name}"):
            dims[:-1] = [*dims[1:-1], dims[0]]
        if _number(context, f"trans{name}"):
            dims[-2:] = dims[:-3:-1]
    longer = a if len(a) >= len(b) else b
    return {0: _tensor(element, [*longer[:-2], a[-2], b[-1]])}


def _packed_product(context: Any) -> dict[int, _Kind]:
    element, dims = _input(context, 0)
    return {0: _tensor(element, None if dims is None else [*dims[:-1], _number(context, "N")])}


def _rows_of_codes(context: Any) -> dict[int, _Kind]:
    return {0: _tensor(_input(context, 2)[0], None)}


def _attention(context: Any) -> dict[int, _Kind]:
    (element, x), (_, weights) = _input(context, 0), _input(context, 1)
    sizes = context.get_attribute("qkv_hidden_sizes")
    width = sizes.ints[2] if sizes is not None else weights[1].dim_value // 3 if weights else 0
    return {0: _tensor(element, [*x[:2], width or None] if x else None), 1: _tensor(element, None)}


def _attention_with_sinks(context: Any) -> dict[int, _Kind]:
    (element, q), (_, v) = _input(context, 0), _input(context, 2)
    heads, kv_heads = _number(context, "q_num_heads"), _number(context, "kv_num_heads")
    y = [*q[:-1], v[-1]] if q and v and len(q) == len(v) else None
    if y is not None and len(y) == 3:
        y = _last(y, lambda width: width // kv_heads * heads if kv_heads else None)
    return {0: _tensor(element, y), **{k: _tensor(_input(context, n)[0], None) for k, n in ((1, 1), (2, 2), (3, 0))}}


def _q_attention(context: Any) -> dict[int, _Kind]:
    (_, x), (_, weights), (element, _) = (_input(context, k) for k in range(3))
    width = weights[1].dim_value // 3 if weights and len(weights) > 1 else 0
    return {0: _tensor(element, [*x[:2], width or None] if x else None), 1: _tensor(element, None)}


def _multi_head_attention(context: Any) -> dict[int, _Kind]:
    (element, query), (_, key), (_, value) = (_input(context, k) for k in range(3))
    heads, source = _number(context, "num_heads"), value or key or query
    width = None
    if source and source[-1].HasField("dim_value"):
        width = source[-1].dim_value * (1 if len(source) == 3 else heads)
    kinds = {k: _tensor(element, None) for k in (1, 2, 3)}
    return {0: _tensor(element, [*query[:2], width] if query else None), **kinds}


def _group_query_attention(context: Any) -> dict[int, _Kind]:
    element, query = _input(context, 0)
    heads, kv_heads = _number(context, "num_heads"), _number(context, "kv_num_heads")
    packed = not _input(context, 1)[0]
    dims = _last(query, lambda n: n * heads // (heads + 2 * kv_heads) if packed else n)
    past = _input(context, 3)[0] or element
    return {0: _tensor(element, dims), 1: _tensor(past, None), 2: _tensor(past, None)}


def _decoder_attention(context: Any) -> dict[int, _Kind]:
    kinds = _multi_head_attention(context)
    if not _input(context, 1)[0]:
        element, query = _input(context, 0)
        kinds[0] = _tensor(element, _last(query, lambda n: n // 3))
    return kinds


def _packed_attention(context: Any) -> dict[int, _Kind]:
    (element, query), (_, value) = _input(context, 0), _input(context, 2)
    if value or not query or len(query) != 4:
        return {0: _tensor(element, [query[0], value[1]] if query and value and len(value) == 2 else None)}
    known = all(query[k].HasField("dim_value") for k in (1, 3))
    return {0: _tensor(element, [query[0], query[1].dim_value * query[3].dim_value if known else None])}


def _paged_attention(context: Any) -> dict[int, _Kind]:
    (element, query), (_, key) = _input(context, 0), _input(context, 1)
    heads, kv_heads = _number(context, "num_heads"), _number(context, "kv_num_heads")
    v_size, width = _number(context, "v_head_size"), None
    if query and query[-1].HasField("dim_value"):
        count = heads if key else heads + 2 * kv_heads
        width = heads * (v_size or query[-1].dim_value // max(count, 1))
    output = _tensor(element, [*query[:1], width] if query else None)
    return {0: output, 1: _tensor(*_input(context, 3)), 2: _tensor(*_input(context, 4))}


# -- the operators: inputs, outputs, attributes -----------------------------------------------------------------------

_NORM = "axis:int epsilon:float stash_type:int"
_register("LayerNormalization", "X Scale B?", "Y Mean? InvStdDev?", _NORM, _like_second, "")
_register("SimplifiedLayerNormalization", "X scale", "Y inv_std_var?", _NORM, _like_second, "")

_SKIP = "output mean? inv_std_var? input_skip_bias_sum?"
_MOE = (
    "activation_alpha:float activation_beta:float activation_type:string k:int normalize_routing_weights:int "
    "swiglu_fusion:int swiglu_limit:float swiglu_limit_after_activation:int use_sparse_mixer:int"
)
_MATMUL = "alpha:float transA:int transB:int"


def _linear_attention(context: Any) -> dict[int, _Kind]:
    (element, query), (_, value), (state, past) = (_input(context, k) for k in (0, 2, 3))
    heads, kv_heads = (_number(context, name) for name in ("q_num_heads", "kv_num_heads"))
    if not query or not value or min(heads, kv_heads) < 1:
        return {0: _tensor(element, None), 1: _tensor(state or element, past)}
    (size, given), (width, known) = (
        (dims[-1].dim_value // count, dims[-1].HasField("dim_value"))
        for dims, count in ((query, heads), (value, kv_heads))
    )
    made = past or [query[0], kv_heads, size if given else None, width if known else None]
    wide = max(heads, kv_heads) * width if known else None
    return {0: _tensor(element, [*query[:-1], wide]), 1: _tensor(state or element, made)}


def _lstm(context: Any) -> dict[int, _Kind]:
    (element, x), (_, w), (_, r) = (_input(context, k) for k in range(3))
    if not x or not w or not r:
        return {k: _tensor(element, None) for k in range(3)}
    state = [w[0], x[1], r[1]]
    return {0: _tensor(element, [x[0], *state]), 1: _tensor(element, state), 2: _tensor(element, state)}


def _causal_conv(context: Any) -> dict[int, _Kind]:
    (element, data), (_, weight), (_, past) = (_input(context, k) for k in (0, 1, 3))
    if past is None and data and weight:
        known, dilation = weight[-1].HasField("dim_value"), _number(context, "dilation", 1)
        kept = (weight[-1].dim_value - 1) * dilation if known else None
        past = [data[0], kept, *data[2:]] if _number(context, "channels_last") else [*data[:2], kept]
    return {0: _tensor(element, data), 1: _tensor(element, past)}


for _name, _inputs, _outputs, _attributes, _infer in (
    ("SimplifiedLayerNormalization", "X scale", "Y inv_std_var?", _NORM, _like_second),
    ("SkipLayerNormalization", "input skip gamma beta? bias?", _SKIP, "epsilon:float", _like_first(0, 3)),
    ("SkipSimplifiedLayerNormalization", "input skip gamma bias?", _SKIP, "epsilon:float", _like_first(0, 3)),
    (
        "EmbedLayerNormalization",
        "input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma beta mask? position_ids?",
        "output mask_index? embedding_sum?",
        "epsilon:float mask_index_type:int",
        _embedding,
    ),
    (
        "QEmbedLayerNormalization",
        "input_ids segment_ids? word_embedding_quant position_embedding_quant segment_embedding? gamma_quant "
        "beta_quant mask? word_embedding_scale position_embedding_scale segment_embedding_scale? gamma_scale "
        "beta_scale word_embedding_zero_point position_embedding_zero_point segment_embedding_zero_point? "
        "gamma_zero_point beta_zero_point",
        "layernorm_out mask_index_out",
        "epsilon:float",
        _q_embedding,
    ),
    ("Gelu", "X", "Y", "", _like_first(0)),
    ("FastGelu", "X bias?", "Y", "", _like_first(0)),
    ("BiasGelu", "A B", "C", "", _like_first(0)),
    ("BiasSplitGelu", "X bias", "Y", "", _halved),
    ("QuickGelu", "X", "Y", "alpha:float", _like_first(0)),
    ("FusedMatMul", "A B", "Y", f"{_MATMUL} transBatchA:int transBatchB:int", _product),
    ("TransposeMatMul", "A B", "Y", _MATMUL, _product),
    (
        "MatMulNBits",
        "A B scales zero_points? g_idx? bias?",
        "Y",
        "K:int! N:int! accuracy_level:int bits:int block_size:int! weight_prepacked:int",
        _packed_product,
    ),
    (
        "GatherBlockQuantized",
        "data indices scales zero_points?",
        "output",
        "bits:int block_size:int gather_axis:int quantize_axis:int",
        _rows_of_codes,
    ),
    (
        "MoE",
        "input router_probs fc1_experts_weights fc1_experts_bias? fc2_experts_weights fc2_experts_bias? "
        "fc3_experts_weights? fc3_experts_bias?",
        "output",
        _MOE,
        _like_first(0),
    ),
    (
        "QMoE",
        "input router_probs fc1_experts_weights fc1_scales? fc1_experts_bias? fc2_experts_weights fc2_scales? "
        "fc2_experts_bias? fc3_experts_weights? fc3_scales? fc3_experts_bias? fc1_zero_points? fc2_zero_points? "
        "fc3_zero_points? router_weights? fc1_global_scale? fc2_global_scale? fc1_act_scale? fc2_act_scale? "
        "fc1_act_block_scale? fc2_act_block_scale?",
        "output",
        f"{_MOE} accuracy_level:int block_size:int expert_weight_bits:int fc1_expert_weight_bits:int "
        "fc2_expert_weight_bits:int fc3_expert_weight_bits:int quant_type:string weights_prepacked:int",
        _like_first(0),
    ),
    (
        "RotaryEmbedding",
        "input position_ids cos_cache sin_cache",
        "output",
        "interleaved:int is_packed_batching:int num_heads:int rotary_embedding_dim:int scale:float",
        _like_first(0),
    ),
    (
        "Attention",
        "input weights bias? mask_index? past? attention_bias? past_sequence_length?",
        "output present?",
        "do_rotary:int mask_filter_value:float num_heads:int! past_present_share_buffer:int qkv_hidden_sizes:ints "
        "rotary_embedding_dim:int scale:float unidirectional:int",
        _attention,
    ),
    (
        "QAttention",
        "input weight bias input_scale weight_scale mask_index? input_zero_point? weight_zero_point? past?",
        "output present?",
        "do_rotary:int mask_filter_value:float num_heads:int! past_present_share_buffer:int scale:float "
        "unidirectional:int",
        _q_attention,
    ),
    (
        "MultiHeadAttention",
        "query key? value? bias? key_padding_mask? attention_bias? past_key? past_value? past_sequence_length? "
        "cache_indirection?",
        "output present_key? present_value? qk?",
        "mask_filter_value:float num_heads:int! scale:float unidirectional:int",
        _multi_head_attention,
    ),
    (
        "GroupQueryAttention",
        "query key? value? past_key? past_value? seqlens_k total_sequence_length cos_cache? sin_cache? position_ids? "
        "attention_bias? head_sink? k_scale? v_scale? q_norm_weight? k_norm_weight? query_seqlens?",
        "output present_key? present_value? output_qk?",
        "causal:int do_rotary:int k_norm_epsilon:float k_quant_type:string kv_cache_bit_width:int kv_num_heads:int! "
        "local_window_size:int num_heads:int! q_norm_epsilon:float qk_norm_epsilon:float qk_output:int "
        "rotary_interleaved:int scale:float sliding_window_cache:int smooth_softmax:int softcap:float "
        "v_quant_type:string",
        _group_query_attention,
    ),
    (
        "PackedMultiHeadAttention",
        "query key? value? bias? token_offset cumulative_sequence_length attention_bias?",
        "output",
        "mask_filter_value:float num_heads:int! scale:float",
        _packed_attention,
    ),
    (
        "DecoderMaskedMultiHeadAttention",
        "query key? value? mask_index? attention_bias? past_key? past_value? past_sequence_length? beam_width? "
        "cache_indirection? bias?",
        "output present_key? present_value? qk?",
        "mask_filter_value:float num_heads:int! output_qk:int past_present_share_buffer:int scale:float",
        _decoder_attention,
    ),
    (
        "CausalConvWithState",
        "input weight bias? past_state?",
        "output present_state? state_update?",
        "activation:string channels_last:int dilation:int input_channel_offset:int input_channels:int ndim:int "
        "state_channels_last:int state_length:int state_update_capacity:int state_window:int",
        _causal_conv,
    ),
    (
        "DynamicQuantizeLSTM",
        "X W R B? sequence_lens? initial_h? initial_c? P? W_scale W_zero_point R_scale R_zero_point",
        "Y? Y_h? Y_c?",
        "activation_alpha:floats activation_beta:floats activations:strings clip:float direction:string "
        "hidden_size:int input_forget:int",
        _lstm,
    ),
    (
        "LinearAttention",
        "query key value past_state? decay? beta?",
        "output present_state?",
        "chunk_size:int kv_num_heads:int! q_num_heads:int! scale:float state_window:int update_rule:string",
        _linear_attention,
    ),
    (
        "PagedAttention",
        "query key? value? key_cache value_cache? cumulative_sequence_length past_seqlens block_table cos_cache? "
        "sin_cache? slot_mapping? head_sink? q_norm_weight? k_norm_weight? k_scale? v_scale? attention_metadata?",
        "output key_cache_out? value_cache_out?",
        "do_rotary:int is_causal:int k_cache_dtype:string k_quant_type:string kv_cache_layout:string kv_num_heads:int! "
        "local_window_size:int num_heads:int! qk_norm_epsilon:float rotary_interleaved:int rotary_offset:int "
        "scale:float softcap:float v_cache_dtype:string v_head_size:int v_quant_type:string",
        _paged_attention,
    ),
):
    _register(_name, _inputs, _outputs, _attributes, _infer, "com.microsoft")

_register(
    "Attention",
    "Q K V attn_mask? past_key? past_value? nonpad_kv_seqlen? sink",
    "Y present_key? present_value? qk_matmul_output?",
    "is_causal:int kv_num_heads:int left_window_size:int q_num_heads:int qk_matmul_output_mode:int "
    "right_window_size:int scale:float softcap:float softmax_precision:int",
    _attention_with_sinks,
    OWN_DOMAIN,
)
