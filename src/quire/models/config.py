"""What a checkpoint says it is, in our words."""

from dataclasses import dataclass

from quire.core.errors import BadCheckpoint
from quire.core.seq2seq import Seq2Seq


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that every decoder has, and all that is known of one outside its own file. A family adds its own in
    a subclass, and reads them from the checkpoint's configuration."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int  # tokens it is served with unless told otherwise
    longest: int  # tokens it may be asked to serve; above max_position where the rotary scaling stretches
    windows: tuple[int, ...]  # for each layer: positions a token sees, itself included; 0 sees all
    latent: int = 0  # of the head_dim columns of one key for all heads, those that are the value as well: see KVSpec

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "max_position"):
            if getattr(self, name) < 1:
                raise BadCheckpoint(f"the configuration of the checkpoint gives {name} as {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        assert len(self.windows) == self.layers

    @property
    def window(self) -> int:
        """Positions that the layer sees which looks back furthest; 0: one sees all."""
        return max(self.windows) if all(self.windows) else 0

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Of a model that reads whole texts and makes vectors or scores of them: it keeps no cache."""

    segments: int = 1  # texts of a pair are told apart by so many kinds: token p of kind s is at p + s * max_position
    labels: int = 0  # logits of a text's first token; 0: the vectors of tokens are what it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """Of a model that reads a source and writes an answer. What all have is told of the part that writes."""

    seq2seq: Seq2Seq
    encoder_layers: int
    encoder_heads: int
