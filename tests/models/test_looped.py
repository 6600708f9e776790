"""Models whose layers run several times, against Llama of transformers with its layers repeated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    rewritten,
)
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

STORED, LOOPS = 2, 3
REPEATED = {"num_hidden_layers": STORED * LOOPS, "initializer_range": 0.15}
CASES: Cases = {"llama": (LlamaConfig, REPEATED | {"head_dim": 24})}

checkpoints = checkpoints_of(CASES)
Checkpoints = Callable[[str], Theirs]


def repeated(path: Path, norm: bool) -> Any:
    """The model with the weights of its first layers in all, and its last norm between two runs of them."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    layers = model.model.layers
    for index in range(STORED, STORED * LOOPS):
        layers[index].load_state_dict(layers[index - STORED].state_dict())
        if norm and index % STORED == 0:
            layers[index].register_forward_pre_hook(
                lambda layer, args, kwargs: ((model.model.norm(args[0]), *args[1:]), kwargs), with_kwargs=True
            )
    return model


def looped(theirs: Theirs, folder: Path, values: dict[str, Any]) -> Theirs:
    """The first layers alone."""
    tensors = {
        name: data
        for name, data in load_file(theirs.path / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < STORED
    }
    return rewritten(theirs, folder, values | {"num_hidden_layers": STORED}, tensors, ())


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="NanbeigeForCausalLM")
def test_nanbeige_is_llama_whose_layers_run_again(
    checkpoints: Checkpoints, backend: str, name: str, skip: bool, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "looped").mkdir()
    theirs = ask_transformers(repeated(checkpoints(name).path, norm=not skip), tmp_path / "whole")
    values = {"architectures": ["NanbeigeForCausalLM"], "num_loops": LOOPS, "skip_loop_final_norm": skip}
    check_against_transformers(backend, looped(theirs, tmp_path / "looped", values))


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.verifies("gguf", backend="torch", architecture="NanbeigeForCausalLM")
def test_nanbeige_in_a_gguf_file(checkpoints: Checkpoints, name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    from models.gguf_latest_writing import write_nanbeige

    (tmp_path / "whole").mkdir()
    (tmp_path / "looped").mkdir()
    theirs = ask_transformers(repeated(checkpoints(name).path, norm=True), tmp_path / "whole")
    ours = looped(theirs, tmp_path / "looped", {"architectures": ["NanbeigeForCausalLM"], "num_loops": LOOPS})
    path = write_nanbeige(ours.path, tmp_path / "model.gguf")
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="OuroForCausalLM")
def test_ouro_norms_what_its_blocks_add_as_well(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "looped").mkdir()
    model = repeated(checkpoints(name).path, norm=True)
    torch.manual_seed(2)
    norms = [torch.empty(2, TINY["hidden_size"]).normal_(0.5, 0.5) for _ in range(STORED)]
    for index, layer in enumerate(model.model.layers):
        layer.forward = ouro_layer(layer, *norms[index % STORED])
    theirs = ask_transformers(model, tmp_path / "whole")
    values = {"architectures": ["OuroForCausalLM"], "total_ut_steps": LOOPS, "early_exit_threshold": 1.0}
    ours = looped(theirs, tmp_path / "looped", values)
    tensors = load_file(ours.path / "model.safetensors")
    for index, weights in enumerate(norms):
        for part, weight in zip(("input_layernorm_2", "post_attention_layernorm_2"), weights, strict=True):
            tensors[f"model.layers.{index}.{part}.weight"] = weight.numpy()
    tensors |= {"model.early_exit_gate.weight": np.zeros((1, 4), np.float32)}
    check_against_transformers(backend, rewritten(ours, ours.path, {}, tensors, ()))


def ouro_layer(layer: Any, after_attention: torch.Tensor, after_mlp: torch.Tensor) -> Any:
    eps = layer.input_layernorm.variance_epsilon

    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        x = hidden_states + F.rms_norm(attended, attended.shape[-1:], after_attention, eps)
        fed = layer.mlp(layer.post_attention_layernorm(x))
        return x + F.rms_norm(fed, fed.shape[-1:], after_mlp, eps)

    return forward


@pytest.mark.parametrize(
    ("architecture", "values", "error", "message"),
    [
        ("NanbeigeForCausalLM", {"num_loops": 0}, BadCheckpoint, "num_loops is 0, not 1 to 64"),
        ("NanbeigeForCausalLM", {"loop_share_kv": True}, Unsupported, "loop_share_kv is True"),
        ("NanbeigeForCausalLM", {"loop_middle_layers": [1]}, Unsupported, r"loop_middle_layers is \[1\]"),
        ("OuroForCausalLM", {"early_exit_threshold": 0.5}, Unsupported, "early_exit_threshold is 0.5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, values: dict[str, Any], error: type[QuireError], message: str
) -> None:
    given = TINY | {"architectures": [architecture], "hidden_act": "silu"} | values
    with pytest.raises(error, match=message):
        family(architecture).config(CheckpointConfig(Path("config.json"), given))
