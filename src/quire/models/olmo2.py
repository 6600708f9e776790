"""OLMo 2 and 3: Llama whose norms come after attention and feed-forward, with norms of whole queries and keys. In 3,
three layers in four have a window, and only the fourth stretches its rotation. EXAONE 4 norms heads; where some of its
layers have a window, the others do not rotate."""

from dataclasses import replace

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel, Vector
from quire.models.rope import RopeSpec
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> LlamaConfig:
    hf.expect("hidden_act", "silu")
    hf.expect("rope_local_scaling", None)
    if hf.architecture == "Olmo3ForCausalLM" and "layer_types" not in hf:
        layers = range(1, hf.int("num_hidden_layers") + 1)
        hf = hf.with_values({"layer_types": [["full", "sliding"][layer % 4 > 0] + "_attention" for layer in layers]})
    if hf.architecture == "Exaone4ForCausalLM":
        numbers = llama.numbers(hf)
        rotated = tuple(map(bool, numbers["windows"])) if any(numbers["windows"]) else numbers["rotated"]
        return LlamaConfig(**numbers | {"qk_norms": "heads", "rotated": rotated})
    c = LlamaConfig(**llama.numbers(hf) | {"qk_norms": "rows"})
    if hf.architecture != "Olmo3ForCausalLM":
        return c
    theta = hf.float("rope_local_base_freq", c.rope.theta)
    return replace(c, local_rope=RopeSpec("default", theta, c.head_dim, c.rope.max_position, {}))


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    names = dict(llama.layer_names(config))
    del names["norm1"], names["norm2"]
    names["after1"] = Vector("post_attention_layernorm", config.hidden)
    names["after2"] = Vector("post_feedforward_layernorm", config.hidden)
    return llama.load_as(ops, checkpoint, config, max_model_len, names)
