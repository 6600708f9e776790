"""Tiny random DeBERTas, made by transformers, against transformers."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checking import BACKENDS
from models.test_bert import PAIRS, TEXTS, TINY, Theirs, ask, load, random_encoder
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.deberta import config, distance_rows
from quire.weights.config import CheckpointConfig

with warnings.catch_warnings():  # it compiles functions in a way that torch has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import (
        DebertaV2Config,
        DebertaV2ForMaskedLM,
        DebertaV2ForSequenceClassification,
        DebertaV2Model,
        PreTrainedModel,
    )

V3 = {
    **TINY, "relative_attention": True, "position_biased_input": False, "type_vocab_size": 0, "position_buckets": 10,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
}  # fmt: skip
CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "deberta": (DebertaV2Model, V3),
    "deberta-own-keys": (
        DebertaV2Model,
        {**V3, "share_att_key": False, "position_buckets": -1, "max_relative_positions": 16, "hidden_size": 36,
         "num_attention_heads": 3, "norm_rel_ebd": "none"},
    ),
    "deberta-with-a-head": (DebertaV2ForMaskedLM, {**V3, "pos_att_type": "c2p|p2c", "num_attention_heads": 2}),
    "score-deberta": (DebertaV2ForSequenceClassification, {**V3, "num_labels": 1}),
    "score-deberta-three": (DebertaV2ForSequenceClassification, {**V3, "num_labels": 3, "position_buckets": 16}),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    @cache
    def make(name: str) -> Theirs:
        path = tmp_path_factory.mktemp(name)
        kind, options = CASES[name]
        model = random_encoder(kind, DebertaV2Config, options, seed=sum(map(ord, name)))
        model.save_pretrained(path)
        return Theirs(path, [ask(model, text) for text in [*TEXTS, *PAIRS]])

    return make


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_and_logits_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    theirs = checkpoints(name)
    wanted = "first" if name.startswith("score") else "all"
    ours = load(theirs.path, backend).run([*TEXTS, *PAIRS], wanted, np.copy)  # type: ignore[arg-type]
    for found, expected in zip(ours, theirs.rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    first = np.stack([rows[0] for rows in theirs.rows])
    assert np.ptp(first, axis=0).max() > 3e-3 * np.abs(first).max(), "texts are too much alike for a test to fail"


@pytest.mark.parametrize("name", ["deberta", "score-deberta"])
def test_a_text_alone_gives_the_same_bits(checkpoints: Callable[[str], Theirs], name: str) -> None:
    path, texts = checkpoints(name).path, [*TEXTS, *PAIRS]
    wanted = "first" if name.startswith("score") else "all"
    together = load(path, "native", max_tokens=512, threads=3).run(texts, wanted, np.copy)  # type: ignore[arg-type]
    alone = [load(path, "native", threads=1).run([text], wanted, np.copy)[0] for text in texts]  # type: ignore[arg-type]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


def read(**values: Any) -> Any:
    common = V3 | {"architectures": ["DebertaV2Model"], "hidden_act": "gelu"}
    return config(CheckpointConfig(Path("config.json"), common | values))


def test_distances_fall_into_the_buckets_of_the_published_model() -> None:
    """256 buckets up to 512 tokens: those of transformers' function."""
    import torch
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    c = read(max_position_embeddings=512, position_buckets=256)
    theirs = make_log_bucket_position(torch.arange(-512, 513), 256, 512)
    expected = np.clip(theirs.numpy().astype(np.int64) + 256, 0, 511)
    np.testing.assert_array_equal(distance_rows(c, 512), expected)


def test_what_is_not_supported_is_refused_by_name() -> None:
    for key, value in {
        "position_biased_input": True,
        "type_vocab_size": 2,
        "conv_kernel_size": 3,
        "relative_attention": False,
        "pos_att_type": ["c2p"],
    }.items():
        with pytest.raises(Unsupported, match=key):
            read(**{key: value})
    with pytest.raises(BadCheckpoint, match="position_buckets is 2"):
        read(position_buckets=2)
