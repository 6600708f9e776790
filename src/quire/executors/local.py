"""One device in this process."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.core.plan import StepOutput, StepPlan
from quire.executors.protocol import Capacity
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import family
from quire.ops.opset import KVSpec, OpSet, Value
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.available_memory import available_memory
from quire.runtime.kv import KVSize, check_gpu_spec, kv_spec, longest, size_cache
from quire.runtime.runner import Runner
from quire.runtime.spec import SpecConfig
from quire.runtime.structured_output import Matchers
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint

MOST_CACHE_BYTES = 4 * 2**30  # of main memory, without being asked

BACKENDS = {
    "native": ("quire.ops.native", "NativeOps"),
    "torch": ("quire.ops.reference", "TorchOps"),
    "cuda": ("quire.ops.gpu.opset", "GpuOps"),
}


class LocalExecutor:
    """Loads a checkpoint when started, and runs plans on it."""

    def __init__(
        self,
        path: str | Path,
        *,
        backend: str = "native",
        max_model_len: int | None = None,  # None: the model's own, or what fits in the cache
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        swap_space_bytes: int = 0,
        threads: int | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
        max_loras: int = 0,  # adapters used in one step; 0: none can be loaded
        max_lora_rank: int = 64,
        speculation: SpecConfig | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise Unsupported(f"the backend `{backend}` is not known", f"use one of {', '.join(BACKENDS)}")
        self.path = path
        self.backend = backend
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.swap_space_bytes = swap_space_bytes
        self.threads = threads
        self.dtype = dtype
        self.load_format = load_format
        self.quantization = quantization
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enforce_eager = enforce_eager
        self.batch_invariant = batch_invariant
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        self.speculation = speculation
        self._runner: Runner | None = None

    def start(self) -> Capacity:
        checkpoint = self._open()
        model_family = family(checkpoint.config.architecture)
        config = model_family.config(checkpoint.config)
        spec = kv_spec(config, self.block_size, self._kv_dtype())
        if self.backend == "cuda":
            check_gpu_spec(spec)
        self._check_swap_space()
        ops = self._ops()
        if self.backend == "cuda":  # how much is free is known when the weights are there
            model = model_family.load(ops, checkpoint, config, longest(config, self.max_model_len))
            adapters = self._new_adapters(ops, model)
            forward = adapters.forward if adapters else model.forward
            room = self._room(ops, forward, spec, sources=model.encode is not None)
            size = self._size(config, spec, room)
        else:
            free = max(available_memory() - checkpoint.nbytes, 0)
            size = self._size(config, spec, min(free // 2, MOST_CACHE_BYTES))
            model = model_family.load(ops, checkpoint, config, size.max_model_len)
            adapters = self._new_adapters(ops, model)
        self._runner = Runner(
            ops,
            model,
            size,
            max_rows=self.max_num_seqs,
            max_tokens=self.max_num_batched_tokens,
            adapters=adapters,
            proposer=self.speculation.proposer() if self.speculation else None,
            idle_cpu=self._has_idle_cpu(),
        )
        return Capacity(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=config.vocab,
            max_model_len=size.max_model_len,
            weight_bytes=model.weight_bytes,
            cache_bytes=size.cache_bytes,
            ahead=self._ahead,
            window=config.window,
            drafts=self.speculation is not None,
            seq2seq=config.seq2seq if isinstance(config, Seq2SeqConfig) else None,
        )

    @property
    def _ahead(self) -> int:
        return 1 if self.backend == "cuda" else 0

    def _has_idle_cpu(self) -> bool:
        """Where a CPU computes, and not all of them do."""
        if self.backend != "native":
            return False
        from quire.ops.native.cpus import available_cpus, compute_threads

        return (self.threads or compute_threads()) < available_cpus()

    def _open(self) -> Checkpoint:
        return DummyCheckpoint(Path(self.path)) if self.load_format == "dummy" else open_checkpoint(self.path)

    def _check_swap_space(self) -> None:
        """It is taken at once on a GPU, and can never be given to others meanwhile: it is pinned."""
        free = available_memory()
        if self.swap_space_bytes > free:
            raise DoesNotFit(
                f"swap_space is {self.swap_space_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free",
                "ask for less; without it, preempted sequences are computed again",
            )

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        if not self.max_loras:
            return None
        if model.encode is not None:
            raise Unsupported(f"adapters of a `{model.config.architecture}`", "leave out enable_lora")
        return LoraAdapters(ops, model, self.max_loras, self.max_lora_rank)

    def _room(self, ops: Any, forward: Callable[[OpSet, Any], Value], spec: KVSpec, sources: bool) -> int:
        """Bytes for pages at most, found out by running a step; no need to where their size is given."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        return int(ops.room(forward, spec, self.max_num_batched_tokens, sources))

    def _size(self, config: ModelConfig, spec: KVSpec, most_bytes: int) -> KVSize:
        return size_cache(
            config,
            spec,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            cache_bytes=self.kv_cache_memory_bytes,
            most_bytes=most_bytes,
            swap_bytes=self.swap_space_bytes,
            ahead=self._ahead,
        )

    def guide(self, matchers: Matchers) -> None:
        assert self._runner is not None, "not started"
        self._runner.guide(matchers)

    @property
    def _adapters(self) -> LoraAdapters:
        assert self._runner is not None, "not started"
        if self._runner.adapters is None:
            raise BadRequest("adapters are not enabled", "start the engine with enable_lora", param="enable_lora")
        return self._runner.adapters

    def load_adapter(self, path: Path) -> LoadedAdapter:
        return self._adapters.load(path)

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        self._adapters.add(key, loaded)

    def remove_adapter(self, key: str) -> None:
        self._adapters.remove(key)

    def submit(self, plan: StepPlan) -> None:
        assert self._runner is not None, "not started"
        self._runner.submit(plan)

    def collect(self) -> StepOutput:
        assert self._runner is not None, "not started"
        return self._runner.collect()

    def stop(self) -> None:
        """Give back the weights and the cache."""
        self._runner = None

    def _kv_dtype(self) -> str:
        if self.backend == "native" and self.kv_cache_dtype == "fp8":
            raise Unsupported("kv_cache_dtype is `fp8`, and the CPU has no such numbers", "use int8")
        if self.backend != "cuda" or self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "bfloat16" if self.dtype == "auto" else self.dtype

    def _ops(self) -> Any:
        module, name = BACKENDS[self.backend]
        options: dict[str, Any] = {"threads": self.threads}
        if self.backend != "torch":
            options["quantization"] = self.quantization
        if self.backend == "cuda":
            options |= {
                "dtype": "bfloat16" if self.dtype == "auto" else self.dtype,
                "batch_invariant": self.batch_invariant,
                "graphs": not self.enforce_eager,
                "utilization": self.gpu_memory_utilization,
            }
        return getattr(import_module(module), name)(**options)
