"""Adapters as PEFT saves them, written and merged without it: for machines that have none."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

ALPHA = 16
PREFIX = "base_model.model."


def write_adapter(model: PreTrainedModel, folder: Path, ranks: Mapping[str, int], seed: int) -> Path:
    """`ranks` by the last part of a layer's name: q_proj, down_proj, ..."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if rank := ranks.get(name.rpartition(".")[2]):
            outputs, inputs = layer.weight.shape
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{PREFIX}{name}.lora_{side}.weight"] = random.normal(0, 0.15, shape).astype(np.float32)
    config = {"peft_type": "LORA", "r": max(ranks.values()), "lora_alpha": ALPHA, "rank_pattern": dict(ranks)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.inference_mode()
def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Into the model itself."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            layer = model.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_A.weight"))
            layer.weight += torch.from_numpy(ALPHA / len(down) * up @ down)
    return model
