"""Tiny Llamas in every quantized format, packed here code by code as the formats' definitions say.

A packer takes a matrix [N, K] and gives the tensors of its module, and the values that they stand for. What the real
libraries write was compared by hand: docs/formats.md."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from quire.ops.dequantize import FP4_VALUES, NF4_VALUES

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 128, 256, 4, 2, 2, 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
Tensors = dict[str, torch.Tensor]
Packer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Format:
    """How a model is written, and what becomes of its matrices: a storage type for each kind of them."""

    pack: Packer
    config: dict[str, Any]
    stored_as: str
    exact: bool = True  # on the CPU: every value is kept


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """[n, count] -> int32 [n, words]: bit after bit, 32 of them a word, the lowest first."""
    each_bit = codes.astype(np.int64)[..., None] >> np.arange(bits) & 1
    stream = each_bit.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).reshape(len(codes), -1, 32)
    return (stream << np.arange(32)).sum(2).astype(np.uint32).view(np.int32)


def rounded(w: np.ndarray, bits: int, group: int, symmetric: bool, groups: np.ndarray | None = None) -> tuple:
    """-> codes [N, K] from 0 on, scales and zeros [N, groups], the group of each input"""
    K = w.shape[1]
    size = group if group > 0 else K
    groups = np.arange(K) // size if groups is None else groups
    most = 2**bits - 1
    scales = np.zeros((len(w), K // size), np.float32)
    zeros = np.full_like(scales, (most + 1) // 2)
    for g in range(K // size):
        part = w[:, groups == g]
        if symmetric:
            scales[:, g] = np.abs(part).max(1) * 2 / most
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = np.rint(-low / scales[:, g])
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(w / scales[:, groups]) + zeros[:, groups], 0, most)
    return codes, scales, zeros, groups


def values_of(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return (scales[:, groups] * (codes - zeros[:, groups])).astype(np.float32)


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, first_version: bool = True) -> Packer:
    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        K = w.shape[1]
        groups = np.arange(K) // (group if group > 0 else K)
        if act_order:  # of one order where layers share their input, as there
            groups = groups[np.random.default_rng(K).permutation(K)]
        codes, scales, zeros, groups = rounded(w, bits, group, symmetric, groups)
        stored_zeros = zeros.T - 1 if first_version else zeros.T
        assert stored_zeros.min() >= 0
        tensors = {
            "qweight": torch.from_numpy(np.ascontiguousarray(words_of(codes, bits).T)),
            "qzeros": torch.from_numpy(words_of(stored_zeros, bits)),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)).half(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, values_of(codes, scales, zeros, groups)

    return pack


def awq(version: str, group: int) -> Packer:
    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, scales, zeros, groups = rounded(w, 4, group, False)
        if version == "gemm":
            mixed = np.array([0, 2, 4, 6, 1, 3, 5, 7])

            def outputs_mixed(values: np.ndarray) -> torch.Tensor:
                by_word = values.T.reshape(values.shape[1], -1, 8)[..., mixed]
                return torch.from_numpy(words_of(by_word.reshape(values.shape[1], -1), 4))

            return {
                "qweight": outputs_mixed(codes),
                "qzeros": outputs_mixed(zeros),
                "scales": torch.from_numpy(np.ascontiguousarray(scales.T)).half(),
            }, values_of(codes, scales, zeros, groups)
        padded = -(-scales.shape[1] // 32) * 32
        wide_scales, wide_zeros = np.zeros((2, len(w), padded), np.float32)
        wide_scales[:, : scales.shape[1]], wide_zeros[:, : scales.shape[1]] = scales, zeros
        return {
            "qweight": torch.from_numpy(words_of(codes, 4)),
            "qzeros": torch.from_numpy(words_of(wide_zeros, 4)),
            "scales": torch.from_numpy(wide_scales).half(),
        }, values_of(codes, scales, zeros, groups)

    return pack


def bitsandbytes4(kind: str, nested: bool) -> Packer:
    table = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}[kind]

    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        blocks = w.reshape(-1, 64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(w.shape)}
        more: Tensors = {"absmax": torch.from_numpy(absmax)}
        if nested:
            offset = float(absmax.mean())
            rest = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            largest = np.abs(rest).max(1).astype(np.float32)
            inner = np.linspace(-1, 1, 256).astype(np.float32)
            codes = np.abs((rest / largest[:, None])[..., None] - inner).argmin(2).astype(np.uint8)
            absmax = (inner[codes] * largest[:, None]).reshape(-1)[: len(absmax)] + np.float32(offset)
            more = {
                "absmax": torch.from_numpy(codes.reshape(-1)[: len(absmax)].copy()),
                "nested_absmax": torch.from_numpy(largest),
                "nested_quant_map": torch.from_numpy(inner),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(2).astype(np.uint8)
        values = (table[codes] * absmax[:, None]).reshape(w.shape)
        flat = codes.reshape(-1)
        encoded = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors = {
            "weight": torch.from_numpy((flat[::2] << 4 | flat[1::2])[:, None]),
            "weight.quant_map": torch.from_numpy(table),
            f"weight.quant_state.bitsandbytes__{kind}": torch.from_numpy(encoded),
            **{f"weight.{name}": tensor for name, tensor in more.items()},
        }
        return tensors, values

    return pack


def bitsandbytes8(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    largest = np.abs(w).max(1).astype(np.float32)
    codes = np.rint(w * (127 / largest)[:, None]).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest / np.float32(127))[:, None]


def packed(bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> Packer:
    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        K = w.shape[1]
        groups = np.arange(K) // group
        if act_order:
            groups = groups[np.random.default_rng(K).permutation(K)]
        codes, scales, zeros, groups = rounded(w, bits, group, symmetric, groups)
        tensors = {
            "weight_packed": torch.from_numpy(words_of(codes, bits)),
            "weight_scale": torch.from_numpy(scales).half(),
            "weight_shape": torch.tensor(w.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(words_of(zeros.T, bits).T))
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, values_of(codes, scales, zeros, groups)

    return pack


def hqq(bits: int, group: int, axis: int = 1) -> Packer:
    """Zero points are fractions, and codes of distant rows share a word."""

    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows = w.reshape((-1, group) if axis == 1 else (group, -1))
        low, high = rows.min(axis, keepdims=True), rows.max(axis, keepdims=True)
        scales = ((high - low) / (2**bits - 1)).astype(np.float16)
        zeros = (-low / scales).astype(np.float16)
        codes = np.clip(np.rint(rows / scales + zeros), 0, 2**bits - 1).astype(np.int32)
        a_word, first = (10, 27) if bits == 3 else (8 // bits, 8 - bits)
        planes = np.pad(codes, ((0, -len(codes) % a_word), (0, 0))).reshape(a_word, -1, rows.shape[1])
        words = sum(plane << (first - bits * index) for index, plane in enumerate(planes))
        numbers = {"nbits": bits, "group_size": group, "axis": axis}
        tensors = {
            "W_q": torch.from_numpy(words.astype(np.int32 if bits == 3 else np.uint8)),
            "scale": torch.from_numpy(scales),
            "zero": torch.from_numpy(zeros),
            "shape": torch.tensor(w.shape),
            "packing": torch.tensor(list(f"{bits}bit_u8".encode()), dtype=torch.uint8),
            "view_as_float": torch.tensor(0, dtype=torch.uint8),
            **{key: torch.tensor(number, dtype=torch.int32) for key, number in numbers.items()},
        }
        wide = scales.astype(np.float32), zeros.astype(np.float32)
        values = (wide[0] * (codes.astype(np.float32) - wide[1])).reshape(w.shape)
        return tensors, values if axis == 1 else values.astype(np.float16).astype(np.float32)

    return pack


def eetq_bytes(codes: np.ndarray) -> np.ndarray:
    """int8 [K, N] in the order of EETQ's kernels, step by step as its preprocessing goes."""
    K, N = codes.shape
    sixteen = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    columns = codes.reshape(-1, 16, N)[:, sixteen].reshape(K, N).T
    pairs = columns.reshape(N // 2, 2, K // 64, 64).swapaxes(1, 2)
    swapped = pairs.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(K, N)
    return (swapped.astype(np.int32) + 128).astype(np.uint8).view(np.int8)


def eetq(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scales = (np.abs(w).max(1) / 128).astype(np.float16)
    codes = np.clip(np.rint(w / scales[:, None]), -128, 127).astype(np.int8)
    tensors = {"weight": torch.from_numpy(eetq_bytes(codes.T)), "weight_scales": torch.from_numpy(scales)}
    return tensors, codes * scales.astype(np.float32)[:, None]


def int8_channels(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scales = torch.from_numpy(np.abs(w).max(1, keepdims=True) / 127).bfloat16()
    codes = torch.from_numpy(w).div(scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, (codes.float() * scales.float()).numpy()


def fp8(by: str, scale_name: str = "weight_scale") -> Packer:
    def pack(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
        N, K = w.shape
        if by == "blocks":
            N_blocks, K_blocks = -(-N // 128), -(-K // 128)
            square = np.pad(w, ((0, N_blocks * 128 - N), (0, K_blocks * 128 - K))).reshape(N_blocks, 128, K_blocks, 128)
            scales = np.abs(square).max((1, 3)) / 448
            each = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:N, :K]
        else:
            scales = np.abs(w).max(1, keepdims=True) / 448 if by == "outputs" else np.abs(w).max().reshape(1) / 448
            each = np.broadcast_to(scales, w.shape)
        each = torch.from_numpy(each.astype(np.float32))
        codes = (torch.from_numpy(w) / each).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, scale_name: torch.from_numpy(scales.astype(np.float32))}
        return tensors, (codes.float() * each).numpy()

    return pack


def fbgemm(w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    tensors, values = fp8("outputs")(w)
    return tensors | {"input_scale_ub": torch.tensor([1200.0])}, values


def compressed(format: str, bits: int = 8, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "strategy": "channel" if group is None else "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": 64, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True}
BNB = {"quant_method": "bitsandbytes"}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"axis": 1}}}
PACKED = "pack-quantized"
FORMATS: dict[str, Format] = {
    "gptq-4": Format(gptq(4, 64, symmetric=True), GPTQ | {"bits": 4}, "Q4_0"),
    "gptq-4-rows": Format(gptq(4, -1, symmetric=True), GPTQ | {"bits": 4, "group_size": -1}, "Q4_0"),
    "gptq-4-asymmetric": Format(gptq(4, 32, symmetric=False), GPTQ | {"bits": 4, "checkpoint_format": "gptq"}, "Q4_Z"),
    "gptq-4-act-order": Format(gptq(4, 64, symmetric=False, act_order=True), GPTQ | {"bits": 4}, "Q4_Z"),
    "gptq-4-second": Format(
        gptq(4, 64, symmetric=False, first_version=False), GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, "Q4_Z"
    ),
    "gptq-3": Format(gptq(3, 32, symmetric=False, act_order=True), GPTQ | {"bits": 3}, "Q4_0"),
    "gptq-2": Format(gptq(2, 64, symmetric=True), GPTQ | {"bits": 2}, "Q4_0"),
    "gptq-8": Format(gptq(8, 64, symmetric=True), GPTQ | {"bits": 8}, "Q8_0"),
    "gptq-8-asymmetric": Format(gptq(8, 64, symmetric=False), GPTQ | {"bits": 8}, "Q8_M"),
    "awq-gemm": Format(awq("gemm", 128), AWQ | {"version": "gemm", "group_size": 128}, "Q4_Z"),
    "awq-gemv": Format(awq("gemv", 64), AWQ | {"version": "GEMV", "group_size": 64}, "Q4_Z"),
    "bitsandbytes-nf4": Format(bitsandbytes4("nf4", False), BNB, "NF4", exact=False),
    "bitsandbytes-nf4-nested": Format(bitsandbytes4("nf4", True), BNB, "NF4", exact=False),
    "bitsandbytes-fp4": Format(bitsandbytes4("fp4", False), BNB, "FP4", exact=False),
    "bitsandbytes-int8": Format(bitsandbytes8, BNB, "Q8_F", exact=False),  # scales of 24 bits
    "packed-4": Format(packed(4, 64, symmetric=True), compressed(PACKED, 4, 64), "Q4_0"),
    "packed-4-asymmetric": Format(packed(4, 128, symmetric=False), compressed(PACKED, 4, 128), "Q4_Z"),
    "packed-4-act-order": Format(packed(4, 32, symmetric=True, act_order=True), compressed(PACKED, 4, 32), "Q4_0"),
    "packed-8": Format(packed(8, 64, symmetric=True), compressed(PACKED, 8, 64), "Q8_0"),
    "hqq-4": Format(hqq(4, 64), HQQ, "Q4_Z"),
    "hqq-3": Format(hqq(3, 32), HQQ, "Q4_Z"),
    "hqq-2": Format(hqq(2, 64), HQQ, "Q4_Z"),
    "hqq-4-outputs": Format(hqq(4, 64, axis=0), HQQ, "F16", exact=False),
    "hqq-3-outputs": Format(hqq(3, 32, axis=0), HQQ, "F16", exact=False),
    "hqq-8": Format(hqq(8, 128), HQQ, "Q8_M", exact=False),  # offsets of 24 bits
    "eetq": Format(eetq, {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": None}, "Q8_0"),
    "w8a8": Format(int8_channels, compressed("int-quantized"), "Q8_0"),
    "fp8-outputs": Format(fp8("outputs"), compressed("float-quantized"), "FP8", exact=False),
    "fp8-tensor": Format(fp8("tensor"), {"quant_method": "fp8"}, "FP8", exact=False),
    "fbgemm": Format(fbgemm, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8", exact=False),
    "fp8-blocks": Format(fp8("blocks", "weight_scale_inv"), {"quant_method": "fp8"}, "FP8", exact=False),
}


def model_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    norms = ["model.norm", *(f"model.layers.{i}.{n}" for i in range(LAYERS) for n in NORMS)]
    return {name: rng.normal(0, 0.08, shape).astype(np.float32) for name, shape in tensors.items()} | {
        f"{norm}.weight": rng.normal(1, 0.1, HIDDEN).astype(np.float32) for norm in norms
    }


NORMS = ("input_layernorm", "post_attention_layernorm")


@cache
def packed_model(name: str) -> tuple[Tensors, dict[str, np.ndarray]]:
    """The tensors of a checkpoint, and the values of its weights."""
    format, values, stored = FORMATS[name], {}, {}
    for weight, w in model_tensors(np.random.default_rng(5)).items():
        if "proj" not in weight:
            stored[weight], values[weight] = torch.from_numpy(w), w
            continue
        tensors, values[weight] = format.pack(w)
        module = weight.removesuffix(".weight")
        stored |= {f"{module}.{part}": tensor.clone().contiguous() for part, tensor in tensors.items()}
    return stored, values


def write_model(path: Path, name: str, settings: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A directory in the format, with `settings` besides its own, and the values of all its weights."""
    stored, values = packed_model(name)
    path.mkdir(exist_ok=True)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": FORMATS[name].config | (settings or {})})
    )
    return values
