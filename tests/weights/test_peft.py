"""Adapters as PEFT saves them: what is read of them, and everything that is refused, by name."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.peft import read_adapter

PREFIX = "base_model.model.model.layers.0.self_attn"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def tensors(rank=4):
    rng = np.random.default_rng(0)
    return {
        f"{PREFIX}.q_proj.lora_A.weight": rng.normal(size=(rank, 6)).astype(np.float32),
        f"{PREFIX}.q_proj.lora_B.weight": rng.normal(size=(10, rank)).astype(np.float32),
    }


@pytest.fixture
def write(tmp_path):
    def write(config=None, stored=None):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        save_file(tensors() if stored is None else stored, tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 1, "k_proj": 100}}, 0.25),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj$": 12}}, 3.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 12}}, 2.0),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.1, "fan_in_fan_out": True}, 2.0),
    ],
)
def test_what_is_there_is_read(write, config, scale):
    path = write(config)
    (layer, found), *others = read_adapter(path).items()
    assert layer == "model.layers.0.self_attn.q_proj" and not others
    assert (found.rank, found.scale) == (4, scale)
    for tensor, stored in zip((found.a, found.b), tensors().values(), strict=True):
        assert np.array_equal(dequantize(tensor).reshape(tensor.shape), stored)


def test_ranks_may_differ_where_the_configuration_says_so(write):
    assert read_adapter(write({"rank_pattern": {"q_proj": 3}}, tensors(3)))["model.layers.0.self_attn.q_proj"].rank == 3
    with pytest.raises(BadCheckpoint, match=r"q_proj.lora_A.weight' has rank 3, and adapter_config.json says 4"):
        read_adapter(write({}, tensors(3)))


def test_files_of_torch_save_are_read_without_pickle(write):
    path = write()
    expected = read_adapter(path)
    torch.save({name: torch.tensor(array) for name, array in tensors().items()}, path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    found = read_adapter(path)
    assert found.keys() == expected.keys()
    for name, added in found.items():
        assert np.array_equal(added.b.data, expected[name].b.data)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"alpha_pattern": {".*(a|a)*": 4}}, "alpha_pattern has"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern gives 'q_proj' as -1"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"r": None}, "r is missing"),
    ],
)
def test_settings_that_mean_something_else_are_refused_by_name(write, config, message):
    with pytest.raises(QuireError, match=message):
        read_adapter(write(config))


def test_other_tensors_are_listed(write):
    more = {f"{PREFIX}.q_proj.lora_magnitude_vector": np.ones(10, np.float32), "wte.lora_embedding_A": np.ones((2, 2))}
    with pytest.raises(Unsupported, match=r"lora_magnitude_vector, wte\.lora_embedding_A"):
        read_adapter(write({}, tensors() | more))


def test_damaged_adapters_say_what_is_wrong(write, tmp_path):
    with pytest.raises(BadCheckpoint, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
    a, b = tensors().items()
    with pytest.raises(BadCheckpoint, match="q_proj has only lora_A"):
        read_adapter(write({}, dict([a])))
    with pytest.raises(BadCheckpoint, match="the ranks differ"):
        read_adapter(write({}, dict([a, (b[0], b[1][:, :3].copy())])))
    with pytest.raises(BadCheckpoint, match="a matrix is expected"):
        read_adapter(write({}, dict([a, (b[0], b[1][0].copy())])))
    with pytest.raises(BadCheckpoint, match="has no tensors"):
        read_adapter(write({}, {}))
    (write() / "adapter_model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"neither adapter_model.safetensors nor adapter_model.bin"):
        read_adapter(tmp_path)
