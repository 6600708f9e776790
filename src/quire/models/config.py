"""What a checkpoint says it is, in our words."""

from dataclasses import dataclass

from quire.core.errors import BadCheckpoint
from quire.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder-only model. A family reads them from the checkpoint's configuration."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int  # tokens it is served with unless told otherwise
    longest: int  # tokens it may be asked to serve; above max_position where the rotary scaling stretches
    eps: float  # of the norms
    rope: RopeSpec
    windows: tuple[int, ...]  # for each layer: positions a token sees, itself included; 0 sees all
    rotated: tuple[bool, ...]  # for each layer: whether queries and keys turn with their position
    tied: bool = False  # the head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_position"):
            if getattr(self, name) < 1:
                raise BadCheckpoint(f"the configuration of the checkpoint gives {name} as {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        assert len(self.windows) == len(self.rotated) == self.layers

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim
