"""How a model advises to sample: generation_config.json, the metadata of a GGUF file, or the table of short names.

A request's own values win, field by field."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.engine.generation_advice import GENERATION_FIELDS, checked_advice
from quire.engine.options import EngineOptions
from quire.hub.aliases import advised_sampling
from quire.weights.huggingface import read_json

log = logging.getLogger("quire.engine")

FILE = "generation_config.json"
NO_CONFIG = ("none", "vllm")  # vLLM's word for its own defaults is its name

_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The defaults of requests to one model."""

    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams, without max_tokens
    max_tokens: int | None = None  # None: until the context is full

    def params(self) -> SamplingParams:
        return SamplingParams(**self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return self.sampling if self.max_tokens is None else {**self.sampling, "max_tokens": self.max_tokens}


def read_generation_config(options: EngineOptions, path: Path) -> GenerationConfig:
    """`path`: the files of the model that the options name."""
    values: dict[str, Any] = {}
    if options.generation_config == "auto":
        values = {**advised_sampling(options.model, path.name), **_advised_by(path)}
    elif options.generation_config not in NO_CONFIG:
        values = _from_file(Path(options.generation_config).expanduser())
    overridden = json.loads(options.override_generation_config or "{}")
    values |= {name: checked_advice(name, value) for name, value in overridden.items()}
    max_tokens = values.pop("max_new_tokens", None)
    return GenerationConfig(values, max_tokens)


def _advised_by(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return _valid(read_json(path / FILE), path / FILE)
    from quire.weights.gguf.container import GGUFFile

    metadata = GGUFFile(path).metadata
    return _valid({field: metadata[key] for key, field in _GGUF_KEYS.items() if key in metadata}, path)


def _from_file(path: Path) -> dict[str, Any]:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        hint = "give auto, none, or a directory with a generation_config.json"
        raise BadRequest(f"generation_config is {path}, and {file} does not exist", hint, param="generation_config")
    return _valid(read_json(file), file)


def _valid(values: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The fields that count, where their values are possible: a model is served whatever its advice is."""
    valid = {}
    for name in GENERATION_FIELDS:
        if (value := values.get(name)) is None:
            continue
        try:
            valid[name] = checked_advice(name, value)
        except BadRequest as error:
            log.warning("%s: %s, and is ignored", source, error.message)
    return valid
