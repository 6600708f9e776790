"""What fills the memory: weights, KV cache, activations, adapters and the process itself."""

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from math import ceil

from quire.core.errors import BadRequest
from quire.core.sliding_window import SlidingWindow
from quire.ops.kv_spec import KVSpec
from quire.planning import gpu_memory, native_memory
from quire.planning.planned_model import PlannedModel
from quire.planning.step_counter import StepShape
from quire.runtime.kv import sequence_state_bytes
from quire.runtime.window_pages import windowed_layers, with_window_pages


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
    """Bytes at the peak of a load."""

    weights: int
    kv_cache: int
    activations: int  # of a step, its logits, and buffers of kernels; on a GPU also CUDA graphs
    adapters: int
    draft: int  # the draft model's weights and KV cache
    process: int  # interpreter and libraries; on a GPU torch's and CUDA's context
    tables: int  # embedding tables in mapped files: the system may drop these pages, and reads them again
    loading: int = 0  # what loading the weights takes for a moment, where that is more than all of the above

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The options of an engine that its memory depends on, besides the model."""

    max_num_batched_tokens: int = 512
    lora_rank: int = 0
    num_loras: int = 0
    num_drafts: int = 0  # draft tokens a sequence and step
    threads: int = 8  # of a CPU

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1 if field.name in ("max_num_batched_tokens", "threads") else 0
            if (value := getattr(self, field.name)) < least:
                raise BadRequest(f"{field.name} is {value}", f"it must be at least {least}", param=field.name)


RUN_BYTES = 600 << 10  # by which the peak of a CPU engine differs from run to run
CPU_PROCESS_BYTES = 42 << 20  # of an engine process without a model, on Linux; this machine's own is measured


def plan_memory(
    model: PlannedModel, kv: KVSpec, load: Load, *, limits: EngineLimits | None = None, on_gpu: bool = False,
    process: int | None = None, max_num_batched_tokens: int = 512,
) -> MemoryPlan:  # fmt: skip
    """`process`: bytes of an engine process without a model; None: a usual one."""
    limits = limits or EngineLimits(max_num_batched_tokens=max_num_batched_tokens)
    if on_gpu:
        return _plan_gpu(model, kv, load, limits, process)
    return _plan_cpu(model, kv, load, limits, process)


def _plan_cpu(model: PlannedModel, kv: KVSpec, load: Load, limits: EngineLimits, process: int | None) -> MemoryPlan:
    step = model.step(StepShape(1), kv)
    max_tokens = max(limits.max_num_batched_tokens, load.users)
    buffers = native_memory.step_buffers(
        step, kv, max_tokens=min(max_tokens, load.users * load.context), context=load.context, threads=limits.threads,
        num_rows=load.users, num_drafts=limits.num_drafts,
    )  # fmt: skip
    rank = limits.lora_rank if limits.num_loras else 0
    plan = MemoryPlan(
        weights=native_memory.weight_pages(model.allocations) + model.vector_bytes,
        kv_cache=cache_bytes(model, kv, load.users, load.context, limits.max_num_batched_tokens),
        activations=buffers + native_memory.token_bytes(load.users, load.context, kv.block_size),
        adapters=native_memory.adapter_bytes(model.linears, rank, limits.num_loras)
        + (native_memory.adapter_buffers(model.linears, rank, max_tokens) if rank else 0),
        draft=0,
        process=RUN_BYTES + (CPU_PROCESS_BYTES if process is None else process),
        tables=model.table_bytes + native_memory.MAPPED_ENDS,
    )
    loading = plan.process + native_memory.loading_peak(model.allocations, model.copies)
    return replace(plan, loading=max(0, loading - plan.total))


def _plan_gpu(model: PlannedModel, kv: KVSpec, load: Load, limits: EngineLimits, process: int | None) -> MemoryPlan:
    step = model.step(StepShape(1), kv)
    max_tokens = max(limits.max_num_batched_tokens * (2 if limits.num_drafts else 1), load.users)  # drafts beside
    rows = load.users
    eager = gpu_memory.step_bytes(step, max_tokens, min(rows * (1 + limits.num_drafts), max_tokens))
    captured = gpu_memory.step_bytes(step, min(max_tokens, gpu_memory.PREFILL_GRAPH_SIZES[-1]), min(rows, max_tokens))
    in_graphs = min(max_tokens, gpu_memory.PREFILL_GRAPH_SIZES[-1])  # a graph's memory is its own
    kept = gpu_memory.kept_bytes(model.config.layers, model.config.hidden, max_tokens + in_graphs)
    graphs = gpu_memory.graph_bytes(model.config.layers, max_tokens, rows, load.context, kv.block_size)
    rank = limits.lora_rank if limits.num_loras else 0
    return MemoryPlan(
        weights=gpu_memory.reserved(model.allocations) + model.vector_bytes,
        kv_cache=cache_bytes(model, kv, load.users, load.context, limits.max_num_batched_tokens, ahead=1),
        activations=eager + captured + kept + graphs + gpu_memory.sampler_bytes(rows, step.vocab),
        adapters=limits.num_loras * gpu_memory.slot_bytes(model.linears, rank),
        draft=0,
        process=gpu_memory.CONTEXT_BYTES + gpu_memory.WORKSPACE_BYTES if process is None else process,
        tables=0,
    )


def sequence_bytes(model: PlannedModel, kv: KVSpec, context: int, max_chunk: int = 512, ahead: int = 0) -> int:
    """KV cache of one sequence: whole blocks, no more than its windows need; and the state slots it has in turn."""
    window = SlidingWindow(model.config.window, kv.block_size, max_chunk=max_chunk, ahead=ahead)
    return window.max_blocks(context) * kv.block_bytes + sequence_state_bytes(kv.states)


def cache_bytes(model: PlannedModel, kv: KVSpec, users: int, context: int, max_chunk: int = 512, ahead: int = 0) -> int:
    """KV cache of `users` sequences. Layers with a window keep what it reaches, where other layers keep everything."""
    num_blocks = users * -(-context // kv.block_size)
    limits = {"max_model_len": context, "max_num_seqs": users, "max_num_batched_tokens": max_chunk, "ahead": ahead}
    spec = with_window_pages(model.config, kv, num_blocks, **limits)
    if spec.windows is None:
        return users * sequence_bytes(model, kv, context, max_chunk, ahead)
    return num_blocks * spec.block_bytes + spec.windows.num_pages * spec.page_bytes


def users_that_fit(model: PlannedModel, kv: KVSpec, context: int, room: int, ahead: int = 0) -> int:
    """Sequences of `context` tokens whose KV cache fits in `room` bytes."""
    least = max(0, room // sequence_bytes(model, kv, context))
    if not windowed_layers(model.config):
        return least
    most = least + max(0, room // kv.block_bytes)  # that many blocks
    users = range(least + 1, most + 1)
    return least + bisect_right(users, room, key=lambda count: cache_bytes(model, kv, count, context, ahead=ahead))


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
    return [KVVariant(name, config.kv_layers * heads * head_dim * bytes_per_number) for name, heads in rows]
