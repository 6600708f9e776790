"""What an executor is told: one value, chosen once from the engine's options."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.core.transfer_config import TransferConfig
    from quire.runtime.spec.config import SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """Names and meanings are those of `EngineOptions`."""

    backend: str = "native"  # a key of BACKENDS in executors/backends.py
    max_model_len: int | None = None  # None: the model's own length, or what fits in the KV cache
    rope: str | None = None  # how positions are scaled instead of as the checkpoint says, as JSON
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_draft_tokens: int = 0  # of a step without prompts, beside these
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    state_checkpoint_dtype: str = "float32"
    kv_cache_memory_bytes: int | None = None
    swap_space_bytes: int = 0
    offload_bytes: int = 0  # of host memory for prefixes
    offload_weight_bytes: int = 0  # of weights that a GPU need not hold
    offload_folder: str | None = None  # where those are that host memory has no room for
    kv_disk_path: str | None = None
    kv_disk_bytes: int = 0
    kv_transfer: "TransferConfig | None" = None
    data_parallel_size: int = 1  # engines that share the memory of this machine
    threads: int | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    batch_invariant: bool = False
    max_loras: int = 0  # adapters in one step; 0: LoRA is not enabled
    max_lora_rank: int = 64
    tensor_parallel_size: int = 1  # ranks, of the model or of each of its stages
    enable_expert_parallel: bool = False
    speculation: "SpecConfig | None" = None
    verifies_drafts: bool = False  # of a rank that is told by rank 0, which alone knows of methods without weights
    weight_bytes: int | None = None  # what the weights will take; None: as much as their files

    @property
    def on_gpu(self) -> bool:
        return self.backend == "cuda"

    @property
    def has_drafts(self) -> bool:
        return self.verifies_drafts or self.speculation is not None

    @property
    def max_step_tokens(self) -> int:
        """Tokens of one step, drafts included."""
        return self.max_num_batched_tokens + self.max_draft_tokens

    @property
    def host_tier_bytes(self) -> int:
        """The native backend's KV cache is in host memory: there is no tier between it and the disk."""
        return 0 if self.backend == "native" else self.offload_bytes

    @property
    def gpu_dtype(self) -> str:
        """The type of activations on a GPU."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def kv_dtype(self) -> str:
        """What keys and values are stored in; `auto` is left to the CPU's cache."""
        return self.gpu_dtype if self.on_gpu and self.kv_cache_dtype == "auto" else self.kv_cache_dtype
