"""The row of names.py for RWKV 7.

The converter stacks the factors of the six token shifts, and gives layer 0 low-rank matrices of values that it has no
use for."""

from collections.abc import Mapping

from quire.weights.gguf.architecture import GGUFArchitecture

LORAS = {
    f"time_mix_{part}{index}": f"attn.{part}_lora.lora.{name}"
    for part in "wavg"
    for index, name in enumerate(("2.bias", "0", "2"))
}

RWKV_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "rwkv7": GGUFArchitecture(
        name="RWKV7ForCausalLM",
        keys={
            "num_hidden_layers": "block_count",
            "hidden_size": "embedding_length",
            "intermediate_size": "feed_forward_length",
            "norm_eps": "attention.layer_norm_epsilon",
            "head_size": "wkv.head_size",
            "decay_low_rank_dim": "attention.decay_lora_rank",
            "a_low_rank_dim": "attention.iclr_lora_rank",
            "v_low_rank_dim": "attention.value_residual_mix_lora_rank",
            "gate_low_rank_dim": "attention.gate_lora_rank",
        },
        constants={"model_type": "rwkv7"},
        derive=lambda config: {"head_dim": config.int("head_size")},
        tensors={
            "token_embd.weight": "model.embeddings.weight",
            "output.weight": "lm_head.weight",
            **{f"token_embd_norm.{kind}": f"model.layers.0.pre_norm.{kind}" for kind in ("weight", "bias")},
            **{f"output_norm.{kind}": f"model.norm.{kind}" for kind in ("weight", "bias")},
        },
        layer_tensors={
            **LORAS,
            "attn_norm": "attn_norm",
            "attn_norm_2": "ffn_norm",
            "time_mix_lerp_fused": "attn.x_x",
            "time_mix_k_k": "attn.k_k",
            "time_mix_k_a": "attn.k_a",
            "time_mix_r_k": "attn.r_k",
            "time_mix_receptance": "attn.r_proj",
            "time_mix_key": "attn.k_proj",
            "time_mix_value": "attn.v_proj",
            "time_mix_output": "attn.o_proj",
            "time_mix_ln": "attn.g_norm",
            "channel_mix_lerp_k": "ffn.x_k",
            "channel_mix_key": "ffn.key",
            "channel_mix_value": "ffn.value",
        },
    ),
}
