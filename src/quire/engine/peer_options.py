"""Options that people type from the guides of other engines. Each is an option of ours, has no effect, or is refused.

An option that only steers what is decided here by itself has no effect, and a warning says so. One that would change
answers, capacity, safety or placement is refused by name. Values are compared as they are written on a command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another name of an option of ours. `values`: a value there -> the value here; None leaves the default."""

    option: str
    values: Mapping[str, Any] = field(default_factory=dict)
    switch: bool = False  # a flag without a value


@dataclass(frozen=True, slots=True)
class NoEffect:
    reason: str
    switch: bool = False


@dataclass(frozen=True, slots=True)
class Only:
    """These values ask for nothing; every other one is refused."""

    values: tuple[str, ...]
    reason: str
    switch: bool = False


PeerOption = Renamed | NoEffect | Only

_OFF = ("false", "none")
_ON = {"true": True, "false": False}
_NEGATED = {"true": False, "false": True}
_AUTOMATIC = {"0": None, "-1": None, "auto": None}
_KV_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "q8_0": "int8"}

_ONE_MODEL = Only(
    ("1", "none"), "ranks are on one machine, stages may be on several: tensor_parallel_size, pipeline_stages"
)
_ONE_MACHINE = NoEffect("the engine starts its ranks itself, and tells them how to meet")
_CHUNKS = NoEffect("prompts are always computed in chunks of max_num_batched_tokens beside the answers", switch=True)
_KERNELS = NoEffect("kernels are chosen by what the machine has")
_GRAPHS = NoEffect("sizes of CUDA graphs are chosen by measuring them")
_GRAMMARS = NoEffect("structured output has one backend")
_TEXT_ONLY = NoEffect("models are served for text")
_LOGS = NoEffect("prompts are never logged, and requests with --access-log only", switch=True)
_FILES = Only(_OFF, "models are kept in the Hugging Face cache: set HF_HOME, or QUIRE_CACHE for the default model")
_ROPE = Only(_OFF, "positions are scaled as the checkpoint says")
_STATES = Only(
    ("auto", "float32"),
    "states of running sequences are float32; those of prefixes are set with state_checkpoint_dtype",
)
_CODE = Only(_OFF, "no code is loaded from outside")
_BEYOND = "prefixes beyond the KV cache are kept with kv_disk_path, and beside a GPU with kv_offloading_size"
_SAVED_PROMPTS = Only(_OFF, "every prefix is kept, and found again by itself, with kv_disk_path")
_CHECKPOINTS = NoEffect("states and windows of prefixes are kept as long as there is room")
_HOST_COPIES = NoEffect("blocks are copied to host memory and back as they lie in the KV cache")
_DISK_CACHE = Only(_OFF, "set kv_disk_path to a directory, which engines may share")
_PREFILL_PEERS = NoEffect("kv_transfer_config names the address of the prefill engine")
_DRAFTS = Only(_OFF, "speculative decoding is set with speculative_config, or spec_method and spec_tokens")

