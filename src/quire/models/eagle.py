"""EAGLE and EAGLE-3: a decoder layer that reads a hidden state of the target beside the embedding of the token that
follows, and drafts the token after it.

EAGLE reads the target's last hidden states; EAGLE-3 reads those of three layers, fused by `fc`, and may have a smaller
vocabulary, whose token i is the target's token i + d2t[i]. Formats: EAGLE's own (`midlayer.*`), SpecForge's and vLLM's
(`layers.0.*`), and that of `speculators` (`transformer_layer_config`)."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama
from quire.models.config import ModelConfig
from quire.models.draft_head import DraftHead, NamedCheckpoint, check_sizes, first_tap, misfit
from quire.models.llama import LlamaConfig, LlamaLayer
from quire.models.llama_families import FAMILIES, translate
from quire.models.loading import (
    EmbeddingTable,
    Linear,
    LoadedModel,
    TensorSpec,
    TensorSpecs,
    Vector,
    load_weights,
)
from quire.models.rope import frequencies
from quire.ops.opset import Int32, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

DECODERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # `model_type` -> the decoder whose layer it has
# Prefixes of tensor names -> those of this file.
RENAMED = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
UNUSED = r"d2t|t2d|verifier_.*|.*\.rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LlamaConfig):
    taps: tuple[int, ...]  # hidden states of the target, as `OpSet.tap` counts them
    target_hidden: int  # columns of each
    fused: bool  # EAGLE-3
    draft_vocab: int  # tokens that it has logits of
    norm_before_residual: bool = False  # what attention adds to is the hidden state after its norm
    norm_output: bool = False  # the next token reads the hidden state after the last norm
    norm_before_fc: bool = False  # of all taps together
    fc_norm: bool = False  # of each tap


def config(checkpoint: Checkpoint, target: ModelConfig) -> EagleConfig:
    """EAGLE's: it reads what the target's head reads."""
    hf = checkpoint.config
    hf.expect("layernorms", False, None)
    hf.expect("add_para_norm", False, None)
    fields = _layer_fields(hf)
    check_sizes(checkpoint, fields["hidden"], fields["vocab"], target)
    return EagleConfig(
        **fields, taps=(target.layers + 1,), target_hidden=target.hidden, fused=False, draft_vocab=target.vocab
    )


def eagle3_config(checkpoint: Checkpoint, target: ModelConfig) -> EagleConfig:
    hf = checkpoint.config
    fields = _layer_fields(hf)
    taps = _taps(hf, target)
    if wrong := [tap for tap in taps if not 0 <= tap <= target.layers]:
        raise misfit(
            checkpoint,
            f"reads the hidden states of layers {', '.join(map(str, taps))}, and the model has no {wrong[0]}: its "
            f"layers are 0 to {target.layers}",
            "give its config.json eagle_aux_hidden_state_layer_ids",
        )
    target_hidden = hf.int("target_hidden_size", fields["hidden"])
    check_sizes(checkpoint, target_hidden, fields["vocab"], target)
    flags = hf.section("eagle_config")  # NVIDIA's
    return EagleConfig(
        **fields,
        taps=taps,
        target_hidden=target_hidden,
        fused=True,
        draft_vocab=hf.int("draft_vocab_size", fields["vocab"]),
        norm_before_residual=hf.bool("norm_before_residual", False),
        norm_output=hf.bool("norm_output", False),
        norm_before_fc=hf.bool("norm_before_fc", flags.bool("norm_before_fc", False)),
        fc_norm=hf.bool("fc_norm", False),
    )


def _layer_fields(hf: CheckpointConfig) -> dict[str, Any]:
    """The fields of LlamaConfig: in `speculators` checkpoints, the decoder layer has a section of its own."""
    inner = hf.section("transformer_layer_config") if "transformer_layer_config" in hf else hf
    kind = inner.str("model_type", "llama")
    if kind not in DECODERS:
        raise Unsupported(f"{hf.source}: the head is a layer of a `{kind}`", f"supported: {', '.join(DECODERS)}")
    inner = inner.with_values({"architectures": [DECODERS[kind]]})
    if len(inner.list("layer_types", [])) != inner.int("num_hidden_layers"):  # the list is of the target's layers
        inner = inner.with_values({"layer_types": None})
    family = FAMILIES[DECODERS[kind]]
    return llama.config_fields(translate(inner, family), family)


def _taps(hf: CheckpointConfig, target: ModelConfig) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    given = hf.list(key, hf.section("eagle_config").list(key, []))
    if not all(type(layer) is int for layer in given):
        raise BadCheckpoint(f"{hf.source}: {key} is {given!r}, not a list of layers")
    return tuple(given) or (2, target.layers // 2, target.layers - 3)


def top_specs(c: EagleConfig, stored: Container[str]) -> TensorSpecs:
    inputs = len(c.taps) * c.target_hidden if c.fused else 2 * c.hidden
    specs: dict[str, TensorSpec] = {"fc": Linear({"fc": c.hidden}, inputs, bias="fc.bias" in stored)}
    if "embed_tokens.weight" in stored:
        specs["embed"] = EmbeddingTable("embed_tokens", c.vocab, c.hidden)
    if "lm_head.weight" in stored:
        specs["head"] = Linear({"lm_head": c.draft_vocab}, c.hidden, keep=Keep.EIGHT_BITS)
    if c.fused:
        specs["norm"] = Vector("norm", c.hidden)
    if c.norm_before_fc:
        specs["input_norm"] = Vector("input_norm", inputs)
    if c.fc_norm:
        specs |= {f"fc_norm.{i}": Vector(f"fc_norm.{i}", c.target_hidden) for i in range(len(c.taps))}
    return specs


def layer_specs(c: EagleConfig, index: int, stored: Container[str]) -> TensorSpecs:
    specs = dict(llama.layer_specs(c))
    if index:
        return specs
    if c.fused:
        qkv = specs["qkv"]
        assert isinstance(qkv, Linear)
        return specs | {"qkv": replace(qkv, num_inputs=2 * c.hidden), "hidden_norm": Vector("hidden_norm", c.hidden)}
    if "layers.0.input_layernorm.weight" not in stored:
        del specs["attn_norm"]
    return specs


@dataclass(frozen=True, slots=True)
class EagleLayer(LlamaLayer):
    hidden_norm: Any = None  # of the hidden state, in the first layer of EAGLE-3; `attn_norm` is then the embedding's


@dataclass(frozen=True, slots=True)
class EagleWeights:
    embed: Any
    layers: Sequence[EagleLayer]
    fc: PackedWeight
    head: PackedWeight
    rope: Any
    norm: Any = None
    vocabulary: Any = None  # see OpSet.draft_vocabulary


def load(ops: OpSet, checkpoint: Checkpoint, config: EagleConfig, target: LoadedModel, max_model_len: int) -> DraftHead:
    tokens = _tokens(checkpoint, config)
    checkpoint = NamedCheckpoint(checkpoint, _names(checkpoint), "EAGLE-3" if config.fused else "EAGLE")
    stored = set(checkpoint.names())
    if "embed_tokens.weight" not in stored and config.hidden != target.config.hidden:
        raise misfit(
            checkpoint,
            f"has {config.hidden:,} columns and no embedding, and the model's has {target.config.hidden:,} columns",
            "give the head an embedding of its own",
        )
    by_prefix = {f"layers.{index}.": layer_specs(config, index, stored) for index in range(config.layers)}
    top, layers = load_weights(ops, checkpoint, top_specs(config, stored), by_prefix, UNUSED)
    norms = [top.pop(name) for name in sorted(top) if name.startswith("fc_norm.")]
    input_norm = top.pop("input_norm", None)
    weights = EagleWeights(
        **{"embed": target.weight("embed"), "head": target.weight("head"), **top},
        layers=[EagleLayer(**layer) for layer in layers],
        rope=ops.frequencies(*frequencies(config.rope, max_model_len)),
        vocabulary=None if tokens is None else ops.draft_vocabulary(tokens, config.vocab),
    )
    return DraftHead(
        config,
        config.hidden,
        config.taps,
        partial(fuse, config, weights.fc, input_norm, norms) if config.fused else first_tap,
        [partial(eagle3_forward if config.fused else forward, config, weights)],
        [top, *layers],
    )


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """This file's name of each stored tensor -> its own."""

    def renamed(name: str) -> str:
        for prefix, new in RENAMED.items():
            name = new + name.removeprefix(prefix) if name.startswith(prefix) else name
        return name

    return {renamed(name): name for name in checkpoint.names()}


