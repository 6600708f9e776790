"""Which files of a repository are taken."""

import re

import pytest

from quire.core.errors import BadRequest
from quire.hub import DownloadFailed
from quire.hub.repo_files import choose_files

SNAPSHOT = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SNAPSHOT += ["model.safetensors.index.json", "generation_config.json", "chat_template.jinja"]
GGUFS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf", "mmproj-m.gguf"]


def test_of_a_repository_only_settings_and_weights_are_taken() -> None:
    other = ["README.md", "modeling.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors"]
    assert choose_files([*SNAPSHOT, *other, "../config.json"], None, "a/b") == SNAPSHOT


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("F16", ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]),
    ],
)
def test_a_selector_picks_one_gguf(selector: str, chosen: list[str]) -> None:
    assert choose_files([*GGUFS, "README.md"], selector, "a/b") == chosen


def test_a_selector_that_matches_no_file_or_several_lists_the_files() -> None:
    with pytest.raises(BadRequest, match="matches no file") as caught:
        choose_files(GGUFS, "Q5_0", "a/b")
    assert "m-Q4_K_M.gguf, m-Q8_0.gguf" in caught.value.hint
    with pytest.raises(BadRequest, match="matches 3 files"):
        choose_files(GGUFS, "m", "a/b")


def test_a_repository_of_many_ggufs_asks_which() -> None:
    with pytest.raises(BadRequest, match="3 GGUF models"):
        choose_files(GGUFS, None, "a/b")
    assert choose_files(["one.gguf", "README.md"], None, "a/b") == ["one.gguf"]


def test_weights_of_pytorch_are_taken_where_there_are_no_others() -> None:
    """They are read without loading the pickle."""
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    for weights in (["pytorch_model.bin"], shards):
        files = ["config.json", *weights, "training_args.bin", "optimizer.bin", "tf_model.h5"]
        assert sorted(choose_files(files, None, "a/b")) == sorted(["config.json", *weights])
        assert choose_files([*files, "m.gguf"], None, "a/b") == ["m.gguf"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["config.json", "tf_model.h5", "model.onnx"], r"nor GGUF files; it has weights as \.h5, \.onnx"),
        (["config.json", "consolidated.00.pth"], r"it has weights as \.pth"),
        (["config.json", "consolidated.safetensors"], r"it has weights as \.safetensors"),
        (["config.json", "README.md"], "nor GGUF files$"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_a_repository_without_weights_that_are_read_says_what_it_has(files: list[str], problem: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        choose_files(files, None, "a/b")
    assert re.search(problem, caught.value.message) and caught.value.hint


def test_an_embedder_keeps_what_says_how_it_pools() -> None:
    """Without these files, vectors would silently be others."""
    embedder = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"]
    embedder += ["2_Dense/model.safetensors", "3_Normalize/config.json", "sentence_bert_config.json", "tokenizer.json"]
    embedder += ["config_sentence_transformers.json", "vocab.txt", "special_tokens_map.json"]
    other = ["onnx/config.json", "openvino/openvino_model.xml", "2_Dense/pytorch_model.bin", "pytorch_model.bin"]
    other += ["0_Transformer/config.json", "0_Transformer/pytorch_model.bin", "1_Pooling/code.py"]
    assert choose_files([*embedder, *other], None, "a/b") == embedder
    assert "2_Dense/pytorch_model.bin" in choose_files(
        ["config.json", "pytorch_model.bin", "modules.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"],
        None,
        "a/b",
    )


TOKENIZER_FILES = [
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "vocab.txt",
]
TOKENIZER_FILES += ["tekken.json", "vocab.json", "merges.txt", "target_vocab.json", "added_tokens.json"]


@pytest.mark.parametrize("file", [*TOKENIZER_FILES, "quantize_config.json", "quant_config.json"])
def test_every_file_that_a_tokenizer_or_format_reads_is_taken(file: str) -> None:
    assert file in choose_files(["config.json", "model.safetensors", file], None, "a/b")
