"""A directory in Hugging Face's layout: its configuration. Its tensors are in huggingface_checkpoint.py.

Standard library only: the HTTP process reads end tokens from here."""

import json
from pathlib import Path
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.weights.config import CheckpointConfig

MAX_JSON_BYTES = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} where there is no such file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise BadCheckpoint(f"{path} has {size} bytes, too many for a JSON file of a checkpoint")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} does not hold a JSON object")
    return value


def read_config(directory: Path) -> CheckpointConfig:
    path = directory / "config.json"
    values = read_json(path)
    if not values:
        raise BadCheckpoint(
            f"{directory} has no config.json", "name a .gguf file or a directory in Hugging Face's layout"
        )
    return CheckpointConfig(path, _older_rope_keys(values), read_json(directory / "generation_config.json"))


def _older_rope_keys(values: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5 -> `rope_theta` and `rope_scaling` of earlier versions, which are our keys.

    The theta of layers with a window, where it differs, becomes `rope_local_base_freq`, and their share of rotated
    columns `rope_local_partial_rotary_factor`. DeepSeek V4 has two sets: the theta of layers with compressed attention
    becomes `compress_rope_theta`, and their scaling is the only one."""
    if isinstance(text := values.get("text_config"), dict):
        values = {**values, "text_config": _older_rope_keys(text)}
    given = values.get("rope_parameters")
    if not isinstance(given, dict):
        return values
    if list(given) == ["full_attention"]:
        given = given["full_attention"]  # no layer has a window
    scaling = dict(given)
    translated = {key: value for key, value in values.items() if key != "rope_parameters"}
    if isinstance(full := given.get("full_attention"), dict) and isinstance(given.get("sliding_attention"), dict):
        local = dict(given["sliding_attention"])
        scaling, translated["rope_local_base_freq"] = dict(full), local.pop("rope_theta", None)
        translated["rope_local_partial_rotary_factor"] = local.pop("partial_rotary_factor", None)
        if local.get("rope_type", "default") != "default":
            translated["rope_local_scaling"] = local
    if isinstance(main := given.get("main"), dict) and isinstance(given.get("compress"), dict):
        scaling = dict(given["compress"])
        translated["compress_rope_theta"] = scaling.pop("rope_theta", values.get("compress_rope_theta"))
        scaling["rope_theta"] = main.get("rope_theta")
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := scaling.pop(key, None)) is not None:
            translated[key] = value
    if scaling.get("rope_type", "default") != "default":
        translated["rope_scaling"] = scaling
    return translated
