"""The numbers that a server exposes: their names, those of vLLM's dashboards, what they are, and where they stand."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from quire.server.observe.histogram import Histogram
from quire.server.observe.metrics import ModelMetrics
from quire.server.observe.nvml import GPUReading

Value = TypeVar("Value")


class ModelMetric(NamedTuple, Generic[Value]):
    name: str  # after quire_
    aliases: tuple[str, ...]  # after vllm:
    help: str
    of: Callable[[ModelMetrics], Value]


GAUGES: list[ModelMetric[float]] = [
    ModelMetric(
        "num_requests_running",
        ("num_requests_running",),
        "Sequences that take part in steps.",
        lambda model: model.now.running,
    ),
    ModelMetric(
        "num_requests_waiting",
        ("num_requests_waiting",),
        "Sequences that wait to be admitted.",
        lambda model: model.now.waiting,
    ),
    ModelMetric(
        "kv_cache_usage_ratio",
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "Blocks of the KV cache held by sequences, of all blocks.",
        lambda model: model.now.held_blocks / model.now.num_blocks if model.now.num_blocks else 0.0,
    ),
    ModelMetric(
        "kv_cache_waste_ratio",
        (),
        "Slots of held blocks that no token occupies, of all slots of held blocks.",
        lambda model: 1.0 - model.now.used_slots / model.now.held_slots if model.now.held_slots else 0.0,
    ),
    ModelMetric("model_loaded", (), "1 while there is an engine for the model.", lambda model: model.is_loaded),
    ModelMetric("engines_ready", (), "Engines of the model that take requests.", lambda model: model.num_ready()),
    ModelMetric("kv_cache_blocks", (), "Blocks of the KV cache.", lambda model: model.now.num_blocks),
    ModelMetric(
        "kv_cache_cached_blocks",
        (),
        "Free blocks that still carry a reusable prefix.",
        lambda model: model.now.cached_blocks,
    ),
]

COUNTERS: list[ModelMetric[float]] = [
    ModelMetric(
        "prompt_tokens", ("prompt_tokens",), "Prompt tokens of requests that ended.", lambda m: m.prompt_tokens
    ),
    ModelMetric(
        "prompt_tokens_cached",
        ("prompt_tokens_cached",),
        "Prompt tokens of requests that ended which came from the cache.",
        lambda model: model.cached_tokens,
    ),
    ModelMetric("generation_tokens", ("generation_tokens",), "Tokens sampled.", lambda model: model.generation_tokens),
    ModelMetric(
        "prefix_cache_queries",
        ("prefix_cache_queries",),
        "Prompt tokens looked up in the cache.",
        lambda model: model.total("prefix_queries"),
    ),
    ModelMetric(
        "prefix_cache_hits",
        ("prefix_cache_hits",),
        "Prompt tokens found in the cache.",
        lambda model: model.total("prefix_hits"),
    ),
    ModelMetric(
        "preemptions",
        ("num_preemptions",),
        "Sequences preempted to make room.",
        lambda model: model.total("preemptions"),
    ),
    ModelMetric(
        "spec_decode_num_drafts",
        ("spec_decode_num_drafts",),
        "Times that draft tokens of a sequence were verified.",
        lambda model: model.total("drafts"),
    ),
    ModelMetric(
        "spec_decode_num_draft_tokens",
        ("spec_decode_num_draft_tokens",),
        "Draft tokens verified.",
        lambda model: model.total("draft_tokens"),
    ),
    ModelMetric(
        "spec_decode_num_accepted_tokens",
        ("spec_decode_num_accepted_tokens",),
        "Draft tokens accepted.",
        lambda model: model.total("accepted_tokens"),
    ),
    ModelMetric("model_loads", (), "Times it was loaded.", lambda model: model.loads),
    ModelMetric("engine_restarts", (), "Times the engine died and was started again.", lambda model: model.restarts),
    ModelMetric(
        "requests_retried",
        (),
        "Requests in flight when the engine died that were given to the next one, each time.",
        lambda model: model.retried,
    ),
    ModelMetric(
        "requests_charged",
        (),
        "Requests ended with an error because the engine died each time it worked on them.",
        lambda model: model.charged,
    ),
]

HISTOGRAMS: list[ModelMetric[Histogram]] = [
    ModelMetric(
        "time_to_first_token_seconds",
        ("time_to_first_token_seconds",),
        "From arrival to the first token.",
        lambda model: model.first_token,
    ),
    ModelMetric(
        "inter_token_latency_seconds",
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "Between a sample's tokens.",
        lambda model: model.next_token,
    ),
    ModelMetric(
        "time_per_output_token_seconds",
        ("request_time_per_output_token_seconds",),
        "Mean of a request, after its first token.",
        lambda model: model.per_token,
    ),
    ModelMetric(
        "request_queue_time_seconds",
        ("request_queue_time_seconds",),
        "From arrival to the first step that computes some of the request.",
        lambda model: model.queue,
    ),
    ModelMetric(
        "request_prefill_time_seconds",
        ("request_prefill_time_seconds",),
        "From its first step to the first token.",
        lambda model: model.prefill,
    ),
    ModelMetric(
        "request_inference_time_seconds",
        ("request_inference_time_seconds",),
        "From its first step to the last token.",
        lambda model: model.inference,
    ),
    ModelMetric(
        "e2e_request_latency_seconds",
        ("e2e_request_latency_seconds",),
        "From arrival to the end.",
        lambda model: model.whole,
    ),
    ModelMetric(
        "request_decode_time_seconds",
        ("request_decode_time_seconds",),
        "From the first token to the last.",
        lambda model: model.decode,
    ),
    ModelMetric(
        "request_prompt_tokens",
        ("request_prompt_tokens",),
        "Prompt tokens of a request.",
        lambda model: model.request_prompt,
    ),
    ModelMetric(
        "request_prefill_computed_tokens",
        ("request_prefill_kv_computed_tokens",),
        "Prompt tokens of a request that did not come from the cache.",
        lambda model: model.request_computed,
    ),
    ModelMetric(
        "request_max_num_generation_tokens",
        ("request_max_num_generation_tokens",),
        "Tokens sampled for the longest sample of a request.",
        lambda model: model.request_longest_output,
    ),
    ModelMetric(
        "request_generation_tokens",
        ("request_generation_tokens",),
        "Tokens sampled for a request.",
        lambda model: model.request_output,
    ),
    ModelMetric(
        "request_params_max_tokens",
        ("request_params_max_tokens",),
        "max_tokens of a request.",
        lambda model: model.request_max_tokens,
    ),
    ModelMetric("request_params_n", ("request_params_n",), "Samples of a request.", lambda m: m.request_samples),
    ModelMetric("step_tokens", ("iteration_tokens_total",), "Tokens computed in a step.", lambda m: m.step_tokens),
]

GPU_GAUGES: list[tuple[str, str, Callable[[GPUReading], float | None]]] = [
    ("utilization_ratio", "Share of the last moment in which a kernel ran on the GPU.", lambda gpu: gpu.utilization),
    ("memory_used_bytes", "Memory of the GPU that is used, by all processes.", lambda gpu: gpu.memory_used),
    ("memory_total_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_total),
    ("power_watts", "Power that the GPU draws.", lambda gpu: gpu.power),
    ("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature),
]

TIER_COUNTERS = {
    "hits": "Prompt tokens that came from a tier of the KV cache beyond its pool; also counted in prefix_cache_hits.",
    "seconds_saved": "Time that computing these tokens takes, less the time until they were there.",
    "read_bytes": "Bytes of blocks read from a tier.",
    "written_bytes": "Bytes of blocks written to a tier.",
    "errors": "Reads from a tier and writes to it that failed.",
    "skipped_blocks": "Blocks that were evicted before a tier could take them, or came while it could not.",
}

TRANSFER_COUNTERS = {
    "prefills": "Prompts that a decode engine has asked other engines to compute.",
    "failed": "Prompts of which not all blocks arrived: another engine computed the rest, or the one that asked.",
    "tokens": "Prompt tokens whose keys and values arrived from other engines.",
    "wait_seconds": "Time that requests waited for other engines to compute their prompts, and for the blocks.",
    "received_bytes": "Bytes of blocks that arrived from other engines.",
    "sent_bytes": "Bytes of blocks sent to other engines.",
}

TRANSFER_GAUGES = {
    "in_flight": "Prompts that other engines compute now.",
    "peers": "Connections between engines that hand over KV blocks.",
}
