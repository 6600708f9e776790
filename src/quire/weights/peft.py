"""A LoRA adapter as PEFT saves it: adapter_config.json, and the matrices in adapter_model.safetensors or .bin.

Tensors are read by name and shape. A setting by which the adapter is not scale * B @ A, added to linear layers of the
published model, is refused by name and value."""

import re
from math import sqrt
from pathlib import Path
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.tensors import LoraDelta, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_json
from quire.weights.raw import RawTensors, TensorFile
from quire.weights.safetensors import SafetensorsFile

CONFIG = "adapter_config.json"
MAX_LISTED = 8  # names spelled out in an error

# Settings -> the values of a plain LoRA adapter. The first is PEFT's default.
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False, {}),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
# Initializations that change the weights of the model: the adapter belongs to a model that was not published.
INITS_THAT_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_PATTERN = re.compile(r"\^?(?P<name>[\w.]+)\$?", re.ASCII)


def read_adapter(directory: Path) -> dict[str, LoraDelta]:
    """Linear layer -> its low-rank update, by the names of the model it was trained on."""
    if not (directory / CONFIG).is_file():
        raise BadCheckpoint(f"{directory} has no {CONFIG}", "name a directory in which PEFT saved an adapter")
    config = CheckpointConfig(directory / CONFIG, read_json(directory / CONFIG))
    _expect_plain_lora(config)
    raw = _tensors(directory)
    return {layer: _low_rank(config, raw, layer, *names) for layer, names in _pairs(raw).items()}


def _expect_plain_lora(config: CheckpointConfig) -> None:
    for key, values in PLAIN_LORA.items():
        config.expect(key, *values)
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(INITS_THAT_CHANGE_THE_MODEL):
        raise Unsupported(
            f"{config.source}: init_lora_weights is {init!r}, which changes the model's own matrices",
            "save it with path_initial_model_for_weight_conversion, which converts it to a plain adapter",
        )


def _tensors(directory: Path) -> RawTensors:
    file: TensorFile
    if (path := directory / "adapter_model.safetensors").exists():
        file = SafetensorsFile(path)
    elif (path := directory / "adapter_model.bin").exists():
        from quire.weights.pytorch import PytorchFile

        file = PytorchFile(path)
    else:
        raise BadCheckpoint(
            f"{directory} has neither adapter_model.safetensors nor adapter_model.bin",
            "name the directory that PEFT's save_pretrained has written",
        )
    return RawTensors(directory, dict.fromkeys(file.entries, file))


def _pairs(raw: RawTensors) -> dict[str, tuple[str, str]]:
    """Linear layer -> the names of its A and its B."""
    pairs: dict[str, dict[str, str]] = {}
    others = []
    for name in raw.names():
        if match := _TENSOR.fullmatch(name):
            pairs.setdefault(match["layer"], {})[match["side"]] = name
        else:
            others.append(name)
    if others:
        raise Unsupported(
            f"{raw.path} has tensors beside lora_A and lora_B of linear layers: {listed(others)}",
            "embeddings, magnitudes (DoRA), biases and whole modules are not supported",
        )
    if not pairs:
        raise BadCheckpoint(f"{raw.path} has no tensors")
    if alone := [f"{layer} has only lora_{next(iter(sides))}" for layer, sides in pairs.items() if len(sides) < 2]:
        raise BadCheckpoint(f"{raw.path}: {listed(alone)}")
    return {layer: (sides["A"], sides["B"]) for layer, sides in pairs.items()}


def _low_rank(config: CheckpointConfig, raw: RawTensors, layer: str, a_name: str, b_name: str) -> LoraDelta:
    a, b = _matrix(raw, a_name), _matrix(raw, b_name)
    rank = a.shape[0]
    if b.shape[1] != rank:
        raise raw.bad(b_name, f"is {[*b.shape]}, and lora_A {[*a.shape]}: the ranks differ")
    expected = _by_pattern(config, "rank_pattern", layer, config.int("r"))
    if expected != rank:
        raise raw.bad(a_name, f"has rank {rank}, and {config.source.name} says {expected:g}")
    alpha = _by_pattern(config, "alpha_pattern", layer, config.float("lora_alpha"))
    return LoraDelta(a, b, alpha / (sqrt(rank) if config.bool("use_rslora", False) else rank))


def _matrix(raw: RawTensors, name: str) -> StoredTensor:
    if len(raw.shape(name)) != 2 or 0 in raw.shape(name):
        raise raw.bad(name, f"is {[*raw.shape(name)]}, and a matrix is expected")
    return raw.tensor(name)


def _by_pattern(config: CheckpointConfig, key: str, layer: str, default: float) -> float:
    """The value of the pattern that is the layer's name, or its end."""
    for pattern, value in config.dict(key, {}).items():
        match = _PATTERN.fullmatch(pattern)
        if match is None:
            raise Unsupported(
                f"{config.source}: {key} has {pattern!r}", "name layers in full, or by what their names end with"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise BadCheckpoint(f"{config.source}: {key} gives {pattern!r} as {value!r}")
        if layer == match["name"] or layer.endswith("." + match["name"]):
            return value
    return default


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(sorted(names)[:MAX_LISTED]) + more
