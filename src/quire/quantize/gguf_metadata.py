"""The keys of a GGUF file for a checkpoint in Hugging Face's layout: the tables of the reader, the other way round.

What the reader makes of the keys is compared with config.json: a setting that GGUF cannot say is refused by name."""

from array import array
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.models.registry import family, read_model_config
from quire.models.rope import RopeSpec, frequencies
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.names import ARCHITECTURES, translate_config

WITH_EXPERTS = " with experts"
PREFERRED = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}  # several rows have these names
OTHER_KEYS = {  # of config.json, where families name a number otherwise
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
}
NOT_COMPARED = {"architecture", "params"}  # of rope, frequencies are compared
TRAINED_CONTEXTS = (8192, *(1 << bits for bits in range(10, 20) if bits != 13))  # Llama 3's own first
HIGH_FACTORS = (4.0, 2.0, 8.0, 16.0, 32.0)
ROPE_TYPES = {"linear", "yarn"}


def gguf_architecture(config: CheckpointConfig) -> tuple[str, GGUFArchitecture]:
    """-> `general.architecture` and its row."""
    name = config.architecture
    found = [key for key, row in ARCHITECTURES.items() if row.name == name]
    key = PREFERRED.get(name) or (found[0] if found else None)
    if key is None:
        raise Unsupported(f"a `{name}` has no architecture in GGUF", "name a folder, and a method such as W4A16 or FP8")
    return key.removesuffix(WITH_EXPERTS), ARCHITECTURES[key]


def metadata_of(config: CheckpointConfig, arch: str, row: GGUFArchitecture) -> dict[str, Any]:
    """The keys of the model itself, without the tokenizer's."""
    metadata: dict[str, Any] = {"general.architecture": arch, "general.type": "model"}
    for key, gguf_key in row.keys.items():
        if (value := _value(config, key)) is not None:
            metadata[f"{arch}.{gguf_key}"] = float(value) if _is_real(gguf_key) else value
    if (further := f"{arch}.nextn_predict_layers") in metadata:
        metadata[f"{arch}.block_count"] += metadata[further]
    model = read_model_config(family(config.architecture), config)
    head_dim = getattr(model, "head_dim", None)
    if head_dim is not None:
        metadata[f"{arch}.attention.key_length"] = metadata[f"{arch}.attention.value_length"] = head_dim
    rope = getattr(model, "rope", None)
    if rope is not None:
        metadata[f"{arch}.rope.dimension_count"] = rope.rotary_dim
    metadata |= _rope_scaling(config, arch)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds and "sliding_window_pattern" in row.keys:
        metadata[f"{arch}.attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    metadata[f"{arch}.vocab_size"] = config.int("vocab_size")
    return metadata


def rope_freqs(config: CheckpointConfig) -> NDArray[np.float32] | None:
    """The tensor that stands for Llama 3's rope scaling."""
    if config.dict("rope_scaling", {}).get("rope_type", config.dict("rope_scaling", {}).get("type")) != "llama3":
        return None
    plain = config.with_values({"rope_scaling": None})
    scaled, unscaled = (
        frequencies(read_model_config(family(config.architecture), each).rope, 0)[0]  # type: ignore[attr-defined]
        for each in (config, plain)
    )
    return np.asarray(unscaled / scaled, np.float32)


def llama3_scaling(config: CheckpointConfig, factors: NDArray[np.float32]) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json that the tensor stands for; None: none of Llama 3's. Contexts and the factors
    of low and high frequencies are told by their ratios alone, so the low one is 1."""
    for original, high in product(TRAINED_CONTEXTS, HIGH_FACTORS):
        scaling = {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        made = rope_freqs(config.with_values({"rope_scaling": scaling}))
        if made is not None and made.shape == factors.shape and np.allclose(made, factors, rtol=1e-4):
            return scaling
    return None


def check_metadata(
    config: CheckpointConfig, row: GGUFArchitecture, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Raises unless the reader makes the same model of the keys."""
    as_read = {key: array("B", value) if isinstance(value, list) else value for key, value in metadata.items()}
    values = translate_config(row.of_file(tensors), CheckpointConfig(Path("the new file"), as_read), tensors)
    values["vocab_size"] = config.int("vocab_size")
    ours = read_model_config(family(config.architecture), config.with_values(_without_rope(config)))
    theirs = CheckpointConfig(config.source, {**values, "architectures": [config.architecture]})
    read = read_model_config(family(config.architecture), theirs)
    if differences := _differences(ours, read):
        name, mine, other = differences[0]
        raise Unsupported(
            f"{config.source}: {name} is {mine!r}, and a GGUF file would say {other!r}",
            "choose a format of Hugging Face's layout",
        )


def _without_rope(config: CheckpointConfig) -> dict[str, Any]:
    """Llama 3's scaling becomes a tensor."""
    return {"rope_scaling": None} if rope_freqs(config) is not None else {}


def _differences(ours: Any, read: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    different = []
    if isinstance(ours, RopeSpec) and not np.allclose(frequencies(ours, 0)[0], frequencies(read, 0)[0], rtol=1e-5):
        return [(f"{prefix}params", ours.params, read.params)]
    for field in fields(ours):
        mine, other = getattr(ours, field.name), getattr(read, field.name)
        if field.name in NOT_COMPARED:
            continue
        if is_dataclass(mine) and is_dataclass(other):
            different += _differences(mine, other, f"{prefix}{field.name}.")
        elif not _same(mine, other):
            different.append((prefix + field.name, mine, other))
    return different


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return bool(np.isclose(mine, other, rtol=1e-6, atol=0))  # the file has fp32
    return bool(mine == other) if not isinstance(mine, np.ndarray) else bool(np.array_equal(mine, other))


def _value(config: CheckpointConfig, key: str) -> Any:
    for name in (key, *OTHER_KEYS.get(key, ())):
        outer, _, inner = name.rpartition(".")
        section = config.section(outer) if outer else config
        value = section.get(inner)
        if isinstance(value, bool | int | float | str):
            return value
    return None


def _is_real(gguf_key: str) -> bool:
    reals = ("epsilon", "freq_base", "scale", "softcapping", "freq_base_swa", "multiplier", "weights_scale")
    return gguf_key.endswith(reals) or gguf_key.startswith("xielu")


def _rope_scaling(config: CheckpointConfig, arch: str) -> dict[str, Any]:
    scaling = config.section("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "llama3"):
        return {}
    if kind not in ROPE_TYPES:
        raise Unsupported(f"{config.source}: rope_scaling is {kind!r}", "choose a format of Hugging Face's layout")
    prefix = f"{arch}.rope.scaling."
    keys: dict[str, Any] = {f"{prefix}type": kind, f"{prefix}factor": scaling.float("factor")}
    if (original := scaling.get("original_max_position_embeddings")) is not None:
        keys[f"{prefix}original_context_length"] = original
    for ours in ("beta_fast", "beta_slow"):
        if kind == "yarn" and ours in scaling:
            keys[f"{prefix}yarn_{ours}"] = scaling.float(ours)
    return keys