_VLLM: dict[str, PeerOption] = {
    "allowed_headers": NoEffect("every header is allowed"),
    "allowed_methods": NoEffect("every method is allowed"),
    "api_server_count": Only(("1", "none"), "one process serves HTTP"),
    "async_scheduling": NoEffect("steps are planned ahead on a GPU", switch=True),
    "attention_backend": _KERNELS,
    "block_manager_version": NoEffect("there is one block pool"),
    "chat_template_content_format": NoEffect("both forms of content are taken"),
    "code_revision": NoEffect("no code is downloaded"),
    "collect_detailed_traces": NoEffect("spans have the times of every request"),
    "compilation_config": _KERNELS,
    "config": Only((), "give flags, or QUIRE_ environment variables"),
    "config_format": Only(("auto", "hf"), "config.json and GGUF metadata are read"),
    "cpu_offload_gb": Renamed("offload_weights"),
    "cuda_graph_sizes": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "data_parallel_backend": Renamed("distributed_executor_backend"),
    "decode_context_parallel_size": _ONE_MODEL,
    "disable_custom_all_reduce": NoEffect("collectives are chosen by what the machine has", switch=True),
    "disable_frontend_multiprocessing": NoEffect("the engine is a process of its own", switch=True),
    "disable_hybrid_kv_cache_manager": NoEffect("there is one block pool", switch=True),
    "disable_log_requests": _LOGS,
    "disable_log_stats": NoEffect("/metrics is always there", switch=True),
    "disable_mm_preprocessor_cache": NoEffect(_TEXT_ONLY.reason, switch=True),
    "disable_sliding_window": Only(_OFF, "windows are the checkpoint's", switch=True),
    "disable_uvicorn_access_log": _LOGS,
    "download_dir": _FILES,
    "enable_auto_tool_choice": NoEffect("tools are called whenever a request brings them", switch=True),
    "enable_chunked_prefill": _CHUNKS,
    "enable_force_include_usage": Only(_OFF, "streams have usage where stream_options ask for it", switch=True),
    "enable_log_requests": Renamed("access_log", _ON, switch=True),
    "enable_prompt_tokens_details": NoEffect("usage always has them", switch=True),
    "enable_reasoning": NoEffect("reasoning is split off whenever the model marks it", switch=True),
    "enable_request_id_headers": NoEffect("every response has x-request-id", switch=True),
    "enable_server_load_tracking": NoEffect("GET /load is always there", switch=True),
    "enable_sleep_mode": Only(_OFF, "an engine does not sleep; with --models, idle ones are unloaded", switch=True),
    "fully_sharded_loras": NoEffect("ranks divide adapters by the outputs of B", switch=True),
    "grpc": Only(_OFF, "requests come by HTTP", switch=True),
    "guided_decoding_backend": _GRAMMARS,
    "headless": Only(_OFF, "a server has an API", switch=True),
    "hf_overrides": Only(("{}", *_OFF), "the configuration is the checkpoint's own"),
    "hf_token": Only(("true", *_OFF), "set HF_TOKEN"),
    "ignore_patterns": NoEffect("only files that are read are downloaded"),
    "kv_offloading_backend": Only(("native", "none"), f"blocks are kept by the engine itself: {_BEYOND}"),
    "limit_mm_per_prompt": _TEXT_ONLY,
    "logits_processors": _CODE,
    "logprobs_mode": Only(("raw_logprobs", "none"), "logprobs are those of the model, before sampling filters"),
    "lora_dtype": NoEffect("adapters are computed in the type of the activations"),
    "lora_extra_vocab_size": NoEffect("adapters have no tokens of their own"),
    "mamba_cache_dtype": _STATES,
    "mamba_ssm_cache_dtype": _STATES,
    "max_context_len_to_capture": _GRAPHS,
    "max_cpu_loras": NoEffect("loaded adapters stay in memory"),
    "max_cudagraph_capture_size": _GRAPHS,
    "max_log_len": NoEffect(_LOGS.reason),
    "max_logprobs": Only(tuple(map(str, range(21))), "20 at most"),
    "max_num_partial_prefills": NoEffect("prompts share the token budget of a step"),
    "max_parallel_loading_workers": NoEffect("weights are mapped and packed by all threads"),
    "max_seq_len_to_capture": _GRAPHS,
    "middleware": _CODE,
    "mm_processor_cache_gb": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "model_impl": Only(("auto", "vllm", "none"), "models run on the op set of this engine"),
    "nnodes": _ONE_MODEL,
    "node_rank": _ONE_MACHINE,
    "num_gpu_blocks_override": Only(_OFF, "set kv_cache_memory_bytes"),
    "num_lookahead_slots": NoEffect("draft tokens get slots as they need them"),
    "num_scheduler_steps": NoEffect("every step is planned"),
    "optimization_level": _KERNELS,
    "per_request_spec_decode_metrics": NoEffect("answers tell what was accepted wherever draft tokens were verified"),
    "performance_mode": NoEffect("target_itl_ms and max_num_batched_tokens balance latency and throughput"),
    "preemption_mode": NoEffect("preempted sequences are swapped where there is swap_space, else computed again"),
    "prefill_context_parallel_size": _ONE_MODEL,
    "prefix_caching_hash_algo": NoEffect("prefixes are compared by their tokens"),
    "response_role": Only(("assistant",), "answers come from the assistant"),
    "return_tokens_as_token_ids": Only(_OFF, "requests ask for it", switch=True),
    "rope_scaling": _ROPE,
    "rope_theta": _ROPE,
    "runner": Renamed("task", {"pooling": "embed"}),
    "scheduler_cls": _CODE,
    "shutdown_timeout": Renamed("drain_timeout"),
    "skip_mm_profiling": NoEffect(_TEXT_ONLY.reason, switch=True),
    "skip_tokenizer_init": Only(_OFF, "text is tokenized here", switch=True),
    "ssl_ca_certs": Only(_OFF, "certificates of clients are not checked: let a proxy do that"),
    "stream_interval": Only(("1", "none"), "every token is streamed"),
    "tokenizer_mode": Only(("auto", "fast", "slow", "hf"), "the checkpoint's files decide which tokenizer is read"),
    "tokenizer_revision": Only(_OFF, "the tokenizer has the model's revision"),
    "tool_parser_plugin": _CODE,
    "tool_server": Only(_OFF, "tools are called by clients"),
    "trust_remote_code": NoEffect("remote code is never run", switch=True),
    "use_v2_block_manager": NoEffect("there is one block pool", switch=True),
    "uvicorn_log_level": Renamed("log_level", {"trace": "debug", "critical": "error"}),
    "worker_use_ray": Renamed("distributed_executor_backend", {"true": "ray", "false": None}, switch=True),
}

