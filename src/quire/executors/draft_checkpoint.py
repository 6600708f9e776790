"""The checkpoint of a model that drafts for another, or of a head that drafts from another's hidden states."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, Unsupported
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.draft_head import DraftHead
from quire.models.loading import LoadedModel
from quire.models.registry import family, read_model_config
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import OpSet
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import Checkpoint, open_checkpoint

# Method -> the file of its heads, and the function there that reads their config.json.
HEADS = {
    "eagle": ("quire.models.eagle", "config"),
    "eagle3": ("quire.models.eagle", "eagle3_config"),
    "medusa": ("quire.models.medusa", "config"),
    "mtp": ("quire.models.mtp", "config"),
}


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    checkpoint: Checkpoint
    config: ModelConfig
    max_model_len: int
    family: Any

    @classmethod
    def open(cls, path: str, target: ModelConfig, max_model_len: int | None) -> "DraftCheckpoint":
        """Refuses a model that cannot draft for the target."""
        checkpoint = open_checkpoint(path)
        model_family = family(checkpoint.config.architecture)
        config = read_model_config(model_family, checkpoint.config)
        if isinstance(config, Seq2SeqConfig) or config.vocab != target.vocab:
            raise BadRequest(
                f"the draft model {Path(path).name} is a {config.architecture} with {config.vocab:,} logits, and the "
                f"model has {target.vocab:,}",
                "draft with a smaller decoder of the same family",
                param="speculative_config",
            )
        if config.has_states:
            raise Unsupported(
                f"a `{config.architecture}` as a draft model: its states cannot take rejected drafts back",
                "draft with a model that has attention in all layers",
            )
        return cls(checkpoint, config, min(max_model_len or config.max_length, config.max_length), model_family)

    @property
    def nbytes(self) -> int:
        return self.checkpoint.nbytes

    def load(self, ops: OpSet, target: LoadedModel) -> LoadedModel:
        model: LoadedModel = self.family.load(ops, self.checkpoint, self.config, self.max_model_len)
        return model

    def block_bytes(self, target: KVSpec) -> int:
        return _block_bytes(self.config, target)


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    checkpoint: Checkpoint
    config: Any
    nbytes: int  # beside the target's checkpoint
    _load: Callable[..., DraftHead]

    @classmethod
    def open(cls, method: str, path: str, of_target: Checkpoint, target: ModelConfig) -> "HeadCheckpoint":
        """Refuses a head that cannot draft for the target. Without a path, the head is in the target's checkpoint."""
        checkpoint = open_checkpoint(path) if path else of_target
        if path and _is_whole_model(checkpoint):
            raise BadRequest(
                f"{method} drafts with a head, and {Path(path).name} is a whole `{checkpoint.config.architecture}`",
                'a smaller model drafts with "method": "draft_model"',
                param="speculative_config",
            )
        module, read_config = HEADS[method]
        head_file = import_module(module)
        config = getattr(head_file, read_config)(checkpoint, target)
        return cls(checkpoint, config, checkpoint.nbytes if path else 0, head_file.load)

    def load(self, ops: OpSet, target: LoadedModel) -> DraftHead:
        return self._load(ops, self.checkpoint, self.config, target, target.config.max_length)

    def block_bytes(self, target: KVSpec) -> int:
        return _block_bytes(self.config, target)


def _is_whole_model(checkpoint: Checkpoint) -> bool:
    """It has layers and an embedding, and nothing that reads hidden states (`fc`) or predicts from them alone."""
    names = checkpoint.names()
    has_layers = "model.embed_tokens.weight" in names and any(name.startswith("model.layers.1.") for name in names)
    return has_layers and not any(re.search(r"(^|\.)(fc|medusa_head|lm_heads)\.", name) for name in names)


def _block_bytes(config: Any, target: KVSpec) -> int:
    """The bytes of a block in the draft model's own cache, which has as many as the target's; 0: it has none."""
    if not isinstance(config, ModelConfig):
        return 0
    if not target.block_bytes:
        raise Unsupported(
            "drafting with a model or a head for one that has no keys and values",
            "use the speculative method ngram or suffix",
        )
    return kv_spec(config, target.block_size, target.dtype).block_bytes
