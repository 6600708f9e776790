"""Facts about a checkpoint that APIs show; nothing computed depends on them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    format: str = ""  # of its files: gguf, safetensors
    family: str = ""  # such as llama
    num_parameters: int = 0
    storage: str = ""  # the type of most weights: Q4_1, BF16


@lru_cache(64)
def checkpoint_facts(path: str) -> CheckpointFacts:
    """Opens the files, which takes a moment: call it in a thread. "" is no checkpoint."""
    if not path:
        return CheckpointFacts()
    from quire.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(path))
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    layers = [name for name in sizes if ".layers." in name or ".h." in name or ".layer." in name] or list(sizes)
    return CheckpointFacts(
        format="safetensors" if checkpoint.path.is_dir() else "gguf",
        family=checkpoint.config.architecture.partition("For")[0].removesuffix("Model").lower(),
        num_parameters=sum(sizes.values()),
        storage=checkpoint.tensor(max(layers, key=sizes.__getitem__)).type.name.upper(),
    )