def _tokens(checkpoint: Checkpoint, c: EagleConfig) -> Int32 | None:
    """The target's token for each of the head's; None: they are the same."""
    if "d2t" not in checkpoint.names():
        if c.draft_vocab != c.vocab:
            raise BadCheckpoint(
                f"{checkpoint.path} has {c.draft_vocab:,} of {c.vocab:,} tokens, and no d2t to tell which"
            )
        return None
    offsets = cast(HuggingFaceCheckpoint, checkpoint).integers("d2t").astype(np.int64)
    if offsets.shape != (c.draft_vocab,):
        raise BadCheckpoint(f"{checkpoint.path}: d2t is {[*offsets.shape]}, and draft_vocab_size is {c.draft_vocab}")
    tokens = np.arange(c.draft_vocab) + offsets
    if tokens.min() < 0 or tokens.max() >= c.vocab or len(np.unique(tokens)) != len(tokens):
        raise BadCheckpoint(f"{checkpoint.path}: d2t does not name {c.draft_vocab} of {c.vocab} tokens")
    return tokens.astype(np.int32)


def fuse(
    c: EagleConfig, fc: PackedWeight, input_norm: Any, norms: Sequence[Any], ops: OpSet, taps: Sequence[Value]
) -> Value:
    """EAGLE-3: the hidden states of several layers, as one."""
    if norms:
        taps = [ops.rms_norm(x, norm, c.eps) for x, norm in zip(taps, norms, strict=True)]
    x = ops.concat(taps)
    return ops.linear(x if input_norm is None else ops.rms_norm(x, input_norm, c.eps), fc)


