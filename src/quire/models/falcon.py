"""Falcon. 7B has one key head for all queries (MQA), and attention and MLP in parallel behind one norm. 40B has grouped
heads and two norms (`new_decoder_architecture`); 11B has grouped heads and one norm. Falcon-RW has ALiBi, biases, a key
head for each query head, and the MLP after attention."""

from dataclasses import replace

from quire.models import alibi, gpt
from quire.models.activations import read_activation
from quire.models.loading import EmbeddingTable, LayerNorm, Linear, LinearPart, LoadedModel, TensorSpecs
from quire.models.qkv_order import ungrouped_qkv
from quire.ops.opset import OpSet
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

TRAINED_LENGTH = 2048  # where config.json has none


def config(hf: CheckpointConfig) -> gpt.GPTConfig:
    hf = _with_newer_keys(hf)
    grouped, has_slopes = hf.bool("new_decoder_architecture", False), hf.bool("alibi", False)
    hf.expect("num_ln_in_parallel_attn", 1, None, *([2] if grouped else []))
    if grouped:
        hf.expect("parallel_attn", True, None)
    c = gpt.read_config(
        hf,
        rotary=None if has_slopes else hf,
        default_length=TRAINED_LENGTH,
        activation=read_activation(hf, "activation", "gelu"),
        eps=hf.float("layer_norm_epsilon", 1e-5),
        tied=hf.bool("tie_word_embeddings", True),
        bias=hf.bool("bias", False),
        parallel=hf.bool("parallel_attn", True),
    )
    one_key_head = not grouped and hf.bool("multi_query", True)
    return replace(
        c,
        kv_heads=1 if one_key_head else hf.int("num_kv_heads", c.heads),
        intermediate=hf.int("ffn_hidden_size", c.intermediate),
        # Rounded as in transformers, and scaled together with q . k.
        slopes=tuple(alibi.to_bfloat16(x) * c.scale for x in alibi.alibi_slopes(c.heads)) if has_slopes else (),
    )


def _with_newer_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """The first checkpoints (RWForCausalLM) count key heads as n_head_kv, and only 40B has the key."""
    if "n_head_kv" not in hf:
        return hf
    newer = {"num_kv_heads": hf.int("n_head_kv"), "new_decoder_architecture": not hf.bool("multi_query", False)}
    return hf.with_values({key: value for key, value in newer.items() if key not in hf})


def load(ops: OpSet, checkpoint: Checkpoint, config: gpt.GPTConfig, max_model_len: int) -> LoadedModel:
    top: TensorSpecs = {
        "embed": EmbeddingTable("word_embeddings", config.vocab, config.hidden),
        "norm": LayerNorm("ln_f", config.hidden),
    }
    tensors = gpt.GPTTensors("transformer.", "h", top, layer_specs(config, _with_newer_keys(checkpoint.config)))
    return gpt.load_model(ops, checkpoint, config, max_model_len, tensors)


def layer_specs(c: gpt.GPTConfig, hf: CheckpointConfig) -> TensorSpecs:
    order = ungrouped_qkv(c.kv_heads, c.heads, c.head_dim)
    qkv = LinearPart(c.q_size + 2 * c.kv_size, order, already_ordered=hf.bool(gpt.QKV_UNGROUPED, False))
    return {
        **_norms(c, hf),
        "qkv": Linear({"self_attention.query_key_value": qkv}, c.hidden, c.bias),
        "out": Linear({"self_attention.dense": c.hidden}, c.q_size, c.bias),
        "up": Linear({"mlp.dense_h_to_4h": c.intermediate}, c.hidden, c.bias),
        "down": Linear({"mlp.dense_4h_to_h": c.hidden}, c.intermediate, c.bias),
    }


def _norms(c: gpt.GPTConfig, hf: CheckpointConfig) -> TensorSpecs:
    default = 2 if hf.bool("new_decoder_architecture", False) else 1
    if c.parallel and hf.int("num_ln_in_parallel_attn", default) == 2:
        return {"attn_norm": LayerNorm("ln_attn", c.hidden), "mlp_norm": LayerNorm("ln_mlp", c.hidden)}
    first = {"attn_norm": LayerNorm("input_layernorm", c.hidden)}
    return first if c.parallel else first | {"mlp_norm": LayerNorm("post_attention_layernorm", c.hidden)}
