"""Random encoders of two layers with a tokenizer of a few words, saved as transformers and sentence-transformers do."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["a", "quire", "is", "gathering", "of", "pages", "paper", "was", "made", "rags", "what", "##s", ".", "?"]
TEXTS = ["A quire is a gathering of pages.", "paper", "Paper was made of rags", "What is a quire? " * 6]
QUERY = "What is a quire?"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
}


def wordpiece() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


def save(model: Any, path: Path) -> Any:
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.3)
    model.eval().save_pretrained(path)
    wordpiece().save_pretrained(path)
    return model


def write_modules(path: Path, pooling: dict[str, Any], *more: tuple[str, dict[str, Any]]) -> None:
    """As sentence-transformers does."""
    listed = [("Transformer", {}), ("Pooling", pooling), *more]
    folders = ["", *(f"{index}_{kind}" for index, (kind, _) in enumerate(listed) if index)]
    modules = [
        {"idx": index, "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, ((kind, _), folder) in enumerate(zip(listed, folders, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for folder, (_, config) in list(zip(folders, listed, strict=True))[1:]:
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(config))


def save_encoder(path: Path) -> BertModel:
    """Mean of the tokens, of length 1; texts of 40 tokens; a prompt for queries."""
    model = save(BertModel(BertConfig(**SIZES)), path)
    write_modules(path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("Normalize", {}))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    prompts = {"prompts": {"query": "what is: ", "passage": ""}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model


def save_reranker(path: Path) -> BertForSequenceClassification:
    return save(BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)), path)
