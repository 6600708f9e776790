"""LFM3: LFM2 with gated heads, windows in some of the layers with attention, and norms of what layers give."""

from dataclasses import replace

from quire.models import lfm2, llama
from quire.models.config import ATTENTION
from quire.models.gating import head_gate
from quire.models.lfm2 import Lfm2Config, Lfm2Layer
from quire.models.llama_families import translate
from quire.models.loading import LoadedModel, TensorSpecs
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

GATE, SLIDING = "self_attn.gate_proj", "sliding_attention"
POST_NORMS = {"post_attn_norm": "post_operator_norm", "post_mlp_norm": "post_ffn_norm"}
FAMILY = replace(
    lfm2.FAMILY,
    defaults={**lfm2.FAMILY.defaults, "block_auto_adjust_ff_dim": False, "conv_L_cache": 7, "head_dim": 128},
    expects={"rope_local_scaling": (None,)},
    default_window=256,
    local_rope=True,
    renamed={**lfm2.FAMILY.renamed, ".self_attn.g_proj.": f".{GATE}."},  # as transformers calls it
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)


def config(hf: CheckpointConfig) -> Lfm2Config:
    norms = {**FAMILY.norms, **(POST_NORMS if hf.bool("use_sandwich_norm", True) else {})}
    family = replace(FAMILY, norms=norms, gate=GATE if hf.bool("use_attention_gate", True) else None)
    given, kinds = translate(hf, family), hf.list("layer_types")
    window = given.int("sliding_window", 0)
    fields = llama.config_fields(given, family)
    fields["windows"] = tuple(window if kind == SLIDING else 0 for kind in kinds)
    mixers = given.with_values({"layer_types": [ATTENTION if kind == SLIDING else kind for kind in kinds]})
    return Lfm2Config(**lfm2.hybrid_fields(mixers, fields))


def layer_specs(c: Lfm2Config, flat: bool) -> list[TensorSpecs]:
    attending = dict(llama.layer_specs(c))
    if c.family.gate:
        attending["gate"] = head_gate(c.family.gate, c.heads, c.head_dim, c.hidden)
    return lfm2.with_convs(c, attending, flat)


def load(ops: OpSet, checkpoint: Checkpoint, config: Lfm2Config, max_model_len: int) -> LoadedModel:
    checkpoint = RenamedCheckpoint.by_substring(checkpoint, FAMILY.renamed)
    layers = layer_specs(config, lfm2.has_flat_convs(checkpoint))
    return llama.load_layers(ops, checkpoint, config, max_model_len, layers, Lfm2Layer, mixer=lfm2.mixer)
