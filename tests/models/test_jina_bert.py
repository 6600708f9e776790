"""Jina's second embedding models, which transformers does not have, against the formulas in plain torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear, softmax

from models.checking import BACKENDS, make_ops
from quire.core.errors import Unsupported
from quire.models.alibi import alibi_slopes
from quire.models.registry import family
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.weights.checkpoint import open_checkpoint
from weights.gguf_files import finish

HIDDEN, INNER, HEADS, LAYERS, VOCAB, MAX_LEN, EPS = 48, 56, 3, 2, 96, 40, 1e-12
CONFIG = {
    "architectures": ["JinaBertModel"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
    "type_vocab_size": 2,
    "layer_norm_eps": EPS,
    "hidden_act": "gelu",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "id2label": {"0": "LABEL_0"},
}
rng = np.random.default_rng(3)
TEXTS = [EncodeInput(rng.integers(3, VOCAB, n).tolist()) for n in (5, 1, 40, 17)]
Tensors = dict[str, torch.Tensor]


def random_tensors() -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}."
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{prefix}{part}.weight": (HIDDEN, HIDDEN), f"{prefix}{part}.bias": (HIDDEN,)}
        shapes |= {f"{prefix}mlp.gated_layers.weight": (2 * INNER, HIDDEN), f"{prefix}mlp.wo.bias": (HIDDEN,)}
        shapes |= {f"{prefix}mlp.wo.weight": (HIDDEN, INNER), **norm(f"{prefix}mlp.layernorm")}
        shapes |= norm(f"{prefix}attention.output.LayerNorm")
    torch.manual_seed(7)
    return {name: torch.randn(shape) * 0.3 + 0.3 * (len(shape) == 1) for name, shape in shapes.items()}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


@torch.inference_mode()
def twin(t: Tensors, ids: list[int]) -> torch.Tensor:
    """The hidden states of one text."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (HIDDEN,), t[f"{name}.weight"], t[f"{name}.bias"], EPS)

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    places = torch.arange(len(ids))
    alibi = -torch.tensor(alibi_slopes(HEADS))[:, None, None] * (places[:, None] - places[None, :]).abs()
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}."
        q, k, v = (
            dense(x, f"{prefix}attention.self.{part}").view(len(ids), HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        weights = softmax(q @ k.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5 + alibi, -1)
        attended = (weights @ v).transpose(0, 1).reshape(len(ids), HIDDEN)
        x = normed(x + dense(attended, f"{prefix}attention.output.dense"), f"{prefix}attention.output.LayerNorm")
        gate, up = dense(x, f"{prefix}mlp.gated_layers").split(INNER, -1)
        x = normed(x + dense(gelu(gate) * up, f"{prefix}mlp.wo"), f"{prefix}mlp.layernorm")
    return x


def write(path: Path, tensors: Tensors, **values: Any) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | values))
    return path


def run(path: Path, backend: str, wanted: Any) -> list[np.ndarray]:
    ops, checkpoint = make_ops(backend, 1), open_checkpoint(path)
    module = family(checkpoint.config.architecture, "embed", "score")
    model = module.load(ops, checkpoint, module.config(checkpoint.config), MAX_LEN)
    runner = EncoderRunner(ops, model, max_tokens=64, max_rows=3, max_model_len=MAX_LEN, kv_dtype="float32")
    return runner.run(TEXTS, wanted, np.copy)


ARCHITECTURES = [
    pytest.param(name, prefix, marks=pytest.mark.verifies("safetensors", architecture=name))
    for name, prefix in (("JinaBertModel", ""), ("JinaBertForMaskedLM", "bert."))
]


@pytest.mark.parametrize(("architecture", "prefix"), ARCHITECTURES)
@pytest.mark.parametrize("name", ["jina-2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_those_of_the_formulas(
    backend: str, name: str, architecture: str, prefix: str, tmp_path: Path
) -> None:
    tensors = random_tensors()
    stored = {prefix + key: tensor for key, tensor in tensors.items()}
    ours = run(write(tmp_path, stored, architectures=[architecture]), backend, "all")
    for found, text in zip(ours, TEXTS, strict=True):
        np.testing.assert_allclose(found, twin(tensors, list(text.ids)), rtol=1e-5, atol=2e-5)


@pytest.mark.verifies("gguf", backend="torch", architecture="JinaBertModel")
@pytest.mark.parametrize("name", ["jina-2"])
def test_a_gguf_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="it writes the file")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.JINA_BERT_V2, LAYERS)
    writer, tensors = gguf.GGUFWriter(tmp_path / "model.gguf", "jina-bert-v2"), random_tensors()
    writer.add_block_count(LAYERS)
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(EPS)
    writer.add_causal_attention(False)
    for key, tensor in tensors.items():
        halves = tensor.split(INNER) if "gated_layers" in key else [tensor]
        for half, suffix in zip(halves, ("_w", "_v"), strict=False):
            stored = key.replace("gated_layers", f"gated_layers{suffix}")
            writer.add_tensor(names.get_name(stored, try_suffixes=(".weight", ".bias")), half.numpy())
    for found, text in zip(run(finish(writer, tmp_path / "model.gguf"), "torch", "all"), TEXTS, strict=True):
        np.testing.assert_allclose(found, twin(tensors, list(text.ids)), rtol=1e-5, atol=2e-5)


@pytest.mark.verifies("safetensors", architecture="JinaBertForSequenceClassification")
@pytest.mark.parametrize("name", ["score-jina-2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reranker_has_a_pooler_and_a_classifier(backend: str, name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    head = {"bert.pooler.dense.weight": (HIDDEN, HIDDEN), "classifier.weight": (1, HIDDEN)}
    head |= {"bert.pooler.dense.bias": (HIDDEN,), "classifier.bias": (1,)}
    h = {key: torch.randn(shape) for key, shape in head.items()}
    stored = {f"bert.{key}": tensor for key, tensor in tensors.items()} | h
    path = write(tmp_path, stored, architectures=["JinaBertForSequenceClassification"])
    for found, text in zip(run(path, backend, "first"), TEXTS, strict=True):
        first = twin(tensors, list(text.ids))[0]
        pooled = torch.tanh(linear(first, h["bert.pooler.dense.weight"], h["bert.pooler.dense.bias"]))
        expected = linear(pooled, h["classifier.weight"], h["classifier.bias"])
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({"feed_forward_type": "original"}, "feed_forward_type is 'original'"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(Unsupported, match=problem):
        run(write(tmp_path, random_tensors(), **values), "torch", "all")
