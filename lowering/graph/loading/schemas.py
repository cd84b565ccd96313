"""Schemas of operators that onnxruntime's optimizers write, for onnx's checker and its inference of types and shapes.

LayerNormalization came to ai.onnx with opset 17 and SimplifiedLayerNormalization never, but onnxruntime has both there.
Its other operators are those of lowering/ops/microsoft. The compiler's own Attention has a schema, too. Importing this
module registers all, once per process.
"""

from __future__ import annotations

from typing import Any

import onnx.reference  # noqa: F401  (first: its import fails once two operators of one name are registered)
from onnx import defs

from .legality import OWN_DOMAIN
from .type_inference import (
    Inference,
    infer_attention,
    infer_attention_with_sinks,
    infer_causal_conv,
    infer_conv_rank,
    infer_decoder_attention,
    infer_embedding,
    infer_group_query_attention,
    infer_halved,
    infer_like_first,
    infer_like_second,
    infer_linear_attention,
    infer_lstm,
    infer_matmul,
    infer_multi_head_attention,
    infer_packed_attention,
    infer_packed_matmul,
    infer_paged_attention,
    infer_q_attention,
    infer_q_embedding,
    infer_quantized_rows,
)

_OPTION = defs.OpSchema.FormalParameterOption
_ATTRIBUTE = {
    "int": defs.OpSchema.AttrType.INT,
    "ints": defs.OpSchema.AttrType.INTS,
    "float": defs.OpSchema.AttrType.FLOAT,
    "floats": defs.OpSchema.AttrType.FLOATS,
    "string": defs.OpSchema.AttrType.STRING,
    "strings": defs.OpSchema.AttrType.STRINGS,
}
# Types are checked by the lowerings, which have more specific errors.
_ANY = [
    f"tensor({name})"
    for name in ("float16", "bfloat16", "float", "double", "int8", "int32", "int64", "uint8", "bool", "float8e4m3fn")
]


def _register(name: str, inputs: str, outputs: str, attributes: str, infer: Inference, domain: str) -> None:
    """Register a schema.

    inputs and outputs are names, optional ones with ?; attributes are name:type, with ! if required.
    """

    def parameters(names: str, letter: str) -> list[defs.OpSchema.FormalParameter]:
        return [
            defs.OpSchema.FormalParameter(
                n.rstrip("?"), f"{letter}{k}", param_option=_OPTION.Optional if n.endswith("?") else _OPTION.Single
            )
            for k, n in enumerate(names.split())
        ]

    formal_inputs, formal_outputs = parameters(inputs, "T"), parameters(outputs, "U")
    pairs = [text.split(":") for text in attributes.split()]
    schema = defs.OpSchema(
        name,
        domain,
        1,
        inputs=formal_inputs,
        outputs=formal_outputs,
        type_constraints=[(parameter.type_str, _ANY, "") for parameter in (*formal_inputs, *formal_outputs)],
        attributes=[
            defs.OpSchema.Attribute(n, _ATTRIBUTE[kind.rstrip("!")], "", required=kind.endswith("!"))
            for n, kind in pairs
        ],
    )
    count = len(formal_outputs)

    def inference(context: Any) -> None:
        for k, kind in infer(context).items():
            if k < min(count, context.get_num_outputs()):
                context.set_output_type(k, kind)

    schema.set_type_and_shape_inference_function(inference)
    defs.register_schema(schema)


# -- the operators: inputs, outputs, attributes -----------------------------------------------------------------------

_NORM = "axis:int epsilon:float stash_type:int"
_register("LayerNormalization", "X Scale B?", "Y Mean? InvStdDev?", _NORM, infer_like_second, "")
_register("SimplifiedLayerNormalization", "X scale", "Y inv_std_var?", _NORM, infer_like_second, "")

_SKIP = "output mean? inv_std_var? input_skip_bias_sum?"
_MOE = (
    "activation_alpha:float activation_beta:float activation_type:string k:int normalize_routing_weights:int "
    "swiglu_fusion:int swiglu_limit:float swiglu_limit_after_activation:int use_sparse_mixer:int"
)
_MATMUL = "alpha:float transA:int transB:int"


