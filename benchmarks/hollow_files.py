"""Checkpoints whose weights are zeros: files with holes, which take no disk and are read as any other."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from quire.ops.tensors import GGUF_TYPES, StorageType
from quire.planning.formats import find_format
from quire.weights.gguf.tensors import TYPE_NAMES

ALIGNMENT = 32
_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
_UINT32, _FLOAT32, _STRING = 4, 6, 8  # types of GGUF's values


def write_llama_gguf(path: Path, config: dict[str, Any], format_name: str) -> Path:
    """A dense Llama of these sizes, each tensor in the type that the format gives it."""
    type_of, layers = find_format(format_name), config["num_hidden_layers"]
    entries, offset = [], 0
    for name, published, shape in _llama_tensors(config):
        kind = GGUF_TYPES["F32"] if len(shape) == 1 else _fitting(type_of(published, layers), shape[-1])
        entries.append(_entry(name, shape, kind, offset))
        nbytes = prod(shape) // kind.block * kind.block_bytes
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    keys = _keys(config)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys)) + b"".join(keys) + b"".join(entries)
    with path.open("wb") as file:
        file.write(head + b"\0" * (-len(head) % ALIGNMENT))
        file.truncate(file.tell() + offset)
    return path


def write_lora_adapter(folder: Path, config: dict[str, Any], rank: int) -> Path:
    """Of all linear layers, in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for _, published, (outputs, *inputs) in _llama_tensors(config):
        if not inputs or "layers" not in published:
            continue
        layer = f"base_model.model.{published.removesuffix('.weight')}"
        for side, shape in (("A", (rank, inputs[0])), ("B", (outputs, rank))):
            end = at + 2 * prod(shape)
            header[f"{layer}.lora_{side}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _llama_tensors(config: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(GGUF's name, the published name, shape)"""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd", "model.embed_tokens", (vocab, hidden)),
        ("output_norm", "model.norm", (hidden,)),
    ]
    if not config["tie_word_embeddings"]:
        tensors.append(("output", "lm_head", (vocab, hidden)))
    for layer in range(config["num_hidden_layers"]):
        block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        tensors += [
            (f"{block}attn_norm", f"{prefix}input_layernorm", (hidden,)),
            (f"{block}attn_q", f"{prefix}self_attn.q_proj", (q, hidden)),
            (f"{block}attn_k", f"{prefix}self_attn.k_proj", (kv, hidden)),
            (f"{block}attn_v", f"{prefix}self_attn.v_proj", (kv, hidden)),
            (f"{block}attn_output", f"{prefix}self_attn.o_proj", (hidden, q)),
            (f"{block}ffn_norm", f"{prefix}post_attention_layernorm", (hidden,)),
            (f"{block}ffn_gate", f"{prefix}mlp.gate_proj", (inner, hidden)),
            (f"{block}ffn_up", f"{prefix}mlp.up_proj", (inner, hidden)),
            (f"{block}ffn_down", f"{prefix}mlp.down_proj", (hidden, inner)),
        ]
    return [(f"{name}.weight", f"{published}.weight", shape) for name, published, shape in tensors]


def _fitting(kind: StorageType, columns: int) -> StorageType:
    assert columns % kind.block == 0, f"rows of {columns} weights, and blocks of {kind.block}"
    return kind


def _entry(name: str, shape: tuple[int, ...], kind: StorageType, offset: int) -> bytes:
    """A line of the directory; dimensions are in the file's order, the fastest first."""
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], _NUMBERS[kind.name], offset)


def _keys(config: dict[str, Any]) -> list[bytes]:
    numbers = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"),
        *(_text(f"llama.{key}") + struct.pack("<II", _UINT32, config[ours]) for key, ours in numbers.items()),
        _text("llama.rope.dimension_count") + struct.pack("<II", _UINT32, head_dim),
        _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, 1e-5),
        _text("llama.rope.freq_base") + struct.pack("<If", _FLOAT32, 10000.0),
    ]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
