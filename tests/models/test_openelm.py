"""OpenELM against a plain twin that follows its authors' code, from safetensors and from GGUF."""

from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

from models.checking import BACKENDS, PROMPT, Theirs, assert_close, check_against_transformers, compute, make_ops
from models.test_more_families_by_twins import norm, twin_checkpoint
from models.test_smallthinker import rotated
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig
from weights.gguf_files import finish

HIDDEN, WIDTH, LAYERS = 128, 24, 3
QUERIES, KEYS, SIZES = (2, 4, 6), (1, 2, 3), (64, 96, 192)
CONFIG: dict[str, Any] = {
    "architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "vocab_size": 96, "model_dim": HIDDEN,
    "num_transformer_layers": LAYERS, "num_query_heads": [*QUERIES], "num_kv_heads": [*KEYS], "head_dim": WIDTH,
    "ffn_multipliers": [0.4, 0.76, 1.52], "ffn_dim_divisor": 32, "max_context_length": 64, "num_gqa_groups": 2,
    "rope_freq_constant": 10000, "activation_fn_name": "swish", "normalization_layer_name": "rms_norm",
    "ffn_with_glu": True, "normalize_qk_projections": True, "share_input_output_layers": True,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {"token_embeddings": (96, HIDDEN), "norm": (HIDDEN,)}
    for layer, (queries, keys, size) in enumerate(zip(QUERIES, KEYS, SIZES, strict=True)):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn.qkv_proj": ((queries + 2 * keys) * WIDTH, HIDDEN),
            "attn.q_norm": (WIDTH,),
            "attn.k_norm": (WIDTH,),
            "attn.out_proj": (HIDDEN, queries * WIDTH),
            "ffn.proj_1": (2 * size, HIDDEN),
            "ffn.proj_2": (HIDDEN, size),
        }
        names |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    return {f"transformer.{name}.weight": shape for name, shape in names.items()}


def twin(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    x = w["transformer.token_embeddings.weight"][ids]
    for layer in range(LAYERS):
        stem, queries, keys = f"transformer.layers.{layer}.", QUERIES[layer], KEYS[layer]
        h = norm(x, w, f"{stem}attn_norm", rms=True) @ w[f"{stem}attn.qkv_proj.weight"].T
        q, k, v = h.unflatten(1, (-1, WIDTH)).split([queries, keys, keys], 1)
        q, k = (rotated(norm(part, w, f"{stem}attn.{n}_norm", rms=True)) for part, n in ((q, "q"), (k, "k")))
        k, v = (part.repeat_interleave(queries // keys, 1) for part in (k, v))
        after = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (torch.einsum("qhd,khd->hqk", q, k) / sqrt(WIDTH)).masked_fill(after, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w[f"{stem}attn.out_proj.weight"].T
        gate, up = (norm(x, w, f"{stem}ffn_norm", rms=True) @ w[f"{stem}ffn.proj_1.weight"].T).chunk(2, 1)
        x = x + (F.silu(gate) * up) @ w[f"{stem}ffn.proj_2.weight"].T
    return norm(x, w, "transformer.norm", rms=True) @ w["transformer.token_embeddings.weight"].T


def made(path: Path) -> Theirs:
    return twin_checkpoint(path, twin, CONFIG, shapes())


@pytest.mark.parametrize("name", ["openelm"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="OpenELMForCausalLM")
def test_layers_differ_in_their_heads_and_sizes(backend: str, name: str, tmp_path: Path) -> None:
    check_against_transformers(backend, made(tmp_path))


@pytest.mark.parametrize("name", ["openelm"])
@pytest.mark.verifies("gguf", backend="torch", architecture="OpenELMForCausalLM")
def test_a_gguf_file_lists_the_counts_of_all_layers(name: str, tmp_path: Path) -> None:
    theirs = made(tmp_path)
    path = write(tmp_path, tmp_path / "model.gguf")
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


GGUF_NAMES = {
    "transformer.layers.": "blk.", "transformer.token_embeddings.": "token_embd.", "transformer.norm.": "output_norm.",
    ".attn.out_proj.": ".attn_output.", ".attn.q": ".attn_q", ".attn.k": ".attn_k",
    ".attn_qkv_proj.": ".attn_qkv.", ".ffn.proj_2.": ".ffn_down.",
}  # fmt: skip


def write(source: Path, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "openelm")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(SIZES)
    writer.add_head_count(QUERIES)
    writer.add_head_count_kv(KEYS)
    writer.add_rope_freq_base(10000)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    for name, data in load_file(source / "model.safetensors").items():
        if name.endswith("ffn.proj_1.weight"):
            for part, half in zip(("gate", "up"), np.split(data, 2), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}.weight", half)
            continue
        for theirs, called in GGUF_NAMES.items():
            name = name.replace(theirs, called)
        writer.add_tensor(name, data)
    return finish(writer, path)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"num_kv_heads": [1, 2]}, BadCheckpoint, r"num_kv_heads is \[1, 2\], and not a number for each of 3 layers"),
        ({"num_kv_heads": [1, 2, 2]}, Unsupported, "differ in how many query heads share a key head"),
        ({"ffn_multipliers": [1.0]}, BadCheckpoint, "ffn_multipliers lists 1 layers, and there are 3"),
        ({"ffn_with_glu": False}, Unsupported, "ffn_with_glu is False"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    values: dict[str, Any], error: type[QuireError], message: str
) -> None:
    with pytest.raises(error, match=message):
        family("OpenELMForCausalLM").config(CheckpointConfig(Path("config.json"), CONFIG | values))