_TGI: dict[str, PeerOption] = {
    "cors_allow_origin": Renamed("allowed_origins"),
    "cuda_graphs": _GRAPHS,
    "cuda_memory_fraction": Renamed("gpu_memory_utilization"),
    "disable_custom_kernels": NoEffect(_KERNELS.reason, switch=True),
    "disable_grammar_support": Only(_OFF, "structured output is always there", switch=True),
    "enable_prefill_logprobs": NoEffect("they are computed for requests that ask", switch=True),
    "env": NoEffect("`quire doctor` shows the machine", switch=True),
    "graceful_termination_timeout": Renamed("drain_timeout"),
    "hostname": Renamed("host"),
    "huggingface_hub_cache": _FILES,
    "json_output": Renamed("log_format", {"true": "json", "false": "text"}, switch=True),
    "lora_adapters": Renamed("lora_modules"),
    "master_addr": _ONE_MACHINE,
    "master_port": _ONE_MACHINE,
    "max_batch_prefill_tokens": Renamed("max_num_batched_tokens"),
    "max_batch_size": Renamed("max_num_seqs"),
    "max_batch_total_tokens": NoEffect("kv_cache_memory_bytes sizes the cache, and what it holds is used"),
    "max_best_of": NoEffect("128 at most"),
    "max_client_batch_size": NoEffect("every prompt is a request of its own"),
    "max_concurrent_requests": Renamed("max_queued_requests"),
    "max_input_length": NoEffect("max_model_len limits prompt and output together"),
    "max_input_tokens": NoEffect("max_model_len limits prompt and output together"),
    "max_stop_sequences": NoEffect("64 at most"),
    "max_top_n_tokens": NoEffect("20 at most"),
    "max_total_tokens": Renamed("max_model_len"),
    "max_waiting_tokens": NoEffect("waiting requests are admitted in every step that has room"),
    "model_id": Renamed("model"),
    "num_shard": Renamed("tensor_parallel_size"),
    "otlp_endpoint": Renamed("otlp_traces_endpoint"),
    "otlp_service_name": NoEffect("set OTEL_SERVICE_NAME"),
    "payload_limit": Renamed("max_body_bytes"),
    "prometheus_port": NoEffect("/metrics is on the port of the API"),
    "quantize": Renamed("quantization"),
    "rope_factor": _ROPE,
    "shard_uds_path": _ONE_MACHINE,
    "sharded": Only(_OFF, _ONE_MODEL.reason),
    "speculate": Only(("0", *_OFF), _DRAFTS.reason),
    "tokenizer_config_path": Only(_OFF, "set tokenizer to the directory of another tokenizer"),
    "usage_stats": NoEffect("nothing is ever sent anywhere"),
    "validation_workers": NoEffect("long prompts are tokenized in threads"),
    "waiting_served_ratio": NoEffect("waiting requests are admitted in every step that has room"),
    "weights_cache_override": _FILES,
}