for _name, _inputs, _outputs, _attributes, _infer in (
    ("SimplifiedLayerNormalization", "X scale", "Y inv_std_var?", _NORM, infer_like_second),
    ("SkipLayerNormalization", "input skip gamma beta? bias?", _SKIP, "epsilon:float", infer_like_first(0, 3)),
    ("SkipSimplifiedLayerNormalization", "input skip gamma bias?", _SKIP, "epsilon:float", infer_like_first(0, 3)),
    (
        "EmbedLayerNormalization",
        "input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma beta mask? position_ids?",
        "output mask_index? embedding_sum?",
        "epsilon:float mask_index_type:int",
        infer_embedding,
    ),
    (
        "QEmbedLayerNormalization",
        "input_ids segment_ids? word_embedding_quant position_embedding_quant segment_embedding? gamma_quant "
        "beta_quant mask? word_embedding_scale position_embedding_scale segment_embedding_scale? gamma_scale "
        "beta_scale word_embedding_zero_point position_embedding_zero_point segment_embedding_zero_point? "
        "gamma_zero_point beta_zero_point",
        "layernorm_out mask_index_out",
        "epsilon:float",
        infer_q_embedding,
    ),
    ("Gelu", "X", "Y", "", infer_like_first(0)),
    ("FastGelu", "X bias?", "Y", "", infer_like_first(0)),
    ("BiasGelu", "A B", "C", "", infer_like_first(0)),
    ("BiasSplitGelu", "X bias", "Y", "", infer_halved),
    ("QuickGelu", "X", "Y", "alpha:float", infer_like_first(0)),
    (
        "FusedConv",
        "X W B? Z?",
        "Y",
        "activation:string activation_params:floats auto_pad:string dilations:ints group:int kernel_shape:ints "
        "pads:ints strides:ints",
        infer_conv_rank,
    ),
    (
        "FusedGemm",
        "A B C?",
        "Y",
        "activation:string activation_alpha:float activation_beta:float activation_gamma:float alpha:float beta:float "
        "transA:int transB:int",
        infer_matmul,
    ),
    ("Inverse", "X", "Y", "", infer_like_first(0)),
    ("Trilu", "X k?", "Y", "upper:int", infer_like_first(0)),
    ("FusedMatMul", "A B", "Y", f"{_MATMUL} transBatchA:int transBatchB:int", infer_matmul),
    ("TransposeMatMul", "A B", "Y", _MATMUL, infer_matmul),
    (
        "MatMulNBits",
        "A B scales zero_points? g_idx? bias?",
        "Y",
        "K:int! N:int! accuracy_level:int bits:int block_size:int! weight_prepacked:int",
        infer_packed_matmul,
    ),
    (
        "GatherBlockQuantized",
        "data indices scales zero_points?",
        "output",
        "bits:int block_size:int gather_axis:int quantize_axis:int",
        infer_quantized_rows,
    ),
    (
        "MoE",
        "input router_probs fc1_experts_weights fc1_experts_bias? fc2_experts_weights fc2_experts_bias? "
        "fc3_experts_weights? fc3_experts_bias?",
        "output",
        _MOE,
        infer_like_first(0),
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
        infer_like_first(0),
    ),
    (
        "RotaryEmbedding",
        "input position_ids cos_cache sin_cache",
        "output",
        "interleaved:int is_packed_batching:int num_heads:int rotary_embedding_dim:int scale:float",
        infer_like_first(0),
    ),
    (
        "Attention",
        "input weights bias? mask_index? past? attention_bias? past_sequence_length?",
        "output present?",
        "do_rotary:int mask_filter_value:float num_heads:int! past_present_share_buffer:int qkv_hidden_sizes:ints "
        "rotary_embedding_dim:int scale:float unidirectional:int",
        infer_attention,
    ),
    (
        "QAttention",
        "input weight bias input_scale weight_scale mask_index? input_zero_point? weight_zero_point? past?",
        "output present?",
        "do_rotary:int mask_filter_value:float num_heads:int! past_present_share_buffer:int scale:float "
        "unidirectional:int",
        infer_q_attention,
    ),
    (
        "MultiHeadAttention",
        "query key? value? bias? key_padding_mask? attention_bias? past_key? past_value? past_sequence_length? "
        "cache_indirection?",
        "output present_key? present_value? qk?",
        "mask_filter_value:float num_heads:int! scale:float unidirectional:int",
        infer_multi_head_attention,
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
        infer_group_query_attention,
    ),
    (
        "PackedMultiHeadAttention",
        "query key? value? bias? token_offset cumulative_sequence_length attention_bias?",
        "output",
        "mask_filter_value:float num_heads:int! scale:float",
        infer_packed_attention,
    ),
    (
        "DecoderMaskedMultiHeadAttention",
        "query key? value? mask_index? attention_bias? past_key? past_value? past_sequence_length? beam_width? "
        "cache_indirection? bias?",
        "output present_key? present_value? qk?",
        "mask_filter_value:float num_heads:int! output_qk:int past_present_share_buffer:int scale:float",
        infer_decoder_attention,
    ),
    (
        "CausalConvWithState",
        "input weight bias? past_state?",
        "output present_state? state_update?",
        "activation:string channels_last:int dilation:int input_channel_offset:int input_channels:int ndim:int "
        "state_channels_last:int state_length:int state_update_capacity:int state_window:int",
        infer_causal_conv,
    ),
    (
        "DynamicQuantizeLSTM",
        "X W R B? sequence_lens? initial_h? initial_c? P? W_scale W_zero_point R_scale R_zero_point",
        "Y? Y_h? Y_c?",
        "activation_alpha:floats activation_beta:floats activations:strings clip:float direction:string "
        "hidden_size:int input_forget:int",
        infer_lstm,
    ),
    (
        "LinearAttention",
        "query key value past_state? decay? beta?",
        "output present_state?",
        "chunk_size:int kv_num_heads:int! q_num_heads:int! scale:float state_window:int update_rule:string",
        infer_linear_attention,
    ),
    (
        "PagedAttention",
        "query key? value? key_cache value_cache? cumulative_sequence_length past_seqlens block_table cos_cache? "
        "sin_cache? slot_mapping? head_sink? q_norm_weight? k_norm_weight? k_scale? v_scale? attention_metadata?",
        "output key_cache_out? value_cache_out?",
        "do_rotary:int is_causal:int k_cache_dtype:string k_quant_type:string kv_cache_layout:string kv_num_heads:int! "
        "local_window_size:int num_heads:int! qk_norm_epsilon:float rotary_interleaved:int rotary_offset:int "
        "scale:float softcap:float v_cache_dtype:string v_head_size:int v_quant_type:string",
        infer_paged_attention,
    ),
):
    _register(_name, _inputs, _outputs, _attributes, _infer, "com.microsoft")

_register(
    "Attention",
    "Q K V attn_mask? past_key? past_value? nonpad_kv_seqlen? sink",
    "Y present_key? present_value? qk_matmul_output?",
    "is_causal:int kv_num_heads:int left_window_size:int q_num_heads:int qk_matmul_output_mode:int "
    "right_window_size:int scale:float softcap:float softmax_precision:int",
    infer_attention_with_sinks,
    OWN_DOMAIN,
)
