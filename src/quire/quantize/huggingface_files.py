"""The files beside the weights of an output in Hugging Face's layout: config.json and the tokenizer's."""

import json
from array import array
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from quire.core.errors import Unsupported
from quire.models.llama import ROPE_FACTORS
from quire.quantize.floats import read_floats
from quire.quantize.gguf_metadata import llama3_scaling
from quire.text.tokenizers.gguf import CONTROL, UNKNOWN, USER_DEFINED, GGUFTokens, read_vocabulary
from quire.text.tokenizers.vocabulary import Vocabulary
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.container import GGUFFile
from quire.weights.huggingface import read_json

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "added_tokens.json", "vocab.json", "merges.txt", "tekken.json", "spiece.model", "chat_template.jinja",
    "rwkv_vocab_v20230424.txt", "chat_template.json", "LICENSE", "LICENSE.txt",
)  # fmt: skip
OURS = ("rotary_dim", "type_vocab_size")  # keys that only Quire's reader of GGUF gives
MAX_COPIED_BYTES = 256 << 20


def small_files(checkpoint: Checkpoint, quantization: dict[str, Any] | None, dtype: str) -> dict[str, bytes]:
    if checkpoint.path.is_dir():
        config = read_json(checkpoint.path / "config.json")
        for key in ("quantization_config", "compression_config"):
            config.pop(key, None)
        files = {
            name: path.read_bytes()
            for name in COPIED
            if (path := checkpoint.path / name).is_file() and path.stat().st_size <= MAX_COPIED_BYTES
        }
    else:
        config = _config_of_gguf(checkpoint)
        files = _tokenizer_of_gguf(checkpoint.path)
    if quantization is not None:
        config["quantization_config"] = quantization
    config["torch_dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    config.pop("dtype", None)
    return {"config.json": json.dumps(config, indent=2).encode() + b"\n", **files}


def _config_of_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    values = {key: value for key, value in checkpoint.config.values.items() if value is not None and key not in OURS}
    if ROPE_FACTORS in checkpoint.names():
        factors = read_floats(checkpoint.tensor(ROPE_FACTORS)).reshape(-1)
        if (scaling := llama3_scaling(checkpoint.config, factors)) is None:
            raise Unsupported(
                f"{checkpoint.path}: its rope scaling is {len(factors)} factors up to {factors.max():g}, which are not "
                "Llama 3's, and config.json has no key for others",
                "choose a GGUF type",
            )
        values["rope_scaling"] = scaling
    heads, width = values.get("num_attention_heads", 1), values.get("hidden_size", 0)
    if "rotary_dim" in checkpoint.config and (dim := checkpoint.config.int("rotary_dim")) != values.get("head_dim"):
        values["partial_rotary_factor"] = dim / values.get("head_dim", width // heads)
    values.setdefault("model_type", checkpoint.config.architecture.removesuffix("ForCausalLM").lower())
    if isinstance(ends := values.get("eos_token_id"), list) and len(ends) == 1:
        values["eos_token_id"] = ends[0]
    return {key: value.tolist() if isinstance(value, array) else value for key, value in values.items()}


def _tokenizer_of_gguf(path: Path) -> dict[str, bytes]:
    vocabulary = read_vocabulary(path)
    backend = vocabulary.backend
    if not isinstance(backend, tokenizers.Tokenizer):
        backend = _with_merges(path, vocabulary)
    elif backend.decoder is None:
        backend.decoder = decoders.ByteLevel()
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.named}
    settings |= {"add_bos_token": bool(prefix), "add_eos_token": bool(suffix), "clean_up_tokenization_spaces": False}
    if vocabulary.chat_template:
        settings["chat_template"] = vocabulary.chat_template
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False).encode() + b"\n",
    }


def _with_merges(path: Path, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE by scores as BPE with merges: every way to make a piece of two, the best piece first."""
    metadata = CheckpointConfig(path, GGUFFile(path, with_strings=True).metadata)
    pieces = GGUFTokens.read(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    pairs = []
    for index, token in enumerate(pieces.tokens):
        if pieces.kinds[index] == 1:
            cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            found = [(pieces.ids[left], pieces.ids[right], left, right) for left, right in cuts
                     if left in pieces.ids and right in pieces.ids]  # fmt: skip
            pairs += [(-scores[index], index, *pair) for pair in sorted(found)]
    merges = [(left, right) for _, _, _, _, left, right in sorted(pairs)]
    unknown = pieces.id("unknown", 0)
    model = models.BPE(
        pieces.ids, merges, unk_token=None if unknown is None else pieces.tokens[unknown], fuse_unk=True,
        byte_fallback="<0x0A>" in pieces.ids,
    )  # fmt: skip
    backend = tokenizers.Tokenizer(model)
    space = [normalizers.Prepend("▁")] if vocabulary.strips_space else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.strips_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = [
        AddedToken(pieces.tokens[index], normalized=False, special=True) for index in pieces.of(CONTROL, UNKNOWN)
    ]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(pieces.tokens[index], normalized=False) for index in pieces.of(USER_DEFINED)])
    return backend
