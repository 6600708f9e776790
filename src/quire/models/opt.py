"""OPT: learned positions, of which the first two rows are not used. OPT-350m has norms after residual sums, and an
embedding that is narrower than its layers."""

from quire.models import gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LoadedModel, TensorSpec, TensorSpecs
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    return gpt.read_config(
        hf,
        intermediate=hf.int("ffn_dim"),
        activation=read_activation(hf, "activation_function", "relu"),
        tied=hf.bool("tie_word_embeddings", True),
        bias=hf.bool("enable_bias", True),
        post_norm=not hf.bool("do_layer_norm_before", True),
    )


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    hf = checkpoint.config
    affine = hf.bool("layer_norm_elementwise_affine", True)
    tensors = gpt.GPTTensors("model.", "decoder.layers", top_specs(config, hf, affine), layer_specs(config, affine))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def top_specs(c: gpt.GPTConfig, hf: CheckpointConfig, affine: bool) -> TensorSpecs:
    width = hf.int("word_embed_proj_dim", c.hidden)
    specs: dict[str, TensorSpec] = {
        "embed": EmbeddingTable("decoder.embed_tokens", c.vocab, width),
        "positions": EmbeddingTable("decoder.embed_positions", c.max_position, c.hidden, skip_rows=2),
    }
    if width != c.hidden:
        specs |= {
            "embed_in": Linear({"decoder.project_in": c.hidden}, width),
            "embed_out": Linear({"decoder.project_out": width}, c.hidden),
        }
    if not c.post_norm and not hf.bool("_remove_final_layer_norm", False):
        specs |= {"norm": LayerNorm("decoder.final_layer_norm", c.hidden, affine, affine)}
    return specs


def layer_specs(c: gpt.GPTConfig, affine: bool) -> TensorSpecs:
    qkv = {f"self_attn.{x}_proj": c.q_size for x in ("q", "k", "v")}
    return {
        "attn_norm": LayerNorm("self_attn_layer_norm", c.hidden, affine, affine),
        "qkv": Linear(qkv, c.hidden, c.bias),
        "out": Linear({"self_attn.out_proj": c.hidden}, c.q_size, c.bias),
        "mlp_norm": LayerNorm("final_layer_norm", c.hidden, affine, affine),
        "up": Linear({"fc1": c.intermediate}, c.hidden, c.bias),
        "down": Linear({"fc2": c.hidden}, c.intermediate, c.bias),
    }
