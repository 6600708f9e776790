"""One device in this process."""

from importlib import import_module
from pathlib import Path

from quire.core.errors import Unsupported
from quire.core.plan import StepOutput, StepPlan
from quire.executors.protocol import Capacity
from quire.models.registry import family
from quire.ops.opset import OpSet
from quire.runtime.kv import kv_spec, size_cache
from quire.runtime.memory import available_memory
from quire.runtime.runner import Runner
from quire.weights.checkpoint import open_checkpoint

BACKENDS = {"native": ("quire.ops.native", "NativeOps"), "torch": ("quire.ops.torch", "TorchOps")}


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
        self._runner: Runner | None = None

    def start(self) -> Capacity:
        checkpoint = open_checkpoint(self.path)
        model_family = family(checkpoint.config.architecture)
        config = model_family.config(checkpoint.config)
        size = size_cache(
            config,
            kv_spec(config, self.block_size, self.kv_cache_dtype),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            cache_bytes=self.kv_cache_memory_bytes,
            available_bytes=max(available_memory() - checkpoint.nbytes, 0),
            swap_bytes=self.swap_space_bytes,
        )
        ops = self._ops()
        model = model_family.load(ops, checkpoint, config, size.max_model_len)
        self._runner = Runner(ops, model, size, max_rows=self.max_num_seqs, max_tokens=self.max_num_batched_tokens)
        return Capacity(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=config.vocab,
            max_model_len=size.max_model_len,
            weight_bytes=model.weight_bytes,
            cache_bytes=size.cache_bytes,
        )

    def run(self, plan: StepPlan) -> StepOutput:
        assert self._runner is not None, "not started"
        return self._runner.run(plan)

    def stop(self) -> None:
        """Give back the weights and the cache."""
        self._runner = None

    def _ops(self) -> OpSet:
        module, name = BACKENDS[self.backend]
        ops: OpSet = getattr(import_module(module), name)(threads=self.threads)
        return ops
