"""Rows as in llama_families.py for families whose tensors have other names than Llama's."""

from collections.abc import Mapping

from quire.core.errors import BadCheckpoint
from quire.models.activations import NAMES as ACTIVATION_NAMES
from quire.models.layer_patterns import window_by_pattern
from quire.models.llama_families import LlamaFamily
from quire.weights.config import CheckpointConfig


def qwen_1(hf: CheckpointConfig) -> CheckpointConfig:
    """`intermediate_size` is that of gate and up together. Beyond `seq_length`, scores and frequencies would depend on
    the length of the whole text: it is the longest that is served."""
    both = hf.int("intermediate_size")
    if both % 2:
        raise BadCheckpoint(f"{hf.source}: intermediate_size is {both}, and gate and up share it")
    sizes = {"intermediate_size": both // 2, "max_position_embeddings": hf.int("seq_length")}
    return hf.with_values(sizes | {"rope_scaling": None})


def chatglm(hf: CheckpointConfig) -> CheckpointConfig:
    """ChatGLM 2 and 3 and GLM-4, as their authors spell it."""
    shared_keys = hf.bool("multi_query_attention", False)
    values = {
        "num_key_value_heads": hf.int("multi_query_group_num" if shared_keys else "num_attention_heads"),
        "vocab_size": hf.int("padded_vocab_size", hf.int("vocab_size", 0)),
        "rope_theta": 10_000.0 * hf.float("rope_ratio", 1.0),
    }
    return hf.with_values(values)


def refact(hf: CheckpointConfig) -> CheckpointConfig:
    """Two thirds of four times the hidden size, in whole 256."""
    size = 256 * -(-int(2 * 4 * hf.int("hidden_size") / 3) // 256)
    return hf if "intermediate_size" in hf else hf.with_values({"intermediate_size": size})


GPT_2_NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".input_layernorm.",
    ".attn.c_attn.": ".self_attn.qkv_proj.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    ".ln_2.": ".post_attention_layernorm.",
}
TELECHAT = LlamaFamily(
    keys={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    },
    defaults={"hidden_act": "silu", "attention_out_bias": True},
    expects={"embed_layernorm": (False, None), "apply_residual_connection_post_layernorm": (False, None)},
    kv="self_attn.kv_proj",
    kv_by_head=True,
    down_bias=True,
    renamed={
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".self_attention.query.": ".self_attn.q_proj.",
        ".self_attention.key_value.": ".self_attn.kv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
    },
)
REFACT = LlamaFamily(
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={"hidden_act": "silu", "num_key_value_heads": 1},
    expects={"multi_query": (True, None)},
    adapt=refact,
    alibi=True,
    kv="self_attn.kv_proj",
    gate_up=("mlp.gate_up_proj",),
    renamed={
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".ln_1.": ".input_layernorm.",
        ".attn.q.": ".self_attn.q_proj.",
        ".attn.kv.": ".self_attn.kv_proj.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    },
)
CODESHELL = LlamaFamily(
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "num_query_groups",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    defaults={"use_bias": True},
    expects={"position_embedding_type": ("rope", None), "group_query_attention": (True, None)},
    activations=dict(ACTIVATION_NAMES),
    layer_norm=True,
    fused_qkv=True,
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    gated=False,
    renamed=GPT_2_NAMES,
)
PLAMO3_NORMS = {
    "attn_norm": "pre_mixer_norm",
    "post_attn_norm": "post_mixer_norm",
    "mlp_norm": "pre_mlp_norm",
    "post_mlp_norm": "post_mlp_norm",
}
PLAMO_3 = LlamaFamily(  # of 2025
    keys={"sliding_window": "window_size", "rope_local_base_freq": "rope_local_theta"},
    defaults={"hidden_act": "silu", "sliding_window_pattern": 8},
    expects={"rope_local_scaling": (None,)},
    windows=window_by_pattern,
    local_rope=True,
    qk_norms="heads",
    norms=PLAMO3_NORMS,
    norm_offset=1.0,
    norm_offsets={"post_attn_norm": 0.2, "post_mlp_norm": 5**-1.5},
    fused_qkv=True,
    gate_up=("mlp.gate_up_proj",),
    renamed={"model.layers.layers.": "model.layers.", ".mixer.": ".self_attn."},
)
QWEN_1 = LlamaFamily(
    keys={"head_dim": "kv_channels", "rms_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
    defaults={"hidden_act": "silu"},
    expects={"no_bias": (True, None), "rotary_pct": (1.0, None), "scale_attn_weights": (True, None)},
    adapt=qwen_1,
    qkv_bias=True,
    fused_qkv=True,
    renamed={
        **GPT_2_NAMES,
        ".mlp.w2.": ".mlp.gate_proj.",
        ".mlp.w1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    },
)
CHATGLM = LlamaFamily(
    keys={
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layernorm_epsilon",
        "qkv_bias": "add_qkv_bias",
    },
    defaults={"hidden_act": "silu", "partial_rotary_factor": 0.5},
    expects={
        "rmsnorm": (True, None),
        "post_layer_norm": (True, None),
        "original_rope": (True, None),
        "add_bias_linear": (False, None),
        "apply_residual_connection_post_layernorm": (False, None),
        "position_encoding_2d": (False, None),  # the first ChatGLM
        "quantization_bit": (0, None),
        "pre_seq_len": (None,),
    },
    adapt=chatglm,
    rope_interleaved=True,
    fused_qkv=True,
    gate_up=("mlp.gate_up_proj",),
    renamed={
        "transformer.embedding.word_embeddings.": "model.embed_tokens.",
        "transformer.rotary_pos_emb.": "model.rotary_emb.",
        "transformer.encoder.final_layernorm.": "model.norm.",
        "transformer.output_layer.": "lm_head.",
        "transformer.encoder.layers.": "model.layers.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    },
)

OLDER_FAMILIES: Mapping[str, LlamaFamily] = {
    "QWenLMHeadModel": QWEN_1,
    "ChatGLMModel": CHATGLM,
    "ChatGLMForConditionalGeneration": CHATGLM,
    "InternLMForCausalLM": LlamaFamily(keys={"attention_bias": "bias"}),
    "OrionForCausalLM": LlamaFamily(layer_norm=True),
    "TeleChatForCausalLM": TELECHAT,
    "TeleChat2ForCausalLM": TELECHAT,
    "GPTRefactForCausalLM": REFACT,
    "Plamo3ForCausalLM": PLAMO_3,
    "CodeShellForCausalLM": CODESHELL,
    "BitNetForCausalLM": LlamaFamily(
        defaults={"hidden_act": "relu2", "rope_theta": 500_000.0},
        activations=dict(ACTIVATION_NAMES),
        sub_norms={"out_norm": "self_attn.attn_sub_norm", "down_norm": "mlp.ffn_sub_norm"},
    ),
}
