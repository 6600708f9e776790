"""An encoder of transformers as llama.cpp's converter would write it, in F32, with its tokenizer."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from weights.gguf_files import finish

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
WITH_ROPE = {
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "jina_embeddings_v3": gguf.MODEL_ARCH.JINA_BERT_V3,
}
DROPPED = re.compile(r"pooler\..*|cls\..*|lm_head\..*|vocab_.*|.*position_ids")


def write_encoder(source: Path, path: Path, pooling: gguf.PoolingType | None = None) -> Path:
    config = json.loads((source / "config.json").read_text())
    arch = WITH_ROPE.get(config["model_type"], gguf.MODEL_ARCH.BERT)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    layers = config.get("num_hidden_layers", config.get("n_layers"))
    skipped = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"] - skipped)
    writer.add_embedding_length(config.get("hidden_size", config.get("dim")))
    writer.add_feed_forward_length(config.get("intermediate_size", config.get("hidden_dim")))
    writer.add_head_count(config.get("num_attention_heads", config.get("n_heads")))
    writer.add_layer_norm_eps(config.get("norm_eps", config.get("layer_norm_eps", 1e-12)))
    writer.add_causal_attention(False)
    if arch != gguf.MODEL_ARCH.BERT:
        rope = config["rope_parameters"]
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == gguf.MODEL_ARCH.MODERN_BERT:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(config["global_attn_every_n_layers"])
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if (source / "tokenizer.json").exists():
        add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(arch, layers)
    for stored, data in load_file(source / "model.safetensors").items():
        name = re.sub(r"^(bert|roberta|distilbert)\.", "", stored)
        if DROPPED.fullmatch(name):
            continue
        if name == "embeddings.position_embeddings.weight":
            data = data[skipped:]
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, np.ascontiguousarray(data))
    return finish(writer, path)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    add = {"WordPiece": add_word_pieces, "Unigram": add_unigram, "BPE": add_bpe}
    add[tokenizer["model"]["type"]](writer, tokenizer["model"], special)


def add_word_pieces(writer: gguf.GGUFWriter, model: dict[str, Any], special: dict[str, int]) -> None:
    def phantom(token: str) -> str:
        return token if token in special else token.removeprefix("##") if token.startswith("##") else "\u2581" + token

    special = special | {model["unk_token"]: model["vocab"][model["unk_token"]]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list([phantom(token) for token in tokens])
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_unk_token_id(special["[UNK]"])
    writer.add_bos_token_id(special["[CLS]"])
    writer.add_sep_token_id(special["[SEP]"])


def add_unigram(writer: gguf.GGUFWriter, model: dict[str, Any], special: dict[str, int]) -> None:
    kinds = [CONTROL if piece in special else NORMAL for piece, _ in model["vocab"]]
    kinds[model["unk_id"]] = UNKNOWN
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in model["vocab"]])
    writer.add_token_scores([score for _, score in model["vocab"]])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(model["unk_id"])
    _add_ends(writer, special)


def add_bpe(writer: gguf.GGUFWriter, model: dict[str, Any], special: dict[str, int]) -> None:
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("roberta-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    _add_ends(writer, special)


def _add_ends(writer: gguf.GGUFWriter, special: dict[str, int]) -> None:
    writer.add_bos_token_id(special["<s>"])
    writer.add_eos_token_id(special["</s>"])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
