"""Medusa: heads that read the target's last hidden state; head i drafts the token that is i + 2 positions further.

A head is residual blocks, x + silu(linear(x)), and an LM head. Formats: as published (`0.0.linear.weight` and
`0.1.weight`, or with `medusa_head.` before), and as converted for vLLM (`blocks.0.layers.0.weight`,
`lm_heads.0.weight`)."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.models.draft_head import DraftHead, NamedCheckpoint, check_sizes, first_tap
from quire.models.loading import Linear, LinearPart, LoadedModel, TensorSpec, TensorSpecs, load_weights
from quire.ops.opset import Activation, Int32, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

MAX_HEADS = 64
TOKEN_MAP = "token_map"  # the tokens that LM heads have logits of, where these are not all
# As converted for vLLM -> as published.
CONVERTED = (
    (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"\1.\2.linear.\3"),
    (r"(?:medusa_heads?|heads)\.(\d+\..*)", r"\1"),
)


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    hidden: int
    vocab: int
    heads: int
    layers: int  # residual blocks of a head


def config(checkpoint: Checkpoint, target: ModelConfig) -> MedusaConfig:
    hf = checkpoint.config
    converted = "num_heads" in hf
    heads = hf.int("num_heads" if converted else "medusa_num_heads")
    layers = hf.int("num_hidden_layers", 1) if converted else hf.int("medusa_num_layers", 1)
    if not 1 <= heads <= MAX_HEADS or not 0 <= layers <= MAX_HEADS:
        raise BadCheckpoint(f"{hf.source}: {heads} heads of {layers} layers", f"1 to {MAX_HEADS} are possible")
    names = _names(checkpoint, layers)
    first = names.get("0.0.linear.weight", names.get(f"0.{layers}.weight"))
    hidden = checkpoint.shape(first)[-1] if first else hf.int("hidden_size")
    check_sizes(checkpoint, hidden, hf.int("vocab_size", target.vocab), target)
    return MedusaConfig(hidden, target.vocab, heads, layers)


def _names(checkpoint: Checkpoint, layers: int) -> dict[str, str]:
    """The published name of each stored tensor -> its own."""

    def published(name: str) -> str:
        for pattern, new in (*CONVERTED, (r"lm_heads\.(\d+)\.weight", rf"\g<1>.{layers}.weight")):
            name = re.sub(rf"^{pattern}$", new, name)
        return f"0.{layers}.weight" if name == "lm_head.weight" else name

    return {published(name): name for name in checkpoint.names()}


def head_specs(
    c: MedusaConfig, index: int, stored: Container[str], tokens: Int32 | None, num_stored: int
) -> TensorSpecs:
    """`num_stored`: outputs of the LM head in the checkpoint, of which `tokens` may be some."""
    specs: dict[str, TensorSpec] = {}
    for layer in range(c.layers):
        bias = f"{index}.{layer}.linear.bias" in stored
        specs[f"block.{layer}"] = Linear({f"{index}.{layer}.linear": c.hidden}, c.hidden, bias=bias)
    if index == 0 or f"{index}.{c.layers}.weight" in stored:
        count = c.vocab if tokens is None else len(tokens)
        part = LinearPart(count, tokens if count < num_stored else None, num_stored=num_stored)
        specs["head"] = Linear({f"{index}.{c.layers}": part}, c.hidden, keep=Keep.EIGHT_BITS)
    return specs


def load(
    ops: OpSet, checkpoint: Checkpoint, config: MedusaConfig, target: LoadedModel, max_model_len: int
) -> DraftHead:
    tokens = _tokens(checkpoint, config)
    named = NamedCheckpoint(checkpoint, _names(checkpoint, config.layers), "Medusa")
    stored = set(named.names())
    last = f"0.{config.layers}.weight"
    num_stored = named.shape(last)[0] if last in stored else config.vocab
    if tokens is None and num_stored != config.vocab:
        raise BadCheckpoint(f"{checkpoint.path} has {num_stored:,} of {config.vocab:,} tokens, and no {TOKEN_MAP}")
    specs = {f"head {i}": head_specs(config, i, stored, tokens, num_stored) for i in range(config.heads)}
    flat = {f"{group}/{name}": spec for group, of_head in specs.items() for name, spec in of_head.items()}
    loaded, _ = load_weights(ops, named, flat, {}, TOKEN_MAP)
    heads = [{name: loaded[f"{group}/{name}"] for name in of_head} for group, of_head in specs.items()]
    vocabulary = None if tokens is None else ops.draft_vocabulary(tokens, config.vocab)
    forwards = [partial(forward, _blocks(head), head.get("head", heads[0]["head"]), vocabulary) for head in heads]
    return DraftHead(None, config.hidden, (target.config.layers + 1,), first_tap, forwards, heads)


def _tokens(checkpoint: Checkpoint, c: MedusaConfig) -> Int32 | None:
    if TOKEN_MAP not in checkpoint.names():
        return None
    tokens = cast(HuggingFaceCheckpoint, checkpoint).integers(TOKEN_MAP).ravel().astype(np.int64)
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= c.vocab or len(np.unique(tokens)) != len(tokens):
        raise BadCheckpoint(f"{checkpoint.path}: {TOKEN_MAP} does not name some of {c.vocab} tokens")
    return tokens.astype(np.int32)


def _blocks(head: Mapping[str, Any]) -> list[PackedWeight]:
    return [weight for name, weight in head.items() if name != "head"]


def forward(blocks: Sequence[PackedWeight], head: PackedWeight, vocabulary: Any, ops: OpSet, batch: Any) -> Value:
    x = ops.hidden_states(batch)
    for block in blocks:
        x = ops.add(x, ops.activate(ops.linear(x, block), Activation.SILU))
    return ops.logits(x, head, batch, vocabulary=vocabulary)
