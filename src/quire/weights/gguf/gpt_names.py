"""Rows of names.py for the families with layer norms.

Where a family stores q, k and v in one tensor, grouped by heads, the converter undoes the grouping: `qkv_ungrouped`, a
key that Hugging Face's configurations do not have, says so."""

from collections.abc import Mapping

from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant

SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
}
EPS = "attention.layer_norm_epsilon"

SPLIT_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
COHERE_LAYER = {"attn_norm": "input_layernorm", **SPLIT_QKV, "attn_output": "self_attn.o_proj", **GATED_MLP}
BLOOM_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def outer(**names: str) -> dict[str, str]:
    """Tensors outside the layers, with their biases, and the head, which all families call lm_head."""
    names["output"] = "lm_head"
    return {f"{gguf}.{kind}": f"{name}.{kind}" for gguf, name in names.items() for kind in ("weight", "bias")}


GPT_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "gpt2": GGUFArchitecture(
        name="GPT2LMHeadModel",
        keys={**SIZES, "n_inner": "feed_forward_length", "layer_norm_epsilon": EPS},
        constants={"model_type": "gpt2", "matrices_inputs_first": False},
        tensors=outer(token_embd="transformer.wte", position_embd="transformer.wpe", output_norm="transformer.ln_f"),
        layer_tensors=GPT2_LAYER,
        layers="transformer.h",
    ),
    "jais": GGUFArchitecture(  # the converter multiplies the embeddings and the head by their factors
        name="JAISLMHeadModel",
        keys={
            **SIZES,
            "n_inner": "feed_forward_length",
            "layer_norm_epsilon": EPS,
            "max_alibi_bias": "attention.max_alibi_bias",
        },
        constants={
            "model_type": "jais",
            "matrices_inputs_first": False,
            "activation_function": "swiglu",
            "position_embedding_type": "alibi",
            "scale_qk_dot_by_d": True,
        },
        tensors=outer(token_embd="transformer.wte", output_norm="transformer.ln_f"),
        layer_tensors={**GPT2_LAYER, "ffn_gate": "mlp.c_fc2"},
        layers="transformer.h",
    ),
    "starcoder": GGUFArchitecture(
        name="GPTBigCodeForCausalLM",
        keys={**SIZES, "n_inner": "feed_forward_length", "layer_norm_epsilon": EPS},
        constants={"model_type": "gpt_bigcode", "multi_query": True},
        tensors=outer(token_embd="transformer.wte", position_embd="transformer.wpe", output_norm="transformer.ln_f"),
        layer_tensors=GPT2_LAYER,
        layers="transformer.h",
        expects={"attention.head_count_kv": 1},
    ),
    "gptj": GGUFArchitecture(
        name="GPTJForCausalLM",
        keys={**SIZES, "n_inner": "feed_forward_length", "layer_norm_epsilon": EPS},
        constants={"model_type": "gptj"},
        tensors=outer(token_embd="transformer.wte", output_norm="transformer.ln_f"),
        layer_tensors={
            "attn_norm": "ln_1",
            "attn_q": "attn.q_proj",
            "attn_k": "attn.k_proj",
            "attn_v": "attn.v_proj",
            "attn_output": "attn.out_proj",
            "ffn_up": "mlp.fc_in",
            "ffn_down": "mlp.fc_out",
        },
        layers="transformer.h",
    ),
    "gptneox": GGUFArchitecture(
        name="GPTNeoXForCausalLM",
        keys={**SIZES, "layer_norm_eps": EPS, "use_parallel_residual": "use_parallel_residual"},
        constants={"model_type": "gpt_neox", "qkv_ungrouped": True},
        tensors=outer(token_embd="gpt_neox.embed_in", output_norm="gpt_neox.final_layer_norm"),
        layer_tensors={**BLOOM_LAYER, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        layers="gpt_neox.layers",
        biases={"attention_bias": "attn_qkv"},
    ),
    "bloom": GGUFArchitecture(
        name="BloomForCausalLM",
        keys={**SIZES, "layer_norm_epsilon": EPS},
        constants={"model_type": "bloom", "qkv_ungrouped": True},
        tensors=outer(
            token_embd="transformer.word_embeddings",
            token_embd_norm="transformer.word_embeddings_layernorm",
            output_norm="transformer.ln_f",
        ),
        layer_tensors=BLOOM_LAYER,
        layers="transformer.h",
    ),
    "falcon": GGUFArchitecture(  # 7B is then a new_decoder_architecture with one key head and one norm
        name="FalconForCausalLM",
        keys={
            **SIZES,
            "num_kv_heads": "attention.head_count_kv",
            "ffn_hidden_size": "feed_forward_length",
            "layer_norm_epsilon": EPS,
        },
        constants={
            "model_type": "falcon",
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "qkv_ungrouped": True,
        },
        tensors=outer(token_embd="transformer.word_embeddings", output_norm="transformer.ln_f"),
        layer_tensors={gguf: name for gguf, name in BLOOM_LAYER.items() if gguf != "ffn_norm"},
        layers="transformer.h",
        biases={"bias": "attn_qkv"},
        variants={
            "attn_norm_2": GGUFVariant(
                {"num_ln_in_parallel_attn": 2}, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
            )
        },
    ),
    "mpt": GGUFArchitecture(
        name="MptForCausalLM",
        keys={
            **SIZES,
            "layer_norm_epsilon": EPS,
            "attn_config.kv_n_heads": "attention.head_count_kv",
            "attn_config.clip_qkv": "attention.clamp_kqv",
            "attn_config.alibi_bias_max": "attention.max_alibi_bias",
        },
        constants={"model_type": "mpt"},
        tensors=outer(token_embd="transformer.wte", output_norm="transformer.norm_f"),
        layer_tensors={
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_q_norm": "attn.q_ln",
            "attn_k_norm": "attn.k_ln",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layers="transformer.blocks",
        variants={"attn_q_norm": GGUFVariant({"attn_config.qk_ln": True})},
    ),
    "starcoder2": GGUFArchitecture(
        name="Starcoder2ForCausalLM",
        keys={**SIZES, "norm_epsilon": EPS},
        constants={"model_type": "starcoder2"},
        tensors=outer(token_embd="model.embed_tokens", output_norm="model.norm"),
        layer_tensors={
            **SPLIT_QKV,
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        biases={"use_bias": "attn_q"},
    ),
    "phi2": GGUFArchitecture(
        name="PhiForCausalLM",
        keys={**SIZES, "layer_norm_eps": EPS},
        constants={"model_type": "phi"},
        tensors=outer(token_embd="model.embed_tokens", output_norm="model.final_layernorm"),
        layer_tensors={
            **SPLIT_QKV,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        variants={"attn_qkv": GGUFVariant({"fused_qkv": True})},  # in files of 2023
    ),
    "stablelm": GGUFArchitecture(
        name="StableLmForCausalLM",
        keys={**SIZES, "layer_norm_eps": EPS},
        constants={"model_type": "stablelm", "use_parallel_residual": True, "stacked_head_norms": True},
        tensors=outer(token_embd="model.embed_tokens", output_norm="model.norm"),
        layer_tensors={
            **SPLIT_QKV,
            **GATED_MLP,
            "attn_norm": "input_layernorm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        },
        biases={"use_qkv_bias": "attn_q"},
        variants={
            "attn_q_norm": GGUFVariant({"qk_layernorm": True}),
            "ffn_norm": GGUFVariant({"use_parallel_residual": False}),  # the key of that name is often wrong
        },
    ),
    "olmo": GGUFArchitecture(
        name="OlmoForCausalLM",
        keys={**SIZES, "clip_qkv": "attention.clamp_kqv"},
        constants={"model_type": "olmo"},
        tensors=outer(token_embd="model.embed_tokens"),
        layer_tensors={**SPLIT_QKV, **GATED_MLP, "attn_output": "self_attn.o_proj"},
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
    "command-r": GGUFArchitecture(
        name="CohereForCausalLM",
        keys={**SIZES, "layer_norm_eps": EPS, "logit_scale": "logit_scale"},
        constants={"model_type": "cohere"},
        tensors=outer(token_embd="model.embed_tokens", output_norm="model.norm"),
        layer_tensors={**COHERE_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        variants={"attn_q_norm": GGUFVariant(constants={"use_qk_norm": True})},
        biases={"attention_bias": "attn_q"},
    ),
    "cohere2": GGUFArchitecture(
        name="Cohere2ForCausalLM",
        keys={**SIZES, "layer_norm_eps": EPS, "logit_scale": "logit_scale"},
        constants={"model_type": "cohere2"},
        tensors=outer(token_embd="model.embed_tokens", output_norm="model.norm"),
        layer_tensors=COHERE_LAYER,
        biases={"attention_bias": "attn_q"},
    ),
}