_LLAMA_SERVER: dict[str, PeerOption] = {
    "alias": Renamed("served_model_name"),
    "batch_size": Renamed("max_num_batched_tokens"),
    "cache_prompt": Renamed("enable_prefix_caching", _ON, switch=True),
    "cache_ram": NoEffect(f"kv_cache_memory_bytes sizes the KV cache, and {_BEYOND}"),
    "cache_reuse": NoEffect("the longest prefix is always reused, and what follows a change is computed"),
    "cache_type_k": Renamed("kv_cache_dtype", _KV_TYPES),
    "cache_type_v": Renamed("kv_cache_dtype", _KV_TYPES),
    "cont_batching": NoEffect("batching is always continuous", switch=True),
    "ctx_checkpoints": _CHECKPOINTS,
    "ctx_size": Renamed("max_model_len", _AUTOMATIC),
    "defrag_thold": NoEffect("a KV cache of blocks does not need to be defragmented"),
    "embedding": Renamed("task", {"true": "embed", "false": "generate"}, switch=True),
    "embeddings": Renamed("task", {"true": "embed", "false": "generate"}, switch=True),
    "flash_attn": _KERNELS,
    "hf_file": Only(_OFF, "write the file behind the repository: --model OWNER/NAME:FILE"),
    "hf_repo": Renamed("model"),
    "jinja": NoEffect("chat templates are always Jinja", switch=True),
    "kv_offload": Only(("true",), "the KV cache of a layer is where the layer is: set gpu_layers", switch=True),
    "kv_unified": NoEffect("there is one block pool", switch=True),
    "metrics": NoEffect("/metrics is always there", switch=True),
    "mlock": NoEffect("packed weights are in memory, and the file is not read again", switch=True),
    "mmap": NoEffect("weights are mapped while they are packed", switch=True),
    "model_draft": _DRAFTS,
    "n_gpu_layers": Renamed("gpu_layers", {"-1": None, "auto": None, "all": None}),
    "n_parallel": Renamed("max_num_seqs", _AUTOMATIC),
    "n_predict": Renamed("max_tokens", _AUTOMATIC),
    "num_predict": Renamed("max_tokens", _AUTOMATIC),
    "parallel": Renamed("max_num_seqs", _AUTOMATIC),
    "predict": Renamed("max_tokens", _AUTOMATIC),
    "prompt_cache": _SAVED_PROMPTS,
    "prompt_cache_all": Only(_OFF, _SAVED_PROMPTS.reason, switch=True),
    "prompt_cache_ro": Only(_OFF, _SAVED_PROMPTS.reason, switch=True),
    "repeat_penalty": Renamed("repetition_penalty"),
    "reranking": NoEffect("a cross-encoder is served as one", switch=True),
    "slot_prompt_similarity": NoEffect("a prompt continues the longest prefix that is cached"),
    "slot_save_path": _SAVED_PROMPTS,
    "slots": NoEffect("GET /live shows what runs", switch=True),
    "swa_checkpoints": _CHECKPOINTS,
    "swa_full": NoEffect("a window is kept with the prefix that it ends", switch=True),
    "temp": Renamed("temperature"),
    "threads_batch": NoEffect("threads are for all steps"),
    "ubatch_size": NoEffect("max_num_batched_tokens is the size of a step"),
}

_SGLANG: dict[str, PeerOption] = {
    "chunked_prefill_size": Renamed("max_num_batched_tokens", {"-1": None}),
    "context_length": Renamed("max_model_len"),
    "cuda_graph_max_bs": _GRAPHS,
    "decode_attention_backend": _KERNELS,
    "disable_cuda_graph": Renamed("enforce_eager", _ON, switch=True),
    "disable_overlap_schedule": NoEffect("steps are planned ahead on a GPU", switch=True),
    "disable_radix_cache": Renamed("enable_prefix_caching", _NEGATED, switch=True),
    "disaggregation_bootstrap_port": _PREFILL_PEERS,
    "disaggregation_ib_device": _PREFILL_PEERS,
    "disaggregation_mode": Only(
        ("null", "none"), "set prefill_engines and decode_engines on one machine, kv_transfer_config on several"
    ),
    "disaggregation_transfer_backend": _PREFILL_PEERS,
    "dp_size": Renamed("data_parallel_size"),
    "enable_cache_report": NoEffect("usage always has cached tokens", switch=True),
    "enable_deterministic_inference": Renamed("batch_invariant", _ON, switch=True),
    "enable_hierarchical_cache": NoEffect(
        "host memory keeps prefixes where kv_offloading_size (hicache_size) says how much, a disk where kv_disk_path "
        "says where",
        switch=True,
    ),
    "enable_lmcache": Only(_OFF, _BEYOND, switch=True),
    "enable_metrics": NoEffect("/metrics is always there", switch=True),
    "enable_mixed_chunk": _CHUNKS,
    "enable_torch_compile": NoEffect(_KERNELS.reason, switch=True),
    "ep_size": _ONE_MODEL,
    "grammar_backend": _GRAMMARS,
    "hicache_io_backend": _HOST_COPIES,
    "hicache_mem_layout": _HOST_COPIES,
    "hicache_ratio": Only((), "host memory is not sized by the KV cache: set kv_offloading_size, in GiB"),
    "hicache_size": Renamed("kv_offloading_size", {"0": None}),
    "hicache_storage_backend": _DISK_CACHE,
    "hicache_storage_backend_extra_config": _DISK_CACHE,
    "hicache_storage_prefetch_policy": NoEffect("a prompt waits for the disk where that is quicker than computing"),
    "hicache_write_policy": NoEffect(
        "blocks go to host memory once they are full, and to the disk as kv_disk_write_policy says"
    ),
    "is_embedding": Renamed("task", {"true": "embed", "false": "generate"}, switch=True),
    "load_balance_method": NoEffect("a request goes where its prefix is cached, or where there is least to do"),
    "log_requests": Renamed("access_log", _ON, switch=True),
    "lora_paths": Renamed("lora_modules"),
    "max_loras_per_batch": Renamed("max_loras"),
    "max_new_tokens": Renamed("max_tokens"),
    "max_prefill_tokens": NoEffect("max_num_batched_tokens is the size of a step"),
    "max_queue": Renamed("max_queued_requests"),
    "max_running_requests": Renamed("max_num_seqs"),
    "mem_fraction_static": Renamed("gpu_memory_utilization"),
    "model_path": Renamed("model"),
    "page_size": Renamed("block_size"),
    "pp_size": Renamed("pipeline_parallel_size"),
    "prefill_attention_backend": _KERNELS,
    "radix_eviction_policy": Only(("lru",), "the least recently used block goes first"),
    "random_seed": Renamed("seed"),
    "sampling_backend": _KERNELS,
    "sampling_defaults": Renamed("generation_config", {"model": "auto", "openai": "none"}),
    "schedule_conservativeness": NoEffect("blocks are taken as they are needed, and preemption makes room"),
    "schedule_policy": Renamed("scheduling_policy"),
    "skip_server_warmup": NoEffect("the server answers as soon as the model is loaded", switch=True),
    "speculative_algorithm": _DRAFTS,
    "tokenizer_path": Renamed("tokenizer"),
    "tp_size": Renamed("tensor_parallel_size"),
    "watchdog_timeout": NoEffect("an engine that dies is restarted at once"),
}

