"""EXAONE 3: Llama under other names."""

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel
from quire.models.text_part import Renamed
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

OURS = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".input_layernorm.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".ln_2.": ".post_attention_layernorm.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}


def config(hf: CheckpointConfig) -> LlamaConfig:
    names = {
        "hidden_act": "activation_function",
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    return llama.config(hf.with_values({ours: hf.get(theirs) for ours, theirs in names.items() if theirs in hf}))


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    renamed = Renamed.by_parts(checkpoint, OURS)
    return llama.load(ops, renamed, config, max_model_len)
