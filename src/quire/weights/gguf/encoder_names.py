"""Rows of names.py for encoders. GGUF has one architecture for BERT and for those that differ in their tokenizer and in
the first rows of their positions, which the converter cuts off: RoBERTa, XLM-RoBERTa, DistilBERT. (Of CamemBERT it does
not cut them off, and nothing in the file tells.) Encoders with rope have architectures of their own."""

from collections.abc import Mapping

from quire.weights.gguf import derived_config
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
from quire.weights.gguf.shared_names import (
    GATED_LAYER,
    GEMMA_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    OUTER_TENSORS,
    PRE_AND_POST_NORMS,
    like_llama,
)

ENCODER_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}
EMBEDDINGS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
}
BERT_TENSORS = {
    **EMBEDDINGS,
    **{f"token_embd_norm.{part}": f"embeddings.LayerNorm.{part}" for part in ("weight", "bias")},
}
BERT_ATTENTION = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
}
NOMIC_TENSORS = {**EMBEDDINGS, **{f"token_embd_norm.{part}": f"emb_ln.{part}" for part in ("weight", "bias")}}
NOMIC_LAYER = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}

ENCODER_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "bert": GGUFArchitecture(
        name="BertModel",
        keys=ENCODER_KEYS,
        constants={"model_type": "bert", "hidden_act": "gelu", "pad_token_id": -1},  # position 0 is the first row
        tensors={
            **BERT_TENSORS,
            "position_embd.weight": "embeddings.position_embeddings.weight",
            **{f"cls.{part}": f"classifier.dense.{part}" for part in ("weight", "bias")},
            **{f"cls.output.{part}": f"classifier.out_proj.{part}" for part in ("weight", "bias")},
        },
        layers="encoder.layer",
        layer_tensors={
            **BERT_ATTENTION,
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        expects={"attention.causal": False},
        variants={
            "cls": GGUFVariant(
                constants={"architectures": ["RobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
            )
        },
    ),
    "nomic-bert": GGUFArchitecture(
        name="NomicBertModel",
        keys=ENCODER_KEYS,
        constants={"model_type": "nomic_bert", "hidden_act": "silu"},
        tensors=NOMIC_TENSORS,
        layers="encoder.layers",
        layer_tensors={**NOMIC_LAYER, "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12"},
        expects={"attention.causal": False},
    ),
    "nomic-bert-moe": GGUFArchitecture(
        name="NomicBertModel",
        keys={
            **ENCODER_KEYS,
            "num_local_experts": "expert_count",
            "num_experts": "expert_count",
            "moe_top_k": "expert_used_count",
            "moe_every_n_layers": "moe_every_n_layers",
        },
        constants={"model_type": "nomic_bert", "activation_function": "gelu"}
        | dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        tensors=NOMIC_TENSORS,
        layers="encoder.layers",
        layer_tensors={
            **NOMIC_LAYER,
            "ffn_gate_inp": "mlp.router.layer",
            "ffn_up_exps": "mlp.experts.{}.w1",
            "ffn_down_exps": "mlp.experts.{}.w2",
        },
        expects={"attention.causal": False},
    ),
    "jina-bert-v2": GGUFArchitecture(  # with gate and up as two tensors
        name="JinaBertModel",
        keys=ENCODER_KEYS,
        constants={"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        tensors=BERT_TENSORS,
        layers="encoder.layer",
        layer_tensors={
            **BERT_ATTENTION,
            "ffn_gate": "mlp.gated_layers_w",
            "ffn_up": "mlp.gated_layers_v",
            "ffn_down": "mlp.wo",
            "layer_output_norm": "mlp.layernorm",
        },
        expects={"attention.causal": False, "attention.max_alibi_bias": 8.0},
    ),
    "jina-bert-v3": GGUFArchitecture(
        name="JinaEmbeddingsV3Model",
        keys=ENCODER_KEYS,
        constants={"model_type": "jina_embeddings_v3", "hidden_act": "gelu"},
        tensors=NOMIC_TENSORS,
        layers="encoder.layers",
        layer_tensors={**NOMIC_LAYER, "attn_qkv": "mixer.Wqkv", "attn_output": "mixer.out_proj"},
        expects={"attention.causal": False},
    ),
    "modern-bert": GGUFArchitecture(
        name="ModernBertModel",
        keys={
            **ENCODER_KEYS,
            "norm_eps": "attention.layer_norm_epsilon",
            "rope_local_base_freq": "rope.freq_base_swa",
            "local_attention": "attention.sliding_window",
            "global_attn_every_n_layers": "attention.sliding_window_pattern",
        },
        constants={"model_type": "modernbert", "hidden_activation": "gelu"},
        tensors={
            "token_embd.weight": "embeddings.tok_embeddings.weight",
            "token_embd_norm.weight": "embeddings.norm.weight",
            "output_norm.weight": "final_norm.weight",
        },
        layers="layers",
        layer_tensors={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        expects={"attention.causal": False},
    ),
    "eurobert": like_llama("EuroBertModel", "eurobert", expects={"attention.causal": False}),
    "llama-embed": like_llama(
        "LlamaBidirectionalModel",
        "llama_bidirec",
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "gemma-embedding": GGUFArchitecture(
        name="Gemma3Model",
        keys=GEMMA_KEYS,
        constants={
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": True,
        },
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        norm_offset=1.0,
        derive=derived_config.gemma,
    ),
}