_TRANSFORMERS: dict[str, PeerOption] = {
    "attn_implementation": _KERNELS,
    "cache_dir": _FILES,
    "device_map": Only(("auto", "cpu", "cuda", "cuda:0", "none"), _ONE_MODEL.reason),
    "load_in_4bit": Renamed("quantization", {"true": "nf4", "false": None}, switch=True),
    "load_in_8bit": Renamed("quantization", {"true": "int8", "false": None}, switch=True),
    "local_files_only": Only(_OFF, "set HF_HUB_OFFLINE=1", switch=True),
    "low_cpu_mem_usage": NoEffect("weights are mapped while they are packed", switch=True),
    "max_memory": Only(_OFF, _ONE_MODEL.reason),
    "quantization_config": Only(_OFF, "set quantization to int8, int4, nf4 or fp8"),
    "torch_dtype": Renamed("dtype"),
    "use_auth_token": Only(("true", *_OFF), "set HF_TOKEN"),
    "use_safetensors": NoEffect("safetensors are read where there are any", switch=True),
}

PEER_OPTIONS: dict[str, PeerOption] = {**_VLLM, **_TGI, **_LLAMA_SERVER, **_SGLANG, **_TRANSFORMERS}

# Flags of one dash, and names that are short: -> the option they stand for.
SHORT_FLAGS = {
    "-O": "optimization_level",
    "-a": "alias",
    "-b": "batch_size",
    "-c": "ctx_size",
    "-cb": "cont_batching",
    "-cc": "compilation_config",
    "-cram": "cache_ram",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-ctxcp": "ctx_checkpoints",
    "-dp": "data_parallel_size",
    "-dt": "defrag_thold",
    "-fa": "flash_attn",
    "-hf": "hf_repo",
    "-hff": "hf_file",
    "-kvu": "kv_unified",
    "-m": "model",
    "-md": "model_draft",
    "-n": "n_predict",
    "-ngl": "n_gpu_layers",
    "-nkvo": "kv_offload",
    "-np": "parallel",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-s": "seed",
    "-sps": "slot_prompt_similarity",
    "-t": "threads",
    "-tb": "threads_batch",
    "-tp": "tensor_parallel_size",
    "-ub": "ubatch_size",
    "--dp": "dp_size",
    "--ep": "ep_size",
    "--pp": "pp_size",
    "--tp": "tp_size",
}
NEGATED_FLAGS = ("-nkvo",)  # switches that turn the option off


def written(value: Any) -> str:
    """A keyword's value as on a command line."""
    return str(value).lower()


def translate(peer: Renamed, value: Any) -> Any:
    """The value of our option; None leaves its default."""
    return peer.values.get(written(value), value)


def warning(name: str, peer: NoEffect | Only, value: Any) -> str:
    """What to say of an option that is left out; "" where it asks for nothing. A value that could never work raises
    `BadRequest`."""
    if isinstance(peer, NoEffect):
        return f"{name} has no effect: {peer.reason}"
    if written(value) not in peer.values:
        raise BadRequest(f"{name} is {value}, and that is not possible here", peer.reason, param=name)
    return ""
