"""GGUF files of older families, and of decoders that embed or score, as llama.cpp's converter writes them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import BitNetConfig, LlamaConfig, MiniCPM3Config

from models import test_bidirectional, test_older_families
from models.checking import PROMPT, Theirs, assert_close, checkpoints_of, compute, make_ops
from models.gguf_writing import stacked
from models.test_bidirectional import TEXTS, load
from models.test_older_families import LONGROPE, deepseek_1, fused  # noqa: F401  (a fixture)
from quire.runtime.score_head import classifier_head
from quire.weights.gguf.names import ARCHITECTURES
from weights.gguf_files import finish, interleave

MINICPM3_4B = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_parameters": LONGROPE}
CASES = {
    **test_older_families.CASES,
    "bitnet": (
        BitNetConfig,
        {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "llama-plain": (LlamaConfig, {"num_key_value_heads": 4}),
    "minicpm3-file": (MiniCPM3Config, test_older_families.MLA | MINICPM3_4B),
}
checkpoints = checkpoints_of(CASES)
encoders = test_bidirectional.checkpoints

SIZES = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 128,
    "feed_forward_length": 112,
    "attention.head_count": 4,
    "attention.head_count_kv": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40, "expert_shared_count": 2}
MLA = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "rope.dimension_count": 16,
}
# Name of the file's architecture -> case, and metadata on top of SIZES.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "orion": ("stablelm", {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": 2}),
    "qwen": ("qwen2", {"feed_forward_length": 224}),
    "bitnet": ("bitnet", {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": 2}),
    "xverse": ("llama-plain", {}),
    "dbrx": (
        "dbrx",
        {
            "embedding_length": 64,
            "feed_forward_length": 48,
            "attention.head_count_kv": 2,
            "attention.clamp_kqv": 2.0,
            "rope.freq_base": 5000.0,
            "expert_count": 5,
            "expert_used_count": 2,
        },
    ),
    "minicpm3": ("minicpm3-file", MLA),
}


def write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """`tensors` have Hugging Face's names, or GGUF's."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{key}", value)
    row = ARCHITECTURES[arch]
    own = {f"{row.layers}.{{}}.{name.replace('.{}', '')}": part for part, name in row.layer_tensors.items()}
    outer = {name: part for part, name in row.tensors.items()}
    for name, data in stacked(tensors):
        name = name.replace("layers.", "model.layers.") if name.startswith("layers.") else name
        match = re.fullmatch(r"(.*layers?)\.(\d+)\.(.*)\.(weight|bias)", name)
        part = own.get(f"{match[1]}.{{}}.{match[3]}") if match else None
        stored = outer.get(name) or (f"blk.{match[2]}.{part}.{match[4]}" if match and part else name)
        writer.add_tensor(stored, np.ascontiguousarray(data, np.float32))
    return finish(writer, path)


def with_dbrx_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under Llama's names, with a stack of matrices as the converter makes it: that of the down projection turned."""
    from quire.models.dbrx import FAMILY

    renamed = {}
    for name, data in tensors.items():
        for old, new in FAMILY.renamed.items():
            name = name.replace(old, new)
        if ".experts.mlp." in name:
            stack = data.reshape(5, 48, 64)
            layer, part = re.search(r"layers\.(\d+)\..*\.(\w\d)$", name).groups()  # type: ignore[union-attr]
            gguf_part = {"w1": "ffn_gate_exps", "v1": "ffn_up_exps", "w2": "ffn_down_exps"}[part]
            renamed[f"blk.{layer}.{gguf_part}.weight"] = stack.swapaxes(1, 2) if part == "w2" else stack
        else:
            renamed[name] = data
    return renamed


