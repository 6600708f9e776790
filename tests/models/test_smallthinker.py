"""SmallThinker against a plain twin that follows its authors' code, from safetensors and from GGUF."""

import re
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

from models.checking import BACKENDS, PROMPT, TINY, Theirs, assert_close, check_against_transformers, compute, make_ops
from models.gguf_latest_writing import translated
from models.test_more_families_by_twins import norm, twin_checkpoint
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig
from weights.gguf_files import finish

HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS, EXPERTS, TOP, SIZE, WINDOW = 128, 4, 2, 24, 5, 6, 3, 40, 5
LOCAL = [layer % 4 > 0 for layer in range(LAYERS)]  # they have a window and rope, as those of 21B; 4B has no window
CASES: dict[str, dict[str, Any]] = {
    "smallthinker-windows": {"rope_layout": LOCAL, "sliding_window_layout": LOCAL},
    "smallthinker-softmax": {"moe_primary_router_apply_softmax": True},
}
CONFIG: dict[str, Any] = {
    "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "vocab_size": 96,
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "moe_num_primary_experts": EXPERTS, "moe_num_active_primary_experts": TOP, "moe_ffn_hidden_size": SIZE,
    "sliding_window_size": WINDOW, "tie_word_embeddings": True, "moe_enable_early_router": True,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * WIDTH, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * WIDTH, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
        "block_sparse_moe.primary_router": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        sizes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
        layer |= {f"block_sparse_moe.experts.{expert}.{part}": shape for part, shape in sizes.items()}
    names = {f"model.layers.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in layer.items()}
    return names | {"model.embed_tokens.weight": (96, HIDDEN), "model.norm.weight": (HIDDEN,)}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, width]"""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def twin(values: dict[str, Any]) -> Any:
    rope = values.get("rope_layout", [True] * LAYERS)
    local = values.get("sliding_window_layout", [False] * LAYERS)

    def attention(w: dict[str, torch.Tensor], stem: str, x: torch.Tensor, layer: int) -> torch.Tensor:
        q, k, v = ((x @ w[f"{stem}self_attn.{part}_proj.weight"].T).unflatten(1, (-1, WIDTH)) for part in "qkv")
        q, k = (rotated(q), rotated(k)) if rope[layer] else (q, k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        before = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (before < 0) | (before >= (WINDOW if local[layer] else len(x)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / sqrt(WIDTH)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w[f"{stem}self_attn.o_proj.weight"].T

    def experts(w: dict[str, torch.Tensor], stem: str, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        best, chosen = logits.topk(TOP, -1)
        softmax = values.get("moe_primary_router_apply_softmax")
        weights = best.softmax(-1) if softmax else best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for weight, expert in zip(weights[token], chosen[token], strict=True):
                gate, up, down = (
                    w[f"{stem}block_sparse_moe.experts.{expert}.{part}.weight"] for part in ("gate", "up", "down")
                )
                out[token] += weight * (down @ (F.relu(gate @ x[token]) * (up @ x[token])))
        return out

    def logits(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}."
            routes = x @ w[f"{stem}block_sparse_moe.primary_router.weight"].T
            x = x + attention(w, stem, norm(x, w, f"{stem}input_layernorm", rms=True), layer)
            x = x + experts(w, stem, norm(x, w, f"{stem}post_attention_layernorm", rms=True), routes)
        return norm(x, w, "model.norm", rms=True) @ w["model.embed_tokens.weight"].T

    return logits


def made(path: Path, name: str) -> Theirs:
    """With logits of the router whose sigmoids differ in fp32."""
    return twin_checkpoint(path, twin(CASES[name]), CONFIG | CASES[name], shapes(), small="router")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="SmallThinkerForCausalLM")
def test_the_router_reads_the_input_of_the_layer(backend: str, name: str, tmp_path: Path) -> None:
    check_against_transformers(backend, made(tmp_path, name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.verifies("gguf", backend="torch", architecture="SmallThinkerForCausalLM")
def test_a_gguf_file_has_a_window_in_three_of_four_layers_or_in_none(name: str, tmp_path: Path) -> None:
    theirs = made(tmp_path, name)
    path = write(tmp_path, tmp_path / "model.gguf", CASES[name])
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


def write(source: Path, path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "smallthinker")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(SIZE)
    writer.add_expert_feed_forward_length(SIZE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    softmax = "moe_primary_router_apply_softmax" in values
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID)
    if "sliding_window_layout" in values:
        writer.add_sliding_window(WINDOW)
    tensors = load_file(source / "model.safetensors")
    for name, data in tensors.items():
        if ".experts." in name:
            if ".experts.0." not in name:
                continue
            data = np.stack([tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in range(EXPERTS)])
        for theirs, called in (("block_sparse_moe.primary_router", "mlp.gate"), ("block_sparse_moe", "mlp")):
            name = name.replace(theirs, called)
        writer.add_tensor(translated(re.sub(r"experts\.0\.(\w+)", r"experts.\1_proj", name)), data)
    return finish(writer, path)


def test_what_is_not_supported_is_refused_by_name() -> None:
    def read(**values: Any) -> Any:
        config = CheckpointConfig(Path("config.json"), TINY | CONFIG | values)
        return family("SmallThinkerForCausalLM").config(config)

    with pytest.raises(BadCheckpoint, match="rope_layout lists 2 layers, and there are 5"):
        read(rope_layout=[1, 0])
    with pytest.raises(Unsupported, match="moe_enable_early_router is False"):
        read(moe_enable_early_router=False)
