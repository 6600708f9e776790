"""The checkpoint of a model that drafts for another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, Unsupported
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import family, read_model_config
from quire.ops.opset import KVSpec, OpSet
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import Checkpoint, open_checkpoint


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
        if config.conv is not None:
            raise Unsupported(
                f"a `{config.architecture}` as a draft model: its states cannot take rejected drafts back",
                "draft with a model that has attention in all layers",
            )
        return cls(checkpoint, config, min(max_model_len or config.max_length, config.max_length), model_family)

    def load(self, ops: OpSet) -> LoadedModel:
        model: LoadedModel = self.family.load(ops, self.checkpoint, self.config, self.max_model_len)
        return model

    def cache_share(self, target: KVSpec) -> float:
        """The target's share of the bytes of a block in both caches."""
        own = kv_spec(self.config, target.block_size, target.dtype)
        return target.block_bytes / (target.block_bytes + own.block_bytes)
