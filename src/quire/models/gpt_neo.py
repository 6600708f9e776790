"""GPT-Neo: GPT-2 with a window in some layers, and scores that are not scaled."""

from dataclasses import replace

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

KINDS = ("global", "local")


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    layers, heads = hf.int("num_layers"), hf.int("num_heads")
    c = gpt.read_config(
        hf.with_values({"num_hidden_layers": layers, "num_attention_heads": heads}),
        activation=read_activation(hf, "activation_function", "gelu_new"),
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        scale=1.0,
        windows=_windows(hf, layers),
    )
    return replace(c, intermediate=hf.int("intermediate_size", c.intermediate))


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """The windows of `attention_layers`, or of `attention_types`: [kinds, how often they are repeated], ..."""
    kinds = hf.list("attention_layers", [])
    if not kinds:
        for repeated, times in hf.list("attention_types", [[KINDS, layers // 2]]):
            kinds = [*kinds, *(list(repeated) * min(times, layers))]
    if len(kinds) != layers:
        raise BadCheckpoint(f"attention_types lists {len(kinds)} layers, and there are {layers}")
    if unknown := sorted({str(kind) for kind in kinds} - {*KINDS}):
        raise Unsupported(f"attention_types lists {', '.join(unknown)}", f"supported: {', '.join(KINDS)}")
    window = hf.int("window_size", 256)
    return tuple(window if kind == "local" else 0 for kind in kinds)


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("wte", config.vocab, config.hidden),
        "positions": EmbeddingTable("wpe", config.max_position, config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    tensors = gpt.GPTTensors("transformer.", "h", top, layer_specs(config))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig) -> TensorSpecs:
    return {
        "attn_norm": LayerNorm("ln_1", c.hidden),
        "qkv": Linear({f"attn.attention.{x}_proj": c.q_size for x in "qkv"}, c.hidden),
        "out": Linear({"attn.attention.out_proj": c.hidden}, c.q_size, bias=True),
        "mlp_norm": LayerNorm("ln_2", c.hidden),
        "up": Linear({"mlp.c_fc": c.intermediate}, c.hidden, bias=True),
        "down": Linear({"mlp.c_proj": c.hidden}, c.intermediate, bias=True),
    }
