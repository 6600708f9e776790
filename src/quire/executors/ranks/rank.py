"""What every rank does: load its part of a model, allocate its part of the KV cache."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.errors import Unsupported
from quire.executors.backends import new_ops
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.shapes import trace_roles
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.opset import KVSpec
from quire.ops.ranks.cuts import RankIndex, check_size
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.opset import RankOps
from quire.weights.checkpoint import Checkpoint


class RankExecutor(LocalExecutor):
    """One of several ranks. `options.threads` are the threads of all of them together."""

    ops_type = RankOps

    def __init__(self, path: str | Path, options: ExecutorOptions, group: RankGroup) -> None:
        super().__init__(path, options)
        self.group = group

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> RankOps:
        index, total = RankIndex(self.group.rank, self.group.size), options.threads or num_threads()
        own = replace(options, threads=own_threads(total, index))
        return self.ops_type(new_ops(own, group=self.group), index)

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        self._ops.begin(trace_roles(family, checkpoint, config, spec, max_model_len))
        return super()._load_model(family, checkpoint, config, spec, max_model_len)


def own_threads(total: int, index: RankIndex) -> int:
    """The threads of one rank: about as many as of every other, and one at least."""
    return max(1, total * (index.rank + 1) // index.size - total * index.rank // index.size)


def num_threads() -> int:
    from quire.ops.native.cpus import compute_threads

    return compute_threads()


def check_ranks(options: ExecutorOptions, size: int, config: Any = None) -> None:
    """Refuse what ranks cannot do; with the model's configuration, more ranks than its heads can be cut into."""
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several ranks share memory as Linux has it", "leave out tensor_parallel_size")
    if options.on_gpu:
        raise Unsupported(f"tensor_parallel_size is {size}, and a model runs on one GPU", "use device cpu")
    if options.kv_disk_path:
        raise Unsupported("a KV cache of several ranks is not kept on disk", "leave out kv_disk_path")
    if options.speculation is not None and options.speculation.model:
        raise Unsupported("several ranks have no draft model", "use the speculative method ngram or suffix")
    if config is not None and config.has_states:
        raise Unsupported("a model with states is not divided among ranks", "leave out tensor_parallel_size")
    if config is not None:
        heads = [config.heads, *([config.encoder_heads] if isinstance(config, Seq2SeqConfig) else [])]
        check_size(size, min(heads))
