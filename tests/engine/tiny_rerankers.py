"""Random decoders of two layers that score pairs of texts, with a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 600,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}Q{% elif m.role == 'document' %}D{% endif %}:{{ m.content }}\n"
    "{% endfor %}A:"
)


def byte_tokenizer(**names: Any) -> PreTrainedTokenizerFast:
    """A token a byte, and yes and no."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "yes", "no"])}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    for merged in ("ye",):
        vocab[merged] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_decoder(model: Any, path: Path, template: str | None = None) -> Any:
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.3)
    model.eval().save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return model


def write_logit_score(path: Path, yes: int, no: int | None) -> None:
    """As sentence-transformers describes a decoder that scores by the logits of tokens."""
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    modules = [
        {"idx": index, "path": folder, "type": f"sentence_transformers.{kind}"}
        for index, (folder, kind) in enumerate(zip(["", "1_LogitScore"], kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
