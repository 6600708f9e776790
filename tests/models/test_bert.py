"""Tiny random encoders of every class, made by transformers, against transformers."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CamembertConfig,
    CamembertForMaskedLM,
    CamembertForSequenceClassification,
    CamembertModel,
    Data2VecTextConfig,
    Data2VecTextForMaskedLM,
    Data2VecTextForSequenceClassification,
    Data2VecTextModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraModel,
    ErnieConfig,
    ErnieForMaskedLM,
    ErnieForSequenceClassification,
    ErnieModel,
    GteConfig,
    GteForMaskedLM,
    GteForSequenceClassification,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForMaskedLM,
    JinaEmbeddingsV3ForSequenceClassification,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetForSequenceClassification,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from models.checking import BACKENDS, make_ops
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.models import rope_bert
from quire.models.registry import family, purpose
from quire.models.rope import frequencies
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.weights.checkpoint import open_checkpoint
from quire.weights.config import CheckpointConfig

MAX_LEN = 40
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,  # wide enough that every part of the model moves what comes out
}
ROBERTA = {**TINY, "max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1, "pad_token_id": 1}
DISTIL: dict[str, Any] = {
    "vocab_size": 96,
    "dim": 64,
    "hidden_dim": 112,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
}
MODERN = {
    **TINY,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "cls_token_id": 0,
    "sep_token_id": 1,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MPNET = {**TINY, "max_position_embeddings": MAX_LEN + 2}
NOMIC = {**TINY, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
GTE = {**TINY, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
JINA_3 = {**GTE, "pad_token_id": 1}
ELECTRA = {**TINY, "embedding_size": 24}
ALBERT = {**TINY, "embedding_size": 24, "num_hidden_layers": 3, "num_hidden_groups": 2, "initializer_range": 0.4}
BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
ONE = {"num_labels": 1}
CASES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "bert": (BertModel, BertConfig, TINY),
    "bert-heads-of-12": (BertModel, BertConfig, {**TINY, "hidden_size": 36, "num_attention_heads": 3}),
    "bert-tanh": (BertModel, BertConfig, {**TINY, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert-with-a-head": (BertForMaskedLM, BertConfig, TINY),
    "roberta": (RobertaModel, RobertaConfig, ROBERTA),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, ROBERTA),
    "roberta-with-a-head": (RobertaForMaskedLM, RobertaConfig, ROBERTA),
    "xlm-roberta-with-a-head": (XLMRobertaForMaskedLM, XLMRobertaConfig, ROBERTA),
    "camembert": (CamembertModel, CamembertConfig, ROBERTA),
    "camembert-with-a-head": (CamembertForMaskedLM, CamembertConfig, ROBERTA),
    "distilbert-with-a-head": (DistilBertForMaskedLM, DistilBertConfig, DISTIL),
    "modernbert-with-a-head": (ModernBertForMaskedLM, ModernBertConfig, MODERN),
    "distilbert": (DistilBertModel, DistilBertConfig, DISTIL),
    "distilbert-relu": (DistilBertModel, DistilBertConfig, {**DISTIL, "activation": "relu"}),
    "modernbert": (ModernBertModel, ModernBertConfig, MODERN),
    "modernbert-biases": (ModernBertModel, ModernBertConfig, {**MODERN, **BIASES}),
    "mpnet": (MPNetModel, MPNetConfig, MPNET),
    "mpnet-heads-of-12": (MPNetModel, MPNetConfig, {**MPNET, "hidden_size": 36, "num_attention_heads": 3}),
    "mpnet-with-a-head": (MPNetForMaskedLM, MPNetConfig, MPNET),
    "nomic": (NomicBertModel, NomicBertConfig, NOMIC),
    "nomic-heads-of-12": (NomicBertModel, NomicBertConfig, {**NOMIC, "hidden_size": 36, "num_attention_heads": 3}),
    "data2vec": (Data2VecTextModel, Data2VecTextConfig, ROBERTA),
    "data2vec-with-a-head": (Data2VecTextForMaskedLM, Data2VecTextConfig, ROBERTA),
    "ernie": (ErnieModel, ErnieConfig, {**TINY, "use_task_id": True}),
    "ernie-with-a-head": (ErnieForMaskedLM, ErnieConfig, TINY),
    "score-data2vec": (Data2VecTextForSequenceClassification, Data2VecTextConfig, {**ROBERTA, **ONE}),
    "score-ernie": (ErnieForSequenceClassification, ErnieConfig, {**TINY, **ONE, "use_task_id": True}),
    "electra": (ElectraModel, ElectraConfig, ELECTRA),
    "electra-wide": (ElectraForPreTraining, ElectraConfig, {**TINY, "embedding_size": 64}),
    "electra-with-a-head": (ElectraForMaskedLM, ElectraConfig, ELECTRA),
    "albert": (AlbertModel, AlbertConfig, ALBERT),
    "albert-with-a-head": (
        AlbertForMaskedLM,
        AlbertConfig,
        {**ALBERT, "num_hidden_layers": 1, "num_hidden_groups": 1, "inner_group_num": 2},
    ),
    "gte": (GteModel, GteConfig, {**GTE, "type_vocab_size": 0}),
    "gte-with-a-head": (GteForMaskedLM, GteConfig, GTE),
    "jina-3": (JinaEmbeddingsV3Model, JinaEmbeddingsV3Config, JINA_3),
    "jina-3-with-a-head": (JinaEmbeddingsV3ForMaskedLM, JinaEmbeddingsV3Config, JINA_3),
    "score-electra": (ElectraForSequenceClassification, ElectraConfig, {**ELECTRA, **ONE}),
    "score-albert": (AlbertForSequenceClassification, AlbertConfig, {**ALBERT, **ONE}),
    "score-gte": (GteForSequenceClassification, GteConfig, {**GTE, **ONE}),
    "score-jina-3": (JinaEmbeddingsV3ForSequenceClassification, JinaEmbeddingsV3Config, {**JINA_3, **ONE}),
    "score-mpnet": (MPNetForSequenceClassification, MPNetConfig, {**MPNET, **ONE}),
    "score-modernbert": (ModernBertForSequenceClassification, ModernBertConfig, {**MODERN, **BIASES, **ONE}),
    "score-bert": (BertForSequenceClassification, BertConfig, {**TINY, **ONE}),
    "score-bert-three": (BertForSequenceClassification, BertConfig, {**TINY, "num_labels": 3}),
    "score-roberta": (RobertaForSequenceClassification, RobertaConfig, {**ROBERTA, **ONE}),
    "score-xlm-roberta": (XLMRobertaForSequenceClassification, XLMRobertaConfig, {**ROBERTA, **ONE}),
    "score-camembert": (CamembertForSequenceClassification, CamembertConfig, {**ROBERTA, **ONE}),
    "score-distilbert": (DistilBertForSequenceClassification, DistilBertConfig, {**DISTIL, **ONE}),
}

rng = np.random.default_rng(3)
TEXTS = [EncodeInput(rng.integers(3, 96, n).tolist()) for n in (5, 1, 40, 17, 33)]
PAIRS = [EncodeInput(rng.integers(3, 96, n).tolist(), [0] * (n // 3) + [1] * (n - n // 3)) for n in (9, 40, 16, 2)]


@dataclass
class Theirs:
    path: Path
    rows: list[np.ndarray]  # of TEXTS and then of PAIRS: [tokens, hidden], or [1, labels]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    @cache
    def make(name: str) -> Theirs:
        path = tmp_path_factory.mktemp(name)
        model = random_encoder(*CASES[name], seed=sum(map(ord, name)))
        model.save_pretrained(path)
        return Theirs(path, [ask(model, text) for text in [*TEXTS, *PAIRS]])

    return make


def random_encoder(
    model_class: type[PreTrainedModel], config_class: type, options: dict[str, Any], seed: int
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones and biases as zeros: a test of them needs other values
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return model


@torch.inference_mode()
def ask(model: PreTrainedModel, text: EncodeInput) -> np.ndarray:
    given = {"input_ids": torch.tensor([text.ids])}
    if getattr(model.config, "type_vocab_size", 1) > 1 and text.segments is not None:
        given["token_type_ids"] = torch.tensor([text.segments])
    has_head = type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining"))
    out = model.base_model(**given) if has_head else model(**given)
    return (out.logits if "logits" in out else out.last_hidden_state[0]).numpy()


def load(path: Path, backend: str, max_tokens: int = 64, threads: int = 2) -> EncoderRunner:
    ops = make_ops(backend, threads)
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config.architecture, "embed", "score")
    config = module.config(checkpoint.config)
    model = module.load(ops, checkpoint, config, MAX_LEN)
    return EncoderRunner(ops, model, max_tokens=max_tokens, max_rows=3, max_model_len=MAX_LEN, kv_dtype="float32")


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_and_logits_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    theirs = checkpoints(name)
    runner = load(theirs.path, backend)
    wanted = "first" if name.startswith("score") else "all"
    ours = runner.run([*TEXTS, *PAIRS], wanted, np.copy)  # type: ignore[arg-type]
    for found, expected in zip(ours, theirs.rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    first = np.stack([rows[0] for rows in theirs.rows])
    assert np.ptp(first, axis=0).max() > 3e-3 * np.abs(first).max(), "texts are too much alike for a test to fail"


def test_nomic_as_its_authors_spell_it(checkpoints: Callable[[str], Theirs]) -> None:
    theirs = checkpoints("nomic")
    values = json.loads((theirs.path / "config.json").read_text())
    spelled = {rope_bert.SPELLINGS[key]: key for key in rope_bert.SPELLINGS}
    renamed = {spelled.get(key, key): value for key, value in values.items() if key != "rope_parameters"}
    more = {"rotary_emb_base": 500.0, "n_positions": 8192, "activation_function": "swiglu", "prenorm": False}
    found = rope_bert.config(CheckpointConfig(theirs.path, renamed | more))
    assert found == rope_bert.config(open_checkpoint(theirs.path).config)
    for key, value in {"prenorm": True, "rotary_emb_fraction": 0.5, "qkv_proj_bias": True}.items():
        with pytest.raises(Unsupported, match=f"{key} is {value}"):
            rope_bert.config(CheckpointConfig(theirs.path, renamed | more | {key: value}))


OLDER_NAMES = {"gte": "NewModel", "gte-with-a-head": "NewForMaskedLM", "score-gte": "NewForSequenceClassification"}
SPELLED = [
    pytest.param(name, marks=pytest.mark.verifies("safetensors", architecture=older))
    for name, older in OLDER_NAMES.items()
]


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gte_as_its_authors_spell_it(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    values = json.loads((theirs.path / "config.json").read_text()) | {"architectures": [OLDER_NAMES[name]]}
    values |= {"rope_theta": 5000.0, "rope_parameters": None, "position_embedding_type": "rope"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(theirs.path / "model.safetensors")
    save_file({re.sub("^gte", "new", key): data for key, data in tensors.items()}, tmp_path / "model.safetensors")
    ours = load(tmp_path, backend).run(TEXTS, "first" if name.startswith("score") else "all", np.copy)
    for found, expected in zip(ours, theirs.rows, strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())


def test_ntk_of_gte_slows_the_slowest_frequency_by_its_factor(checkpoints: Callable[[str], Theirs]) -> None:
    hf = open_checkpoint(checkpoints("gte").path).config
    plain = {"rope_parameters": None, "rope_theta": 5000.0}
    scaled = {"rope_scaling": {"type": "ntk", "factor": 8.0}}
    found, base = (rope_bert.config(hf.with_values(plain | more)).rope for more in (scaled, {}))
    assert found is not None and base is not None
    (slowed, _), (before, _) = frequencies(found, 40), frequencies(base, 40)
    np.testing.assert_allclose(before[-1] / slowed[-1], 8.0, rtol=1e-5)
    np.testing.assert_allclose(before[0] / slowed[0], 8.0 ** (2 / 16), rtol=1e-5)
    with pytest.raises(Unsupported, match=r"rope_scaling\.mixed_b is 0\.5"):
        rope_bert.config(hf.with_values(plain | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "score-bert"])
def test_a_text_alone_gives_the_same_bits(checkpoints: Callable[[str], Theirs], name: str) -> None:
    path = checkpoints(name).path
    texts = [*TEXTS, *PAIRS]
    runner = load(path, "native", max_tokens=512, threads=3)
    wanted = "first" if name.startswith("score") else "all"
    together = runner.run(texts, wanted, np.copy)  # type: ignore[arg-type]
    alone = [load(path, "native", threads=1).run([text], wanted, np.copy)[0] for text in texts]  # type: ignore[arg-type]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_and_last_rows_are_rows_of_all(checkpoints: Callable[[str], Theirs], backend: str) -> None:
    runner = load(checkpoints("bert").path, backend)
    for wanted, place in (("first", 0), ("last", -1)):
        one = runner.run(TEXTS, wanted, np.copy)  # type: ignore[arg-type]
        everything = runner.run(TEXTS, "all", np.copy)
        for row, rows in zip(one, everything, strict=True):
            np.testing.assert_allclose(row[0], rows[place], atol=1e-5)


def test_an_architecture_says_what_it_is_for() -> None:
    assert [purpose(name) for name in ("LlamaForCausalLM", "BertModel", "MistralModel")] == [
        "generate",
        "embed",
        "embed",
    ]
    assert purpose("XLMRobertaForSequenceClassification") == "score"
    with pytest.raises(Unsupported, match="a `BertModel` embeds texts, and does not generate\nhint: use `q"):
        family("BertModel")
    with pytest.raises(Unsupported, match="a `MistralModel` embeds texts, and does not generate"):
        family("MistralModel")
    with pytest.raises(Unsupported, match="a `LlamaForCausalLM` generates text, and does not embed or score"):
        family("LlamaForCausalLM", "embed", "score")
    with pytest.raises(Unsupported, match="of Bert, BertModel, "):
        family("BertForTokenClassification")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"num_attention_heads": 7}, "64 columns cannot be divided among 7 heads"),
    ],
)
def test_what_nobody_wrote_code_for_is_refused(
    checkpoints: Callable[[str], Theirs], changed: dict[str, Any], problem: str
) -> None:
    checkpoint = open_checkpoint(checkpoints("bert").path)
    with pytest.raises(QuireError, match=problem):
        family("BertModel", "embed").config(checkpoint.config.with_values(changed))


def test_a_missing_tensor_is_named(checkpoints: Callable[[str], Theirs]) -> None:
    checkpoint = open_checkpoint(checkpoints("bert").path)
    module = family("BertModel", "embed")
    config = module.config(checkpoint.config.with_values({"num_hidden_layers": 3}))
    from quire.ops.reference import TorchOps

    with pytest.raises(BadCheckpoint, match=r"missing: encoder\.layer\.2\.attention\.self\.query\.weight"):
        module.load(TorchOps(), checkpoint, config, MAX_LEN)
