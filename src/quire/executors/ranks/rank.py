"""What every rank does: load its part of a model, allocate its part of the KV cache."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.core.errors import BadRequest, Unsupported
from quire.executors.backends import new_ops
from quire.executors.draft_checkpoint import DraftCheckpoint, HeadCheckpoint
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.shapes import trace, trace_head, trace_roles
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.draft_head import DraftHead
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import OpSet
from quire.ops.ranks.cuts import RankIndex, check_size
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.lora import bind_slots
from quire.ops.ranks.opset import RankOps
from quire.ops.ranks.roles import Roles
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import KVSize, kv_spec
from quire.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.runtime.disk_tier import DiskTier

Ops = TypeVar("Ops", bound=RankOps)


class RankExecutor(LocalExecutor):
    """One of several ranks. `options.threads` are the threads of all of them together."""

    ops_type = RankOps

    def __init__(self, path: str | Path, options: ExecutorOptions, group: RankGroup) -> None:
        super().__init__(path, options)
        self.group = group

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> RankOps:
        return new_rank_ops(self.ops_type, options, self.group)

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        def load_target(ops: Any, checkpoint: Checkpoint) -> LoadedModel:
            return family.load(ops, checkpoint, config, max_model_len)

        self._trace_head = partial(trace_head, load_target=load_target, checkpoint=checkpoint, spec=spec)
        roles = trace(load_target, checkpoint, config, spec)
        check_experts(self.options, config, roles)
        self._ops = self._ops.for_model(roles)
        return super()._load_model(family, checkpoint, config, spec, max_model_len)

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        """A GPU has no tape: no forward pass may run before adapters are loaded."""
        if (adapters := super()._new_adapters(ops, model)) is not None:
            bind_slots(adapters.slots)
        return adapters

    @property
    def _ahead(self) -> int:
        """Ranks are sent the tokens that rank 0 has sampled: a step waits for the one before."""
        return 0

    def _gpu_room(self, spec: KVSpec) -> int:
        """Room for the KV cache of all ranks together, as far as this rank's part of it decides."""
        room = super()._gpu_room(spec)
        if self.options.kv_cache_memory_bytes is not None:
            return room
        return int(room * spec.block_bytes // self._ops.own_spec(spec).block_bytes)

    def _load_draft(self, draft: DraftCheckpoint | HeadCheckpoint) -> LoadedModel | DraftHead:
        """Divided among the ranks as the target is."""
        if isinstance(draft, HeadCheckpoint):
            roles = self._trace_head(draft)
        else:
            check_size(self.group.size, draft.config.heads, "the draft model")
            spec = kv_spec(draft.config, self.options.block_size, self.options.kv_dtype)
            roles = trace_roles(draft.family, draft.checkpoint, draft.config, spec, draft.max_model_len)
        self._ops_of_draft = self._ops.for_model(roles)
        return draft.load(self._ops_of_draft, self._model)

    def _new_store(self, size: KVSize, cache: KVCache) -> "DiskTier | None":
        """Rank 0 reads and writes the blocks of all."""
        return None

    @property
    def _draft_ops(self) -> Any:
        return self._ops_of_draft if self._draft else self._ops


def new_rank_ops(kind: type[Ops], options: ExecutorOptions, group: RankGroup, **more: Any) -> Ops:
    """`more`: of `new_ops`."""
    index = RankIndex(group.rank, group.size, whole_groups=options.on_gpu)
    total = options.threads or num_threads()
    own = replace(options, threads=own_threads(total, index))
    return kind(new_ops(own, group=group, **more), index, options.enable_expert_parallel)


def check_experts(options: ExecutorOptions, config: ModelConfig, roles: Roles) -> None:
    if options.enable_expert_parallel and not roles.num_experts:
        raise BadRequest(
            f"enable_expert_parallel, and a `{config.architecture}` has no experts",
            "leave it out",
            param="enable_expert_parallel",
        )


def own_threads(total: int, index: RankIndex) -> int:
    """The threads of one rank: about as many as of every other, and one at least."""
    return max(1, total * (index.rank + 1) // index.size - total * index.rank // index.size)


def num_threads() -> int:
    from quire.ops.native.cpus import compute_threads

    return compute_threads()


def _check_gpu_ranks(options: ExecutorOptions) -> None:
    given = {
        "kv_disk_path": options.kv_disk_path,
        "offload_weights": options.offload_weight_bytes,
    }
    if names := [name for name, value in given.items() if value]:
        raise Unsupported(f"{' and '.join(names)} with ranks on GPUs", f"leave out {names[0]}, or use device cpu")


def check_ranks(options: ExecutorOptions, size: int, config: Any = None) -> None:
    """Refuse what ranks cannot do; with the model's configuration, more ranks than its heads can be cut into."""
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several ranks share memory as Linux has it", "leave out tensor_parallel_size")
    if options.on_gpu:
        _check_gpu_ranks(options)
    if options.kv_transfer is not None:
        raise Unsupported("KV blocks of several ranks are not sent to other engines", "leave out tensor_parallel_size")
    if config is not None and config.kv_layers:
        heads = [config.heads, *([config.encoder_heads] if isinstance(config, Seq2SeqConfig) else [])]
        check_size(size, min(heads))
