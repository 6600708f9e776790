"""Keys and tensors that several rows of names.py share, and the row that most differ little from."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.weights.gguf.architecture import GGUFArchitecture

NOTHING: Mapping[str, Any] = MappingProxyType({})

DECODER_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}

# "rope_freqs" is not in Hugging Face's checkpoints: [rotary_dim / 2] divisors of the rotary frequencies, which the
# converter computes from Llama 3's rope_scaling. A file that has it has no rope_scaling.
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs",
}

GATED_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

PRE_AND_POST_NORMS = {  # of attention and feed-forward
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

EXPERT_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}

MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

GLM_KEYS = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func
# Of a layer behind the last that predicts further tokens, beside those of other layers.
NEXTN_TENSORS = {
    **{f"nextn.{part}": part for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("head", "norm")},
}
MTP_TENSORS = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}

GEMMA_KEYS = {
    **DECODER_KEYS,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}

GRANITE_KEYS = {
    **DECODER_KEYS,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

INTERLEAVED_QK = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def like_llama(
    name: str,
    model_type: str,
    keys: Mapping[str, str] = NOTHING,
    constants: Mapping[str, Any] = NOTHING,
    tensors: Mapping[str, str] = NOTHING,
    layer_tensors: Mapping[str, str] = NOTHING,
    **others: Any,
) -> GGUFArchitecture:
    """A row that has the keys and tensors of Llama, and these: beside them, or in their place. `others`: fields of a
    row."""
    return GGUFArchitecture(
        name,
        {**DECODER_KEYS, **keys},
        {"model_type": model_type, "hidden_act": "silu", **constants},
        {**OUTER_TENSORS, **tensors},
        {**GATED_LAYER, **layer_tensors},
        **others,
    )
