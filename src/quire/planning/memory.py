"""What fills the memory: weights, KV cache, activations, adapters and the process itself."""

from dataclasses import dataclass, fields
from math import ceil

from quire.core.errors import BadRequest
from quire.core.sliding_window import SlidingWindow
from quire.ops.opset import KVSpec
from quire.planning.planned_model import PlannedModel
from quire.planning.step_counter import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be served: `users` at once, each with a prompt and an output, `context` tokens in all at most."""

    users: int = 1
    context: int = 4096
    prompt: int = 1024
    output: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                value = getattr(self, field.name)
                raise BadRequest(f"{field.name} is {value}", f"{field.name} must be at least 1", param=field.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes."""

    weights: int
    kv_cache: int
    activations: int
    adapters: int
    process: int  # interpreter, libraries, buffers; on a GPU its context and graphs

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.adapters + self.process


CPU_PROCESS_BYTES = 96 << 20  # of the engine process before a model is loaded, and buffers of its first steps
GPU_PROCESS_BYTES = 1 << 30  # a CUDA context, the kernels, and graphs


def plan_memory(
    model: PlannedModel, kv: KVSpec, load: Load, *, max_num_batched_tokens: int = 512, lora_rank: int = 0,
    num_loras: int = 0, on_gpu: bool = False,
) -> MemoryPlan:  # fmt: skip
    step = model.step(StepShape(1, 1, 1), kv)
    arena = step.arena_bytes(max_num_batched_tokens)
    logits = 4 * model.config.vocab * min(load.users, max_num_batched_tokens)
    return MemoryPlan(
        weights=model.weight_bytes,
        kv_cache=load.users * sequence_bytes(model, kv, load.context, max_num_batched_tokens),
        activations=(arena // 2 if on_gpu else arena) + logits,
        adapters=num_loras * lora_bytes(model, lora_rank),
        process=GPU_PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES,
    )


def sequence_bytes(model: PlannedModel, kv: KVSpec, context: int, max_chunk: int = 512) -> int:
    """KV cache of one sequence: whole blocks, no more than its windows need."""
    window = SlidingWindow(model.config.window, kv.block_size, max_chunk=max_chunk, ahead=0)
    return window.max_blocks(context) * kv.block_bytes


def users_that_fit(model: PlannedModel, kv: KVSpec, context: int, room: int) -> int:
    """Sequences of `context` tokens whose KV cache fits in `room` bytes."""
    return max(0, room // sequence_bytes(model, kv, context))


def lora_bytes(model: PlannedModel, rank: int) -> int:
    """One adapter of all linear layers but the head, in 16 bits."""
    matrices = [t.shape for t in model.tensors if len(t.shape) == 2 and not t.is_table and "head" not in t.name]
    return sum(2 * rank * (outputs + inputs) for outputs, inputs in matrices)


@dataclass(frozen=True, slots=True)
class KVVariant:
    """The KV cache of the same model with another kind of attention."""

    name: str
    bytes_per_token: float


def kv_variants(model: PlannedModel, bytes_per_number: float) -> list[KVVariant]:
    """MHA, GQA, MQA and MLA for the model's own layers and heads. GQA: its own groups, or 8 query heads a group where
    it has none; MLA: DeepSeek's ratio, a latent of four heads and a rope part of half a head."""
    config = model.config
    head_dim = config.head_dim if not config.latent else 128
    own = 1 if config.latent else config.kv_heads
    grouped = own if 1 < own < config.heads else max(1, ceil(config.heads / 8))
    rows = [("MHA", 2 * config.heads), ("GQA", 2 * grouped), ("MQA", 2), ("MLA", 4.5)]
    return [KVVariant(name, config.layers * heads * head_dim * bytes_per_number) for name, heads in rows]
