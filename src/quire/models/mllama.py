"""The text of Llama 3.2 Vision: Llama, without the layers that attend to images.

Between the layers of Llama stand others whose only attention is to an image. Without an image they are left out, and
what remains is Llama 3.1. The embedding table has eight rows more than the vocabulary, for tokens of images."""

from collections.abc import Sequence

from quire.models import llama
from quire.models.llama import LlamaConfig
from quire.models.loading import LoadedModel
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.models.text_part import text_tensors
from quire.ops.opset import OpSet
from quire.ops.tensors import StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

EMBEDDING = "model.embed_tokens.weight"


def config(hf: CheckpointConfig) -> LlamaConfig:
    text = text_config(hf)
    layers = len(text_layers(text))
    return LlamaConfig(**llama.config_fields(text.with_values({"num_hidden_layers": layers})))


def text_config(hf: CheckpointConfig) -> CheckpointConfig:
    text = hf.section("text_config") if "text_config" in hf else hf
    return text.with_values({"architectures": [hf.architecture]})


def text_layers(text: CheckpointConfig) -> list[int]:
    """The layers that do not attend to images."""
    images = text.list("cross_attention_layers", [])
    return [layer for layer in range(text.int("num_hidden_layers")) if layer not in images]


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    if names := checkpoint.names():
        tensors = text_tensors(checkpoint) if EMBEDDING not in names else checkpoint
        checkpoint = LlamaTensors(tensors, text_layers(text_config(checkpoint.config)), config.vocab)
    return llama.load(ops, checkpoint, config, max_model_len)


class LlamaTensors(RenamedCheckpoint):
    """The tensors of some layers, which are numbered anew, and as many rows of the embedding table as of the head."""

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[int], vocab: int) -> None:
        stored = checkpoint.names()
        names = {name: name for name in stored if not name.startswith("model.layers.")}
        for new, old in enumerate(layers):
            prefix = f"model.layers.{old}."
            names |= {
                f"model.layers.{new}.{name.removeprefix(prefix)}": name for name in stored if name.startswith(prefix)
            }
        super().__init__(checkpoint, names)
        self._vocab = vocab

    def shape(self, name: str) -> tuple[int, ...]:
        rows, *others = super().shape(name)
        return (min(rows, self._vocab) if name == EMBEDDING else rows, *others)

    def tensor(self, name: str) -> StoredTensor:
        tensor = super().tensor(name)
        return tensor.part(0, self.shape(name)[0]) if name == EMBEDDING else tensor
