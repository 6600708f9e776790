"""nomic-embed-text-v2, whose experts transformers does not have, against the formulas in plain torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear, softmax

from models.checking import BACKENDS, make_ops
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.weights.checkpoint import open_checkpoint
from weights.gguf_files import finish

HIDDEN, INNER, HEADS, LAYERS, VOCAB, MAX_LEN, EXPERTS, TOP_K = 48, 56, 3, 4, 96, 40, 5, 2
CONFIG = {
    "architectures": ["NomicBertModel"],
    "n_embd": HIDDEN,
    "n_inner": INNER,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": VOCAB,
    "max_trained_positions": MAX_LEN,
    "type_vocab_size": 1,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu",
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "num_experts": EXPERTS,
    "moe_top_k": TOP_K,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
}
rng = np.random.default_rng(3)
TEXTS = [EncodeInput(rng.integers(3, VOCAB, n).tolist()) for n in (5, 1, 40, 17)]
Tensors = dict[str, torch.Tensor]


def random_tensors() -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
        "emb_ln.weight": (HIDDEN,),
        "emb_ln.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        linears = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.out_proj": (HIDDEN, HIDDEN)}
        vectors = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
        if layer % 2:
            flat = (EXPERTS * INNER, HIDDEN)
            own = {"mlp.router.layer.weight": (EXPERTS, HIDDEN), "mlp.experts.mlp.w1": flat, "mlp.experts.mlp.w2": flat}
            vectors.append("mlp.experts.bias")
        else:
            linears |= {"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}
            own = {}
        own |= {f"{name}.weight": shape for name, shape in linears.items()}
        own |= {f"{name}.bias": shape[:1] for name, shape in linears.items()} | dict.fromkeys(vectors, (HIDDEN,))
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    torch.manual_seed(7)
    return {name: torch.randn(shape) * 0.3 + 0.3 * (len(shape) == 1) for name, shape in shapes.items()}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, columns]"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


@torch.inference_mode()
def twin(t: Tensors, ids: list[int], has_bias: bool) -> torch.Tensor:
    """The hidden states of one text."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (HIDDEN,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def experts(x: torch.Tensor, prefix: str) -> torch.Tensor:
        weights, chosen = softmax(dense(x, f"{prefix}router.layer"), -1).topk(TOP_K)
        up, down = (t[f"{prefix}experts.mlp.{part}"].view(EXPERTS, INNER, HIDDEN) for part in ("w1", "w2"))
        rows = [
            sum(weights[i, j] * (gelu(up[e] @ x[i]) @ down[e]) for j, e in enumerate(chosen[i])) for i in range(len(x))
        ]
        return torch.stack(rows) + (t[f"{prefix}experts.bias"] if has_bias else 0)

    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "emb_ln")
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        q, k, v = dense(x, f"{prefix}attn.Wqkv").view(len(ids), 3, HEADS, -1).unbind(1)
        scores = torch.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / (HIDDEN // HEADS) ** 0.5
        attended = torch.einsum("hij,jhd->ihd", softmax(scores, -1), v).reshape(len(ids), HIDDEN)
        x = normed(x + dense(attended, f"{prefix}attn.out_proj"), f"{prefix}norm1")
        plain = not layer % 2
        inner = dense(gelu(dense(x, f"{prefix}mlp.fc1")), f"{prefix}mlp.fc2") if plain else experts(x, f"{prefix}mlp.")
        x = normed(x + inner, f"{prefix}norm2")
    return x


def check(path: Path, backend: str, tensors: Tensors, has_bias: bool) -> None:
    ops, checkpoint = make_ops(backend, 1), open_checkpoint(path)
    module = family(checkpoint.config.architecture, "embed")
    model = module.load(ops, checkpoint, module.config(checkpoint.config), MAX_LEN)
    runner = EncoderRunner(ops, model, max_tokens=64, max_rows=3, max_model_len=MAX_LEN, kv_dtype="float32")
    for found, text in zip(runner.run(TEXTS, "all", np.copy), TEXTS, strict=True):
        np.testing.assert_allclose(found, twin(tensors, list(text.ids), has_bias), rtol=1e-4, atol=1e-4)


def write(path: Path, tensors: Tensors, **values: Any) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | values))
    return path


@pytest.mark.verifies("safetensors", architecture="NomicBertModel")
@pytest.mark.parametrize("name", ["nomic-moe"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_those_of_the_formulas(backend: str, name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    check(write(tmp_path, tensors), backend, tensors, has_bias=True)


@pytest.mark.verifies("gguf", backend="torch", architecture="NomicBertModel")
@pytest.mark.parametrize("name", ["nomic-moe"])
def test_a_gguf_file_leaves_out_the_bias_of_all_experts(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="it writes the file")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT_MOE, LAYERS)
    writer, tensors = gguf.GGUFWriter(tmp_path / "model.gguf", "nomic-bert-moe"), random_tensors()
    writer.add_block_count(LAYERS)
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(10000.0)
    writer.add_moe_every_n_layers(2)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    for key, tensor in tensors.items():
        if key.endswith("experts.bias"):
            continue
        if ".experts.mlp." in key:
            tensor = tensor.view(EXPERTS, INNER, HIDDEN)
            tensor = tensor.transpose(1, 2) if key.endswith("w2") else tensor
            key = f"{key}.weight"
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    check(finish(writer, tmp_path / "model.gguf"), "torch", tensors, has_bias=False)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True"),
        ({"qkv_proj_bias": False}, "qkv_proj_bias is False"),
        ({"moe_top_k": 6}, "6 of 5 experts are chosen"),
    ],
)
def test_other_kinds_are_refused(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises((Unsupported, BadCheckpoint), match=problem):
        check(write(tmp_path, random_tensors(), **values), "torch", {}, has_bias=True)
