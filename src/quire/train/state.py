"""Where a training stands: weights, the optimizer's moments and the position, in one safetensors file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def save_state(path: Path, key: str, position: dict[str, int], weights: dict[str, Tensor], optimizer: Any) -> None:
    """Replaces the file at once: a process that is killed leaves the one before."""
    tensors = {f"weight/{name}": weight.detach() for name, weight in weights.items()}
    for moment in MOMENTS:
        tensors |= {
            f"{moment}/{name}": optimizer.state[weight][moment]
            for name, weight in weights.items()
            if weight in optimizer.state
        }
    new = path.with_suffix(".new")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, new, {"position": json.dumps({"key": key, **position})})
    new.replace(path)


def load_state(path: Path, key: str, weights: dict[str, Tensor], optimizer: Any) -> dict[str, int] | None:
    """The position, with weights and moments as they were; None where there is none with this key."""
    try:
        with safe_open(path, "pt") as file:
            position = json.loads((file.metadata() or {})["position"])
            if position.pop("key") != key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[f"weight/{name}"])
            if all(f"{moment}/{name}" in tensors for moment in MOMENTS):
                moments = {moment: tensors[f"{moment}/{name}"].to(weight.device) for moment in MOMENTS}
                optimizer.state[weight] = {"step": torch.tensor(float(position["step"])), **moments}
    return {name: int(value) for name, value in position.items()}
