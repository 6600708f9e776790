"""GGUF files of hybrids with random weights, as llama.cpp's converter would name their tensors: matrices in Q8_0.

The shapes are small ones of published families: layers of Qwen3.5 (which are those of Qwen3-Next without experts),
Mamba 2, and LFM2 350M."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB = 32_000
CONTEXT = 16_384
Tensors = Iterator[tuple[str, tuple[int, ...]]]  # (name, shape); matrices end in `.weight` and have two axes
FLOATS = ("norm", "ssm_a", "ssm_d", "conv", "bias")  # parts of names of tensors that stay in F32


@dataclass(frozen=True, slots=True)
class Hybrid:
    architecture: str
    layers: int
    keys: Callable[[gguf.GGUFWriter], None]
    outer: dict[str, tuple[int, ...]]
    layer: Callable[[int], dict[str, tuple[int, ...]]]

    def tensors(self) -> Tensors:
        yield from self.outer.items()
        for index in range(self.layers):
            yield from ((f"blk.{index}.{name}", shape) for name, shape in self.layer(index).items())


def _feed_forward(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    up = {f"ffn_{part}.weight": (inner, hidden) for part in ("gate", "up")}
    return {**up, "ffn_down.weight": (hidden, inner)}


def _attention(hidden: int, heads: int, kv_heads: int, size: int, gated: bool) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q.weight": ((1 + gated) * heads * size, hidden),
        "attn_k.weight": (kv_heads * size, hidden),
        "attn_v.weight": (kv_heads * size, hidden),
        "attn_output.weight": (hidden, heads * size),
        "attn_q_norm.weight": (size,),
        "attn_k_norm.weight": (size,),
    }


def qwen35(layers: int = 12, hidden: int = 1024) -> Hybrid:
    heads, kv_heads, size, inner, key_heads, value_heads, width = 8, 2, 128, 11 * hidden // 4, 8, 16, 128
    keys, values, interval = key_heads * width, value_heads * width, 4

    def add_keys(writer: gguf.GGUFWriter) -> None:
        _add_decoder(writer, layers, hidden, inner, heads, kv_heads)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_freq_base(1e7)
        writer.add_rope_dimension_count(size // 4)
        writer.add_rope_dimension_sections([size // 8, 0, 0, 0])
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(width)
        writer.add_ssm_group_count(key_heads)
        writer.add_ssm_time_step_rank(value_heads)
        writer.add_ssm_inner_size(values)
        writer.add_full_attention_interval(interval)

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        delta = {
            "attn_qkv.weight": (2 * keys + values, hidden),
            "attn_gate.weight": (values, hidden),
            "ssm_conv1d.weight": (2 * keys + values, 4),
            "ssm_dt.bias": (value_heads,),
            "ssm_a": (value_heads,),
            "ssm_beta.weight": (value_heads, hidden),
            "ssm_alpha.weight": (value_heads, hidden),
            "ssm_norm.weight": (width,),
            "ssm_out.weight": (hidden, values),
        }
        attends = index % interval == interval - 1
        norms = {"attn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,)}
        mixing = _attention(hidden, heads, kv_heads, size, gated=True) if attends else delta
        return {**norms, **mixing, **_feed_forward(hidden, inner)}

    return Hybrid(
        "qwen35", layers, add_keys, {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}, layer
    )


def mamba2(layers: int = 24, hidden: int = 1024) -> Hybrid:
    inner, state, heads, groups = 2 * hidden, 128, 2 * hidden // 64, 1
    columns = inner + 2 * groups * state

    def add_keys(writer: gguf.GGUFWriter) -> None:
        _add_decoder(writer, layers, hidden, 0, 0, 0)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_state_size(state)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(groups)

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        return {
            "attn_norm.weight": (hidden,),
            "ssm_in.weight": (inner + columns + heads, hidden),
            "ssm_conv1d.weight": (columns, 4),
            "ssm_conv1d.bias": (columns,),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads, 1),
            "ssm_d": (heads, 1),
            "ssm_norm.weight": (groups, inner // groups),
            "ssm_out.weight": (hidden, inner),
        }

    return Hybrid(
        "mamba2", layers, add_keys, {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}, layer
    )


def lfm2(layers: int = 16, hidden: int = 1024) -> Hybrid:
    heads, kv_heads, size, inner, taps = hidden // 64, hidden // 128, 64, 9 * hidden // 2, 3
    attending = {2, 5, 8, 10, 12, 14}

    def add_keys(writer: gguf.GGUFWriter) -> None:
        by_layer = [kv_heads * (index in attending) for index in range(layers)]
        _add_decoder(writer, layers, hidden, inner, heads, by_layer)
        writer.add_rope_freq_base(1e6)
        writer.add_shortconv_l_cache(taps)

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        convolution = {
            "shortconv.in_proj.weight": (3 * hidden, hidden),
            "shortconv.conv.weight": (hidden, taps),
            "shortconv.out_proj.weight": (hidden, hidden),
        }
        norms = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        mixing = _attention(hidden, heads, kv_heads, size, gated=False) if index in attending else convolution
        return {**norms, **mixing, **_feed_forward(hidden, inner)}

    outer = {"token_embd.weight": (VOCAB, hidden), "token_embd_norm.weight": (hidden,)}
    return Hybrid("lfm2", layers, add_keys, outer, layer)


HYBRIDS: dict[str, Callable[..., Hybrid]] = {"qwen3.5": qwen35, "mamba2": mamba2, "lfm2": lfm2}


def write_hybrid(folder: Path, name: str, **sizes: int) -> Path:
    """`sizes`: layers, hidden; those of the table if none are given."""
    hybrid, path = HYBRIDS[name](**sizes), folder / f"{name}-random-Q8_0.gguf"
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, hybrid.architecture)
    hybrid.keys(writer)
    _add_tokenizer(writer)
    for tensor, shape in hybrid.tensors():
        if any(part in tensor for part in FLOATS) and "proj" not in tensor:
            writer.add_tensor(tensor, _floats(tensor, shape, rng))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            matrix = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
            writer.add_tensor(tensor, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Recurrences forget as models do before they are trained: decays of 1 to 16, steps of 0.001 to 0.1."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    if "ssm_a" in name:
        return -rng.uniform(1, 16, shape).astype(np.float32)
    if "ssm_dt" in name:
        return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape)))).astype(np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(2)


def _add_decoder(
    writer: gguf.GGUFWriter, layers: int, hidden: int, inner: int, heads: int, kv_heads: int | list[int]
) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if heads:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Letters, a pair of them, and words that no text has: only ids are computed."""
    letters = [chr(33 + index) for index in range(94)]
    tokens = [*letters, "!!", *(f"word{index}" for index in range(VOCAB - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
