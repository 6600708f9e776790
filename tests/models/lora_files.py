"""Tiny random models with adapters that PEFT makes, and what the models are with an adapter merged into them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from models.checking import NUM_GREEDY, PROMPT
from models.lora_steps import NONE


@dataclass
class Expected:
    prefill: np.ndarray  # [len(PROMPT), vocab]
    generated: list[int]  # PROMPT and NUM_GREEDY tokens


@dataclass
class Adapted:
    path: Path  # the model
    adapters: dict[str, Path]
    expected: dict[str, Expected]  # by adapter, and for NONE


def adapter(model: PreTrainedModel, path: Path, seed: int, **options: Any) -> PeftModel:
    """Saved there. Both matrices are random: PEFT begins with a B of zeros, which would adapt nothing."""
    torch.manual_seed(seed)
    adapted = get_peft_model(deepcopy(model), LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    adapted.save_pretrained(path)
    return adapted.eval()


def adapted_model(model: PreTrainedModel, folder: Path, adapters: Mapping[str, Mapping[str, Any]]) -> Adapted:
    model.save_pretrained(folder / "model")
    found = Adapted(folder / "model", {}, {NONE: ask(model)})
    for seed, (name, options) in enumerate(adapters.items(), start=1):
        found.adapters[name] = folder / name
        merged = adapter(model, folder / name, seed, **options).merge_and_unload()
        found.expected[name] = ask(merged)
    return found


@torch.inference_mode()
def ask(model: PreTrainedModel) -> Expected:
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_GREEDY, do_sample=False, pad_token_id=0)
    logits = model(ids[:, : len(PROMPT)], use_cache=False).logits[0].numpy()
    return Expected(logits, ids[0].tolist())
