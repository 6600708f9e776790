"""A row of the tables that translate GGUF to Hugging Face's names and keys: see names.py."""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class GGUFVariant:
    """What differs in files that have a certain tensor: added to the row, or replacing it."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    name: str  # of Hugging Face
    keys: Mapping[str, str]  # config key -> GGUF key, mostly prefixed in the file with its own architecture
    constants: Mapping[str, Any]  # config keys that GGUF does not have
    tensors: Mapping[str, str]  # GGUF name -> Hugging Face name
    # NAME in "blk.3.NAME.weight" -> NAME in "model.layers.3.NAME.weight". With a {} in it, the file stacks the tensors
    # of all experts.
    layer_tensors: Mapping[str, str]
    # Layer tensors whose rows the converter interleaved within each head, so that rotary pairs lie side by side:
    # GGUF name -> the config key that counts the heads.
    interleaved: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)  # config key -> layer tensor whose bias makes it true
    layers_with: Mapping[str, str] = field(default_factory=dict)  # config key -> layer tensor: lists the layers with it
    norm_offset: float = 0.0  # that the converter added to norm weights
    norm_offsets: Mapping[str, float] = field(default_factory=dict)  # of layer tensors whose offset is another
    expects: Mapping[str, Any] = field(default_factory=dict)  # GGUF key -> the only value that is supported
    derive: Callable[[CheckpointConfig], Mapping[str, Any]] | None = None  # config -> further keys
    layers: str = "model.layers"  # prefix of Hugging Face's names of layer tensors
    # Prefixes where encoder and decoder have layers: of "enc.blk" and "dec.blk". Keys of `layer_tensors` are then
    # "enc.NAME" and "dec.NAME".
    sides: Mapping[str, str] = field(default_factory=dict)
    # Where Hugging Face calls the layers that predict further tokens mtp.layers.0 and so on: layer tensors that lie
    # outside of them there -> their names.
    mtp_tensors: Mapping[str, str] = field(default_factory=dict)
    num_layers: int | None = None  # of a file, without layers that predict further tokens
    one_row: Container[str] = ()  # vectors that Hugging Face stores as [1, size]
    variants: Mapping[str, GGUFVariant] = field(default_factory=dict)  # by the layer tensor that a file has

    def of_file(self, tensors: Iterable[str]) -> "GGUFArchitecture":
        """The row for a file with these tensors."""
        stored = (
            {re.sub(r"(?:^|(?<=^enc\.)|(?<=^dec\.))blk\.\d+\.|\.(weight|bias)$", "", name) for name in tensors}
            if self.variants
            else set()
        )
        constants, layer_tensors, biases = dict(self.constants), dict(self.layer_tensors), dict(self.biases)
        for variant in (variant for name, variant in self.variants.items() if name in stored):
            constants |= variant.constants
            layer_tensors |= variant.layer_tensors
            biases |= variant.biases
        return replace(self, constants=constants, layer_tensors=layer_tensors, biases=biases)
