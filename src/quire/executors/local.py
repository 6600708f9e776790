"""One device in this process."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.core.draft_policy import DraftPolicy
from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.core.plan import StepOutput, StepPlan
from quire.executors.backends import (
    check_backend,
    new_ops,
    resolve_quantization,
    warn_of_dtype,
    warn_of_offloading,
    warn_of_synthetic_acceptance,
    warn_of_tiers,
)
from quire.executors.draft_checkpoint import DraftCheckpoint, HeadCheckpoint
from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Capacity
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.draft_head import DraftHead
from quire.models.loading import LoadedModel
from quire.models.registry import Family, family, read_model_config
from quire.models.rope_override import with_rope
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import OpSet
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.available_memory import available_memory
from quire.runtime.kv import KVSize, check_gpu_spec, kv_spec, longest, size_cache
from quire.runtime.runner import Runner
from quire.runtime.spec.proposer import ProposerContext
from quire.runtime.structured_output import MatcherFactory
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint
from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

if TYPE_CHECKING:
    from quire.runtime.disk_tier import DiskTier
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer

MAX_DEFAULT_CACHE_BYTES = 4 * 2**30  # of main memory, unless a size is asked for


class LocalExecutor:
    """Loads a checkpoint, allocates a KV cache beside it, and runs plans."""

    def __init__(self, path: str | Path, options: ExecutorOptions | None = None) -> None:
        self.path = path
        self.options = options or ExecutorOptions()
        check_backend(self.options)
        warn_of_dtype(self.options)
        warn_of_offloading(self.options)
        warn_of_synthetic_acceptance(self.options)
        self._runner: Runner | None = None
        self.submit: Callable[[StepPlan], None]  # the runner's
        self.collect: Callable[[], StepOutput]

    # -- starting: load and measure, then allocate what was agreed on

    def load(self) -> KVSize:
        checkpoint = self._open()
        options = resolve_quantization(self.options, checkpoint)
        model_family = family(checkpoint.config.architecture)
        config = read_model_config(model_family, checkpoint.config)
        if config.bidirectional:
            raise Unsupported(f"this `{config.architecture}` encodes texts, and does not generate", "use --task embed")
        if options.kv_transfer is not None:
            from quire.executors.transfer import check_transfer

            check_transfer(options, config)
        warn_of_tiers(options, config)
        scales = None
        if options.kv_dtype == "fp8" and isinstance(checkpoint, HuggingFaceCheckpoint):
            scales = checkpoint.kv_scales()
        config = config.at_length(longest(config, options.max_model_len))
        kept = options.kv_dtype, scales, options.state_checkpoint_dtype
        spec = kv_spec(config, options.block_size, *kept, drafts=options.has_drafts)
        if options.on_gpu:
            check_gpu_spec(spec)
        self._check_speculation(config)
        self._check_swap_space()
        self._ops = self._new_ops(options, config)
        draft = self._open_draft(checkpoint, config)
        self._draft_block_bytes = draft.block_bytes(spec) if draft else 0
        if options.on_gpu:  # how much memory is free is known when the weights are loaded
            length = longest(config, options.max_model_len)
            self._model = self._load_model(model_family, checkpoint, config, spec, length)
            self._adapters = self._new_adapters(self._ops, self._model)
            self._draft = self._load_draft(draft) if draft else None
            return self._size(config, spec, self._gpu_room(spec))
        weight_bytes = checkpoint.nbytes if options.weight_bytes is None else options.weight_bytes
        free = max(available_memory() - weight_bytes - (draft.nbytes if draft else 0), 0)
        size = self._size(config, spec, min(free // (2 * self._num_engines), MAX_DEFAULT_CACHE_BYTES))
        self._model = self._load_model(model_family, checkpoint, config, spec, size.max_model_len)
        self._draft = self._load_draft(draft) if draft else None
        self._adapters = self._new_adapters(self._ops, self._model)
        return size

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> Any:
        return new_ops(options)

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        """`spec`: of the KV cache."""
        return family.load(self._ops, checkpoint, config, max_model_len)

    def _load_draft(self, draft: "DraftCheckpoint | HeadCheckpoint") -> "LoadedModel | DraftHead":
        return draft.load(self._ops, self._model)

    @property
    def _draft_ops(self) -> Any:
        """Of what drafts."""
        return self._ops

    def allocate(self, size: KVSize) -> Capacity:
        options, config = self.options, self._model.config
        self._runner = Runner(
            self._ops,
            self._model,
            size,
            max_rows=options.max_num_seqs,
            max_tokens=options.max_step_tokens,
            adapters=self._adapters,
            proposer=self._new_proposer(size),
            idle_cpu=self._has_idle_cpu(),
            new_store=lambda cache: self._new_store(size, cache),
            new_transfer=lambda cache: self._new_transfer(size, cache),
        )
        self.submit, self.collect = self._runner.submit, self._runner.collect
        return Capacity(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=config.vocab,
            max_model_len=size.max_model_len,
            weight_bytes=self.weight_bytes,
            cache_bytes=size.cache_bytes,
            ahead=self._ahead,
            window=config.window,
            offload=options.host_tier_bytes > 0,
            drafts=self._measured_policy(self._runner),
            max_draft_tokens=options.max_draft_tokens,
            seq2seq=config.seq2seq if isinstance(config, Seq2SeqConfig) else None,
            has_states=config.has_states,
            num_slots=size.num_slots,
            num_host_slots=size.num_host_slots,
            num_checkpoint_slots=size.num_checkpoint_slots,
            small_host_slots=size.spec.states.small_host_slots if size.spec.states else False,
            state_bytes=size.state_bytes,
            host_slot_bytes=size.spec.states.host_slot_bytes if size.spec.states else 0,
            num_pages=size.num_pages,
            page_window=size.spec.windows.size if size.spec.windows else 0,
            page_bytes=size.spec.page_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes + (self._draft.weight_bytes if self._draft else 0)

    @property
    def _ahead(self) -> int:
        return 1 if self.options.on_gpu else 0

    def _has_idle_cpu(self) -> bool:
        """Whether a CPU is left over while the others compute."""
        if self.options.backend != "native":
            return False
        from quire.ops.native.cpus import available_cpus, compute_threads

        return (self.options.threads or compute_threads()) < available_cpus()

    def _open(self) -> Checkpoint:
        dummy = self.options.load_format == "dummy"
        checkpoint: Any = DummyCheckpoint(Path(self.path)) if dummy else open_checkpoint(self.path)
        if self.options.rope is not None:
            checkpoint.config = with_rope(checkpoint.config, json.loads(self.options.rope))
        return cast(Checkpoint, checkpoint)

    def _check_speculation(self, config: ModelConfig) -> None:
        if self.options.speculation is not None:
            self.options.speculation.check_fits(longest(config, self.options.max_model_len))

    def _check_swap_space(self) -> None:
        """A GPU's host blocks are pinned when they are allocated: they must fit at once."""
        sizes = {"swap_space": self.options.swap_space_bytes, "kv_offloading_size": self.options.host_tier_bytes}
        free = available_memory()
        if sum(sizes.values()) > free:
            asked = " and ".join(f"{name} is {size / 2**30:.1f} GiB" for name, size in sizes.items() if size)
            raise DoesNotFit(
                f"{asked}, and {free / 2**30:.1f} GiB of memory are free",
                "ask for less; without it, sequences and prefixes that do not fit are computed again",
            )

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        if not self.options.max_loras:
            return None
        if model.encode is not None:
            raise Unsupported(f"adapters of a `{model.config.architecture}`", "leave out enable_lora")
        return self._adapters_type(ops, model, self.options.max_loras, self.options.max_lora_rank)

    @property
    def _adapters_type(self) -> Callable[..., LoraAdapters]:
        return LoraAdapters

    def _new_proposer(self, size: KVSize) -> Any:
        if self.options.speculation is None:
            return None
        drafting = self._draft
        context = ProposerContext(
            self._draft_ops,
            self._model,
            size,
            self.options.max_num_seqs,
            self.options.max_step_tokens,
            draft=None if isinstance(drafting, DraftHead) else drafting,
            head=drafting if isinstance(drafting, DraftHead) else None,
        )
        return self.options.speculation.proposers(context)

    def _draft_policy(self) -> DraftPolicy | None:
        if self.options.speculation is None:
            return None
        cost = self._draft.weight_bytes / self._model.weight_bytes if self._draft else None
        return self.options.speculation.policy(on_gpu=self.options.on_gpu, model_cost=cost)

    def _measured_policy(self, runner: Runner) -> DraftPolicy | None:
        """With the times of the steps that have graphs."""
        policy, measured = self._draft_policy(), getattr(runner.program, "step_seconds", {})
        if policy is None or not measured:
            return policy
        sizes = sorted(measured)
        seconds = accumulate((measured[size] for size in sizes), max)  # a larger step is not faster but for chance
        return replace(policy, step_seconds=tuple(zip(sizes, seconds, strict=True)))

    def _disk_path(self, config: ModelConfig) -> Path | None:
        """Where prefixes are kept on disk. Where every layer has a window, there are none beyond the pool."""
        path = self.options.kv_disk_path
        return Path(path).expanduser().absolute() if path and not config.window else None

    def _new_store(self, size: KVSize, cache: KVCache) -> "DiskTier | None":
        if (root := self._disk_path(self._model.config)) is None:
            return None
        from quire.executors.disk import open_disk_tier  # it imports what reads and writes files

        return open_disk_tier(root, self.path, self.options, size, cache)

    def _new_transfer(self, size: KVSize, cache: KVCache) -> "KVProducer | KVConsumer | None":
        if self.options.kv_transfer is None:
            return None
        from quire.executors.transfer import open_transfer

        return open_transfer(self.options.kv_transfer, self.path, self.options, size, cache)

    @property
    def _num_engines(self) -> int:
        """Engines that share the memory of this machine."""
        return self.options.kv_transfer.parallel if self.options.kv_transfer else self.options.data_parallel_size

    def _gpu_room(self, spec: KVSpec) -> int:
        """Bytes that are free for the KV cache, measured by running a step, unless a size is given."""
        if self.options.kv_cache_memory_bytes is not None:
            return self.options.kv_cache_memory_bytes
        forward = self._adapters.forward if self._adapters else self._model.forward
        has_encoder = self._model.encode is not None
        return int(self._ops.room(forward, spec, self.options.max_step_tokens, has_encoder))

    def _open_draft(self, checkpoint: Checkpoint, config: ModelConfig) -> "DraftCheckpoint | HeadCheckpoint | None":
        """The model or the head that drafts, where a speculative method has one."""
        spec = self.options.speculation
        if spec is None or not (spec.model or spec.head):
            return None
        if isinstance(config, Seq2SeqConfig):
            raise Unsupported(f"{spec.method} for a `{config.architecture}`", "use the method ngram or suffix")
        if spec.head:
            return HeadCheckpoint.open(spec.head, spec.model, checkpoint, config)
        return DraftCheckpoint.open(spec.model, config, self.options.max_model_len)

    def _size(self, config: ModelConfig, spec: KVSpec, max_bytes: int) -> KVSize:
        return size_cache(
            config,
            spec,
            max_model_len=self.options.max_model_len,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_step_tokens,
            cache_bytes=self.options.kv_cache_memory_bytes,
            max_bytes=max_bytes,
            draft_block_bytes=self._draft_block_bytes,
            swap_bytes=self.options.swap_space_bytes,
            offload_bytes=self.options.host_tier_bytes,
            has_staging=self._disk_path(config) is not None or self.options.kv_transfer is not None,
            ahead=self._ahead,
            window_pages=self._has_window_pages,
            has_pinned_host=self.options.on_gpu,
        )

    @property
    def _has_window_pages(self) -> bool:
        """Whether layers with a window may have pages of their own. The host tier keeps whole blocks, and other engines
        are sent whole ones."""
        options = self.options
        return not (options.host_tier_bytes or options.kv_transfer)

    # -- running

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "no KV cache is allocated"
        return self._runner

    def set_matcher_factory(self, new_matcher: MatcherFactory) -> None:
        self.runner.set_matcher_factory(new_matcher)

    @property
    def store(self) -> "DiskTier | None":
        return self.runner.store

    @property
    def transfer(self) -> "KVProducer | KVConsumer | None":
        return self.runner.transfer

    def stop(self) -> None:
        """Free the weights and the cache."""
        if self._runner and self._runner.transfer:
            self._runner.transfer.stop()
        if self._runner and self._runner.store:
            self._runner.store.stop()
        self._runner = self._model = self._draft = self._ops = self._adapters = None  # type: ignore[assignment]

    # -- LoRA adapters

    @property
    def adapters(self) -> LoraAdapters:
        if self.runner.adapters is None:
            raise BadRequest("adapters are not enabled", "start the engine with enable_lora", param="enable_lora")
        return self.runner.adapters

    def load_adapter(self, path: Path) -> LoadedAdapter:
        return self.adapters.load(path)

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        self.adapters.add(key, loaded)

    def remove_adapter(self, key: str) -> None:
        self.adapters.remove(key)
