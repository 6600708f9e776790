"""A row of the tables that say what GGUF calls things: see gguf_names.py."""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """What a file has besides or instead."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # Hugging Face's
    keys: Mapping[str, str]  # config key -> GGUF key, mostly prefixed in the file with its own architecture
    constants: Mapping[str, Any]  # config keys that GGUF leaves unsaid
    tensors: Mapping[str, str]  # GGUF name -> Hugging Face name
    # GGUF name in "blk.3.NAME.weight" -> the one in "model.layers.3.NAME.weight". Where that has a {} in it, the file
    # stacks the tensors of all experts.
    layer_tensors: Mapping[str, str]
    # Layer tensors whose rows the converter interleaved within each head, so that rotary pairs lie side by side:
    # GGUF name -> the config key that counts the heads.
    interleaved: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)  # config key -> layer tensor whose bias makes it true
    norms_plus: float = 0.0  # what the converter added to the weights of norms
    expects: Mapping[str, Any] = field(default_factory=dict)  # GGUF key -> the only value that is supported
    derive: Callable[[CheckpointConfig], Mapping[str, Any]] | None = None  # config -> more of it
    layers: str = "model.layers"  # what Hugging Face's names of layer tensors begin with
    one_row: Container[str] = ()  # vectors that Hugging Face has as the one row of a matrix
    variants: Mapping[str, Variant] = field(default_factory=dict)  # layer tensor -> what differs where a file has it

    def of_file(self, tensors: Iterable[str]) -> "Architecture":
        """The row for a file with these tensors."""
        parts = {re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", name) for name in tensors} if self.variants else set()
        constants, layer_tensors, biases = dict(self.constants), dict(self.layer_tensors), dict(self.biases)
        for variant in (variant for part, variant in self.variants.items() if part in parts):
            constants |= variant.constants
            layer_tensors |= variant.layer_tensors
            biases |= variant.biases
        return replace(self, constants=constants, layer_tensors=layer_tensors, biases=biases)
