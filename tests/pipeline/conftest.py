"""A model that can be divided into four stages."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def deep_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` with four layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep-llama")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    torch.manual_seed(11)
    config = LlamaConfig.from_pretrained(tiny_model, num_hidden_layers=4)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
