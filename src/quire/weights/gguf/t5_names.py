"""Rows of names.py for T5, mT5 and umT5, and for their encoders alone."""

from collections.abc import Mapping
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant

KEYS = {
    "num_layers": "block_count",
    "num_decoder_layers": "decoder_block_count",
    "n_positions": "context_length",
    "d_model": "embedding_length",
    "d_ff": "feed_forward_length",
    "num_heads": "attention.head_count",
    "d_kv": "attention.key_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "relative_attention_num_buckets": "attention.relative_buckets_count",
    "decoder_start_token_id": "decoder_start_token_id",
}
ENCODER_LAYER = {
    "enc.attn_norm": "layer.0.layer_norm",
    **{f"enc.attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "enc.attn_rel_b": "layer.0.SelfAttention.relative_attention_bias.weight",
    "enc.ffn_norm": "layer.1.layer_norm",
    "enc.ffn_up": "layer.1.DenseReluDense.wi",
    "enc.ffn_down": "layer.1.DenseReluDense.wo",
}
DECODER_LAYER = {
    "dec.attn_norm": "layer.0.layer_norm",
    **{f"dec.attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "dec.attn_rel_b": "layer.0.SelfAttention.relative_attention_bias.weight",
    "dec.cross_attn_norm": "layer.1.layer_norm",
    **{f"dec.cross_attn_{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"},
    "dec.cross_attn_rel_b": "layer.1.EncDecAttention.relative_attention_bias.weight",
    "dec.ffn_norm": "layer.2.layer_norm",
    "dec.ffn_up": "layer.2.DenseReluDense.wi",
    "dec.ffn_down": "layer.2.DenseReluDense.wo",
}
GATED = {
    f"{side}.ffn_{part}": f"layer.{place}.DenseReluDense.{name}"
    for side, place in (("enc", 1), ("dec", 2))
    for part, name in (("gate", "wi_0"), ("up", "wi_1"))
}


def _t5(config: CheckpointConfig) -> dict[str, Any]:
    """umT5, whose layers all have biases of positions, has the architecture name of T5."""
    every = len(config.list("biased_layers")) > 1
    return {"architectures": ["UMT5ForConditionalGeneration"]} if every else {}


T5_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "t5": GGUFArchitecture(
        name="T5ForConditionalGeneration",
        keys=KEYS,
        constants={"model_type": "t5", "feed_forward_proj": "relu"},
        tensors={
            "token_embd.weight": "shared.weight",
            "output.weight": "lm_head.weight",
            "enc.output_norm.weight": "encoder.final_layer_norm.weight",
            "dec.output_norm.weight": "decoder.final_layer_norm.weight",
        },
        layer_tensors={**ENCODER_LAYER, **DECODER_LAYER},
        layers_with={"biased_layers": "enc.attn_rel_b"},
        derive=_t5,
        sides={"enc": "encoder.block", "dec": "decoder.block"},
        variants={"enc.ffn_gate": GGUFVariant({"feed_forward_proj": "gated-gelu"}, GATED)},
    ),
    "t5encoder": GGUFArchitecture(
        name="T5EncoderModel",
        keys=KEYS,
        constants={"model_type": "t5", "feed_forward_proj": "relu"},
        tensors={
            "token_embd.weight": "shared.weight",
            "enc.output_norm.weight": "encoder.final_layer_norm.weight",
        },
        layer_tensors=ENCODER_LAYER,
        sides={"enc": "encoder.block"},
        variants={"enc.ffn_gate": GGUFVariant({"feed_forward_proj": "gated-gelu"}, GATED)},
    ),
}
