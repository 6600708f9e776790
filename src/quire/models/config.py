"""The sizes of a model, as all code outside its own file knows them."""

from dataclasses import dataclass, replace
from typing import Self

from quire.core.errors import BadCheckpoint
from quire.core.seq2seq import Seq2Seq
from quire.ops.kv_spec import CompressedSpec, ConvSpec, IndexSpec, StateSpec

ATTENTION = "full_attention"  # a kind of layer
MAX_COLUMNS = 1 << 22  # of queries; memory is allocated for them before tensors are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes that every decoder has. A model file adds its own in a subclass, read from config.json."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int  # context length by default, in tokens
    max_length: int  # context length at most; above max_position where the rope scaling extends on demand
    windows: tuple[int, ...]  # for each layer: positions a token attends to, itself included; 0: all
    latent: int = 0  # MLA: of the head_dim columns of the key that all heads share, those that are also the value
    kinds: tuple[str, ...] = ()  # of a hybrid, for each layer: what mixes its tokens; empty: attention in all layers
    conv: ConvSpec | None = None  # the causal convolutions of a hybrid, whose states are in the blocks
    states: StateSpec | None = None  # of recurrent layers, in slots beside the blocks
    index: IndexSpec | None = None  # of sparse attention, whose keys are in the blocks
    compressed: CompressedSpec | None = None  # of compressed attention: what its layers keep of tokens, and of groups
    bidirectional: bool = False  # tokens see those after them, too: it encodes whole texts, and has no KV cache

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "max_position"):
            if getattr(self, name) < 1:
                raise BadCheckpoint(f"the configuration of the checkpoint gives {name} as {getattr(self, name)}")
        if max(self.q_size, self.kv_size) > MAX_COLUMNS:
            raise BadCheckpoint(f"{self.heads} heads of {self.head_dim} columns are more than {MAX_COLUMNS} columns")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        assert len(self.windows) == self.layers and (self.conv is None or self.states is None)

    @property
    def window(self) -> int:
        """The largest window of all layers; 0: some layer attends to all positions."""
        return max(self.windows) if all(self.windows) else 0

    def at_length(self, length: int) -> Self:
        """Where no context is longer than `length`: an indexer that would choose all positions is left out."""
        return replace(self, index=None) if self.index and length <= self.index.top_k else self

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """The windows of the layers that have keys and values."""
        if not self.kinds:
            return self.windows
        return tuple(window for window, kind in zip(self.windows, self.kinds, strict=True) if kind == ATTENTION)

    @property
    def has_states(self) -> bool:
        return self.conv is not None or self.states is not None

    @property
    def kv_layers(self) -> int:
        """Layers that have keys and values."""
        return self.kinds.count(ATTENTION) if self.kinds else self.layers

    def index_of_kind(self, layer: int) -> int:
        """The number of a layer among those of its kind: each kind is numbered by itself in the cache."""
        return self.kinds[:layer].count(self.kinds[layer]) if self.kinds else layer

    @property
    def residual(self) -> int:
        """Columns of what flows from layer to layer."""
        return self.hidden

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """An encoder, which embeds or scores whole texts."""

    bidirectional: bool = True
    segments: int = 1  # token types of a pair of texts: token p of type s is row p + s * max_position of the positions
    labels: int = 0  # logits of the first token, of a classifier; 0: the model gives hidden states
    labels_of_mean: bool = False  # a classifier reads the mean over tokens: the model gives hidden states for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """An encoder-decoder. The sizes of ModelConfig are those of its decoder."""

    seq2seq: Seq2Seq
    encoder_layers: int
    encoder_heads: int
