"""Decoders that were saved without their head, as embedding models often are, or with a classifier in its place."""

from dataclasses import dataclass, field
from pathlib import Path

from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

BODY, EMBEDDING = "model.", "embed_tokens.weight"  # BODY is the prefix of names where there is a head
SCORE = "score.weight"  # [labels, hidden]


def as_decoder(checkpoint: Checkpoint, architecture: str) -> Checkpoint:
    """The checkpoint under the names of `architecture`, which has a head. Where none is stored, it is tied to the
    embedding."""
    names, config = checkpoint.names(), checkpoint.config
    headless = "lm_head.weight" not in names
    if not names or (architecture == config.architecture and not headless):
        return checkpoint  # without names it is a DummyCheckpoint, which has every tensor
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
        return [self.prefix + name for name in self.checkpoint.names() if name != SCORE]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name.removeprefix(self.prefix))

    def tensor(self, name: str) -> StoredTensor:
        return self.checkpoint.tensor(name.removeprefix(self.prefix))

    def drop_pages(self) -> None:
        self.checkpoint.drop_pages()
