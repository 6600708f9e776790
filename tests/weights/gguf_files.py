"""Tiny GGUF files for tests, written by the gguf library or, where they are to be wrong, byte by byte."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 48


def llama_tensors(rng: np.random.Generator, tied: bool = False) -> dict[str, np.ndarray]:
    """One layer, with the names of Hugging Face."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if tied:
        del shapes["lm_head.weight"]
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to q and k of 'llama' files: the two halves of a head's rows are dealt out in turn."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """VOCAB tokens: printable letters, one of them special, and a pair."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + index) for index in range(VOCAB - 1)] + ["!!"])
    writer.add_token_types([1] * (VOCAB - 2) + [3, 1])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(5)


def write_llama(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    arch: str = "llama",
    extra: Mapping[str, Any] | None = None,
    configure: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors_a_part: int = 0,  # 0: the file is in one
) -> Path:
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_part)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    if configure is not None:
        configure(writer)
    for name, data in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            data = interleave(data, HEADS)
        if arch == "llama" and ".k_proj." in name:
            data = interleave(data, KV_HEADS)
        writer.add_tensor(GGUF_NAMES.get(name, name), np.ascontiguousarray(data))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A line of the tensor directory; dims are in the file's order, the fastest first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_file(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A whole file; the counts may lie."""
    keys, tensors = keys or [], tensors or []
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data
