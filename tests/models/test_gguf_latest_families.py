"""GGUF files of architectures of 2026, of the text of models that read images, and of a few under another name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    Cohere2MoeConfig,
    HunYuanDenseV1Config,
    HYV3Config,
    KimiLinearConfig,
    LlamaConfig,
    MellumConfig,
)

from models.checking import TINY, Cases, random_model
from models.gguf_checking import check_file
from models.gguf_latest_writing import write_granite_swa, write_kimi, write_latest, write_minimax_m3
from models.gguf_writing import write_gguf
from models.test_delta_nets import CALM, KIMI
from models.test_newer_families import BOTH_ROPES, EXPERTS, HALF_WINDOWS, ONE_DENSE
from models.test_newer_families import CASES as NEWER
from models.test_text_parts import CASES as TEXT_PARTS
from quire.weights.checkpoint import open_checkpoint

ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
COHERE = HALF_WINDOWS | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
CASES: Cases = {
    "mellum": (MellumConfig, EXPERTS | HALF_WINDOWS | {"head_dim": 24, "rope_parameters": BOTH_ROPES}),
    **{name: NEWER[name] for name in ("granite-swa", "granite-moe-swa")},
    "hy-v3": (HYV3Config, EXPERTS | ONE_DENSE | {"head_dim": 24, "router_scaling_factor": 1.5}),
    "cohere2-moe": (
        Cohere2MoeConfig,
        COHERE | {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"], "rms_norm_eps": None}
        | {"prefix_dense_intermediate_size": 80},
    ),
    "cohere2-moe-sigmoid": (
        Cohere2MoeConfig,
        COHERE | {"rms_norm_eps": 1e-6, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
}  # fmt: skip


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", [name for name in CASES if "granite" not in name])
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    config, options = CASES[name]
    model = random_model(config(**TINY | options), seed=sum(map(ord, name)))
    check_file(model, tmp_path, write_latest)


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", ["granite-swa", "granite-moe-swa"])
def test_granite_with_windows(name: str, tmp_path: Path) -> None:
    """The flags of a file say which layers rotate."""
    config, options = CASES[name]
    check_file(random_model(config(**TINY | options), seed=3), tmp_path, write_granite_swa)


@pytest.mark.verifies("gguf", backend="torch", architecture="MiniMaxM3VLForCausalLM")
def test_minimax_m3(tmp_path: Path) -> None:
    config, options = TEXT_PARTS["minimax-m3"]
    text = options["text_config"] | {"shared_intermediate_size": 96, "rotary_dim": 12}
    check_file(random_model(config(**options | {"text_config": text}), seed=3), tmp_path, write_minimax_m3)


@pytest.mark.verifies("gguf", architecture="KimiLinearForCausalLM")
@pytest.mark.parametrize("name", ["kimi-linear"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_kimi_linear(name: str, backend: str, tmp_path: Path) -> None:
    model = random_model(KimiLinearConfig(**TINY | KIMI | CALM | {"linear_num_heads": 4}), seed=5)
    check_file(model, tmp_path, write_kimi, backend=backend)


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "paddleocr": (LlamaConfig, {}),
    "hunyuan_vl": (HunYuanDenseV1Config, {"head_dim": 24, "rope_parameters": ALPHA}),
}


@pytest.mark.parametrize("called", SAME)
def test_the_text_of_models_that_read_images(called: str, tmp_path: Path) -> None:
    config, options = SAME[called]
    model = random_model(config(**TINY | options), seed=2)
    check_file(model, tmp_path, called=called)


def test_llama_embed_is_llama_that_sees_the_tokens_after_a_token(tmp_path: Path) -> None:
    random_model(LlamaConfig(**TINY), seed=2).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(write_gguf(tmp_path, tmp_path / "model.gguf", called="llama-embed"))
    assert checkpoint.config.architecture == "LlamaBidirectionalModel"
    stored = open_checkpoint(tmp_path)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        ours, theirs = (each.tensor(name) for each in (checkpoint, stored))
        order = np.arange(len(theirs.data)) if ours.row_order is None else ours.row_order
        assert np.array_equal(ours.data[order], theirs.data.reshape(ours.data.shape))