def forward(c: EagleConfig, w: EagleWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    x = ops.linear(ops.concat([ops.embedding(batch.ids, w.embed), ops.hidden_states(batch)]), w.fc)
    for index, layer in enumerate(w.layers):
        x = _block(c, layer, index, ops, x, llama.normed(ops, x, layer.attn_norm, c.eps), angles, batch)
    ops.keep(x, batch)
    return ops.logits(x, w.head, batch)


def eagle3_forward(c: EagleConfig, w: EagleWeights, ops: OpSet, batch: Any) -> Value:
    angles = ops.rope_angles(batch.positions, w.rope)
    first, *others = w.layers
    embeds = ops.rms_norm(ops.embedding(batch.ids, w.embed), first.attn_norm, c.eps)
    x = ops.hidden_states(batch)
    hidden = ops.rms_norm(x, first.hidden_norm, c.eps)
    residual = hidden if c.norm_before_residual else x
    x = _block(c, first, 0, ops, residual, ops.concat([embeds, hidden]), angles, batch)
    for index, layer in enumerate(others, 1):
        x = _block(c, layer, index, ops, x, ops.rms_norm(x, layer.attn_norm, c.eps), angles, batch)
    normed = ops.rms_norm(x, w.norm, c.eps)
    ops.keep(normed if c.norm_output else x, batch)
    return ops.logits(normed, w.head, batch, vocabulary=w.vocabulary)


def _block(
    c: EagleConfig, layer: EagleLayer, index: int, ops: OpSet, x: Value, attn_in: Value, angles: Value, batch: Any
) -> Value:
    x = ops.add(x, llama.attention(c, layer, index, ops, attn_in, angles, batch))
    return ops.add(x, llama.mlp(c, layer, ops, ops.rms_norm(x, layer.mlp_norm, c.eps)))
