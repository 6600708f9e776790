"""Options of Text Generation Inference."""

from quire.engine.peers.devices import TGI as DEVICES
from quire.engine.peers.drafts import TGI as SPECULATION
from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.reasons import (
    FILES,
    GRAPHS,
    KERNELS,
    OFF,
)

TGI: dict[str, PeerOption] = {
    **SPECULATION,
    **DEVICES,
    "cors_allow_origin": Renamed("allowed_origins"),
    "cuda_graphs": GRAPHS,
    "cuda_memory_fraction": Renamed("gpu_memory_utilization"),
    "disable_custom_kernels": NoEffect(KERNELS.reason, switch=True),
    "disable_grammar_support": Only(OFF, "structured output is always there", switch=True),
    "enable_prefill_logprobs": NoEffect("they are computed for requests that ask", switch=True),
    "env": NoEffect("`quire doctor` shows the machine", switch=True),
    "graceful_termination_timeout": Renamed("drain_timeout"),
    "hostname": Renamed("host"),
    "huggingface_hub_cache": FILES,
    "json_output": Renamed("log_format", {"true": "json", "false": "text"}, switch=True),
    "lora_adapters": Renamed("lora_modules"),
    "max_active_adapters": Renamed("max_loras"),
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
    "ngrok": Only(OFF, "let a proxy make the server public", switch=True),
    "otlp_endpoint": Renamed("otlp_traces_endpoint"),
    "otlp_service_name": NoEffect("set OTEL_SERVICE_NAME"),
    "payload_limit": Renamed("max_body_bytes"),
    "prometheus_port": NoEffect("/metrics is on the port of the API"),
    "quantize": Renamed("quantization"),
    "rope_factor": Renamed("rope_scale"),
    "tokenizer_config_path": Only(OFF, "set tokenizer to the directory of another tokenizer"),
    "usage_stats": NoEffect("nothing is ever sent anywhere"),
    "validation_workers": NoEffect("long prompts are tokenized in threads"),
    "waiting_served_ratio": NoEffect("waiting requests are admitted in every step that has room"),
    "weights_cache_override": FILES,
}
