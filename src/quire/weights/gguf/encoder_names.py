"""Rows of names.py for encoders. GGUF has one architecture for BERT and for those that differ in their tokenizer and in
the first rows of their positions, which the converter cuts off: RoBERTa, XLM-RoBERTa, DistilBERT. (Of CamemBERT it does
not cut them off, and nothing in the file tells.)"""

from collections.abc import Mapping

from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant

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

ENCODER_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "bert": GGUFArchitecture(
        name="BertModel",
        keys=ENCODER_KEYS,
        constants={"model_type": "bert", "hidden_act": "gelu", "pad_token_id": -1},  # position 0 is the first row
        tensors={
            **EMBEDDINGS,
            "position_embd.weight": "embeddings.position_embeddings.weight",
            **{f"token_embd_norm.{part}": f"embeddings.LayerNorm.{part}" for part in ("weight", "bias")},
            **{f"cls.{part}": f"classifier.dense.{part}" for part in ("weight", "bias")},
            **{f"cls.output.{part}": f"classifier.out_proj.{part}" for part in ("weight", "bias")},
        },
        layers="encoder.layer",
        layer_tensors={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
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
        tensors={
            **EMBEDDINGS,
            **{f"token_embd_norm.{part}": f"emb_ln.{part}" for part in ("weight", "bias")},
        },
        layers="encoder.layers",
        layer_tensors={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        expects={"attention.causal": False},
    ),
}