CHANGES: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "qwen": fused,
    "dbrx": with_dbrx_experts,
    "xverse": lambda tensors: {
        name: interleave(data, 4) if ".q_proj." in name or ".k_proj." in name else data
        for name, data in tensors.items()
    },
}
SUBJECTS = {"xverse": "LlamaForCausalLM"} | {arch: ARCHITECTURES[arch].name for arch in FILES if arch != "xverse"}


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(arch, case, marks=pytest.mark.verifies("gguf", backend="torch", architecture=SUBJECTS[arch]))
        for arch, (case, _) in FILES.items()
    ],
)
def test_a_file_computes_what_its_checkpoint_does(
    checkpoints: Callable[[str], Theirs], arch: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = load_file(theirs.path / "model.safetensors")
    tensors = CHANGES[arch](tensors) if arch in CHANGES else tensors
    if arch == "minicpm3":
        tensors |= {f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"]) for kind in ("short", "long")}
    path = write(tmp_path / "model.gguf", arch, SIZES | FILES[arch][1], tensors)
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.verifies("gguf", backend="torch", architecture="DeepseekForCausalLM")
@pytest.mark.parametrize(("name", "called"), [("deepseek-1", "deepseek"), ("deepseek-ocr", "deepseek2-ocr")])
def test_deepseek_1(deepseek_1: Theirs, name: str, called: str, tmp_path: Path) -> None:  # noqa: F811
    """And the text of DeepSeek-OCR, whose queries and keys are as they were."""
    tensors = load_file(deepseek_1.path / "model.safetensors")
    for key, data in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])
        tensors[key] = interleave(data, heads) if heads and called == "deepseek" else data
    metadata = SIZES | EXPERTS | {"attention.head_count_kv": 2, "leading_dense_block_count": 1}
    path = write(tmp_path / "model.gguf", called, metadata | {"expert_weights_scale": 1.0}, tensors)
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), deepseek_1.prefill)


def test_embedding_gemma(encoders: Callable[[str], tuple[Path, list[np.ndarray]]], tmp_path: Path) -> None:
    path, theirs = encoders("embedding-gemma")
    tensors = load_file(path / "model.safetensors")
    stored = {f"model.{name}": data + 1 if "norm" in name else data for name, data in tensors.items()}
    metadata = SIZES | {
        "block_count": 3,
        "context_length": 40,
        "embedding_length": 64,
        "attention.head_count_kv": 2,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 12,
        "attention.causal": False,
        "rope.freq_base": 1_000_000.0,
        "attention.sliding_window_pattern": 2,
    }
    *_, runner = load(write(tmp_path / "model.gguf", "gemma-embedding", metadata, stored), "torch")
    check_rows(runner.run(TEXTS, "all", np.copy), theirs)


@pytest.mark.verifies("gguf", backend="torch", architecture="EuroBertModel")
@pytest.mark.parametrize("name", ["eurobert"])
def test_eurobert(encoders: Callable[[str], tuple[Path, list[np.ndarray]]], name: str, tmp_path: Path) -> None:
    path, theirs = encoders(name)
    stored = {f"model.{key}": data for key, data in load_file(path / "model.safetensors").items()}
    metadata = SIZES | {"embedding_length": 64, "context_length": 40, "attention.head_count_kv": 2}
    metadata |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.causal": False}
    *_, runner = load(write(tmp_path / "model.gguf", "eurobert", metadata, stored), "torch")
    check_rows(runner.run(TEXTS, "all", np.copy), theirs)


def test_qwen3_reranker_has_two_rows_of_its_head(
    encoders: Callable[[str], tuple[Path, list[np.ndarray]]], tmp_path: Path
) -> None:
    """That of no is zero here, so that the score is that of a classifier with one label."""
    path, theirs = encoders("score-qwen3")
    tensors = load_file(path / "model.safetensors")
    score = tensors.pop("score.weight")
    tensors["cls.output.weight"] = np.concatenate([score, np.zeros_like(score)])
    metadata = SIZES | {"embedding_length": 64, "context_length": 40, "attention.head_count_kv": 2, "pooling_type": 4}
    metadata |= {"attention.key_length": 16, "attention.value_length": 16}
    checkpoint, config, runner = load(write(tmp_path / "model.gguf", "qwen3", metadata, tensors), "torch")
    head = classifier_head(checkpoint, config)
    check_rows(runner.run(TEXTS, "last", lambda rows: rows[:1] @ head.T), theirs)


def check_rows(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
