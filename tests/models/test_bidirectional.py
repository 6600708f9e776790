"""Encoders with a decoder's layers, and decoders with a classifier, against transformers."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from models.checking import BACKENDS, make_ops
from quire.models.config import ModelConfig
from quire.models.registry import decoder_of, family, purpose
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.runtime.headless import load_headless
from quire.runtime.score_head import classifier_head
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.decoder_body import as_decoder

MAX_LEN = 40
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
EMBEDDING_GEMMA = {
    "head_dim": 24,
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24,
}
ONE = {"num_labels": 1}
CASES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "embedding-gemma": (Gemma3TextModel, Gemma3TextConfig, EMBEDDING_GEMMA),
    "eurobert": (EuroBertModel, EuroBertConfig, {}),
    "eurobert-with-a-head": (EuroBertForMaskedLM, EuroBertConfig, {"num_key_value_heads": 4}),
    "score-qwen3": (Qwen3ForSequenceClassification, Qwen3Config, ONE | {"head_dim": 16}),
    "score-qwen2": (Qwen2ForSequenceClassification, Qwen2Config, ONE),
    "score-llama": (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 3}),
    "score-mistral": (MistralForSequenceClassification, MistralConfig, ONE | {"sliding_window": 7}),
    "score-gemma": (GemmaForSequenceClassification, GemmaConfig, ONE | {"head_dim": 16}),
    "score-gemma3": (Gemma3TextForSequenceClassification, Gemma3TextConfig, ONE | {"head_dim": 16}),
}
rng = np.random.default_rng(3)
TEXTS = [EncodeInput(rng.integers(3, 96, n).tolist()) for n in (5, 1, 40, 17)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[np.ndarray]]]:
    @cache
    def make(name: str) -> tuple[Path, list[np.ndarray]]:
        path, (model_class, config_class, options) = tmp_path_factory.mktemp(name), CASES[name]
        torch.manual_seed(sum(map(ord, name)))
        model = model_class(config_class(**TINY | options)).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
        model.save_pretrained(path)
        return path, [ask(model, text) for text in TEXTS]

    return make


@torch.inference_mode()
def ask(model: PreTrainedModel, text: EncodeInput) -> np.ndarray:
    given = torch.tensor([text.ids])
    out = model.base_model(given) if type(model).__name__.endswith("ForMaskedLM") else model(given)
    return (out.logits if "logits" in out else out.last_hidden_state[0]).numpy()


def load(path: Path, backend: str) -> tuple[Checkpoint, ModelConfig, EncoderRunner]:
    checkpoint, ops = open_checkpoint(path), make_ops(backend, 1)
    decoder = decoder_of(checkpoint.config.architecture)
    assert decoder is not None
    module = family(decoder, "generate", "embed")
    model = load_headless(ops, module, as_decoder(checkpoint, decoder), MAX_LEN)
    runner = EncoderRunner(ops, model, max_tokens=64, max_rows=3, max_model_len=MAX_LEN, kv_dtype="float32")
    return checkpoint, model.config, runner


EUROBERT = [name for name in CASES if name.startswith("eurobert")]  # the others are no architectures of their own


@pytest.mark.parametrize("name", [name for name in CASES if name not in EUROBERT])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoders_that_embed_or_score_are_those_of_transformers(
    checkpoints: Callable[[str], tuple[Path, list[np.ndarray]]], backend: str, name: str
) -> None:
    check(*checkpoints(name), backend, name)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", EUROBERT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_those_of_transformers(
    checkpoints: Callable[[str], tuple[Path, list[np.ndarray]]], backend: str, name: str
) -> None:
    check(*checkpoints(name), backend, name)


@pytest.mark.verifies("safetensors", architecture="LlamaBidirectionalModel")
@pytest.mark.parametrize("name", ["eurobert"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nvidias_retrievers_are_eurobert_by_another_name(
    checkpoints: Callable[[str], tuple[Path, list[np.ndarray]]], backend: str, name: str, tmp_path: Path
) -> None:
    path, theirs = checkpoints(name)
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaBidirectionalModel"]}))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    check(tmp_path, theirs, backend, name)


def check(path: Path, theirs: list[np.ndarray], backend: str, name: str) -> None:
    checkpoint, config, runner = load(path, backend)
    if scores := name.startswith("score"):
        assert purpose(checkpoint.config.architecture) == "score"
        head = classifier_head(checkpoint, config)
        ours = runner.run(TEXTS, "last", lambda rows: rows[:1] @ head.T)
    else:
        assert purpose(checkpoint.config.architecture) == "embed"
        ours = runner.run(TEXTS, "all", np.copy)
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    assert scores or np.ptp([rows[0] for rows in theirs], axis=0).max() > 1e-2  # the first token sees the others
