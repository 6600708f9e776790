"""Decoders that were saved without their head, as models that make vectors of texts often are."""

from dataclasses import dataclass, field
from pathlib import Path

from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

BODY, EMBEDDING = "model.", "embed_tokens.weight"  # names begin with BODY where there is a head


def as_decoder(checkpoint: Checkpoint, architecture: str) -> Checkpoint:
    """The same checkpoint in the words of `architecture`, which has a head. Where there is none, the embedding table
    stands in for it."""
    names, config = checkpoint.names(), checkpoint.config
    headless = "lm_head.weight" not in names
    if not names or (architecture == config.architecture and not headless):
        return checkpoint  # one without names has whatever is asked for
    values = {"architectures": [architecture]} | ({"tie_word_embeddings": True} if headless else {})
    prefix = BODY if EMBEDDING in names else ""
    return DecoderBody(checkpoint, config.with_values(values), prefix)


@dataclass(slots=True)
class DecoderBody:
    checkpoint: Checkpoint
    config: CheckpointConfig
    prefix: str
    path: Path = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.path, self.nbytes = self.checkpoint.path, self.checkpoint.nbytes

    def names(self) -> list[str]:
        return [self.prefix + name for name in self.checkpoint.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name.removeprefix(self.prefix))

    def tensor(self, name: str) -> StoredTensor:
        return self.checkpoint.tensor(name.removeprefix(self.prefix))

    def forget(self) -> None:
        self.checkpoint.forget()
