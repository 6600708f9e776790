"""Every option of the engine, once. Flags, keywords of `LLM` and environment variables are made from it."""

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest
from quire.core.structured_defaults import StructuredDefaults
from quire.core.transfer_config import TransferConfig, read_transfer_config
from quire.engine.generation_advice import check_generation_override
from quire.engine.option import check_bounds, named_values, option
from quire.engine.peers import PEER_OPTIONS
from quire.engine.peers.kinds import Renamed, translate, warning
from quire.engine.placement import check_placement
from quire.engine.rope_options import rope_overrides
from quire.engine.tier_options import check_tiers
from quire.hub.aliases import DEFAULT_MODEL

if TYPE_CHECKING:
    from quire.engine.kv_events_config import KVEventsConfig
    from quire.runtime.spec.config import SpecConfig

log = logging.getLogger("quire.engine")

TARGET_ITL_MS = 30  # inter-token latency of streams while prompts are computed; first tokens come sooner, too
# What a plain checkpoint can be quantized to while it is loaded.
QUANTIZE = ("fp8", "int8", "int4", "nf4", "w8a8", "w4a8")
# What a checkpoint can be quantized as: the keys of FORMATS in weights/formats, and GGUF.
STORED = ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "eetq", "hqq", "mxfp4", "bitnet", "gguf")
_FLOATS = {"half": "float16", "float": "float32"} | {
    f"torch.{name}": name for name in ("float16", "bfloat16", "float32")
}
_SAME_FORMAT = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "marlin": "gptq",
    "exllama": "gptq",
    "compressed_tensors": "compressed-tensors",
    "bitsandbytes-nf4": "nf4",
}
_LOADED_BY_CONTENT = ("hf", "pt", "safetensors", "gguf", "bitsandbytes", "mistral")  # vLLM's names of file formats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Names and meanings are vLLM's where vLLM has them."""

    model: str = option(DEFAULT_MODEL, "a directory, a .gguf file, a hub repository or an alias")
    task: str = option(
        "auto",
        "what the model is served for: to generate text, to embed texts, or to score pairs of texts (Qwen3-Reranker); "
        "auto is what it was made for",
        choices=("auto", "generate", "embed", "score"),
    )
    served_model_name: str | None = option(None, "the name clients ask for (default: the model's own)")
    tokenizer: str | None = option(None, "take the tokenizer from there instead of from the model")
    chat_template: str | None = option(
        None, "a chat template instead of the model's: a file, the template itself, or a name such as chatml"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub repository")
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens (default: what the model was made for)", minimum=2
    )
    rope_scaling: str | None = option(
        None,
        "reach a longer context than the checkpoint says: linear, dynamic or yarn, with rope_scale; or JSON as "
        """config.json has it: '{"rope_type": "yarn", "factor": 4.0}'""",
        metavar="KIND|JSON",
    )
    rope_scale: float | None = option(None, "by how much: the factor of that scaling (alone: linear)", minimum=0.001)
    yarn_orig_ctx: int | None = option(
        None, "the context that yarn starts from (default: what the model was made for)", metavar="TOKENS", minimum=1
    )
    rope_theta: float | None = option(
        None, "the base of the RoPE frequencies, instead of the checkpoint's", minimum=0.001
    )
    hf_overrides: str | None = option(
        None,
        """the same in vLLM's words: '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'; it may also have """
        "max_position_embeddings",
        metavar="JSON",
    )
    max_num_seqs: int = option(256, "sequences computed together at most", minimum=1)
    max_num_batched_tokens: int = option(
        512,
        "tokens computed in one step at most: a longer prompt takes several steps (on a GPU, one without prompts has "
        "room for as many draft tokens beside them)",
        minimum=1,
    )
    long_prefill_token_threshold: int = option(
        0, "tokens of one prompt in one step at most (0: no limit but the step's)", minimum=0
    )
    target_itl_ms: int | None = option(
        None,
        "prompts make a step about this long at most while answers are written (default: 30 in servers; 0: no limit)",
        minimum=0,
    )
    block_size: int = option(16, "tokens a block of the KV cache holds", minimum=1)
    enable_prefix_caching: bool = option(True, "share the KV cache of equal prompt prefixes between requests")
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept; auto is float16 (on a GPU: dtype), and int8 or a GPU's fp8 take half of that",
        choices=("auto", "float16", "bfloat16", "float32", "int8", "fp8"),
        synonyms={"fp8_e4m3": "fp8", **_FLOATS},
    )
    state_checkpoint_dtype: str = option(
        "float32",
        "how checkpoints of recurrent states are kept; bfloat16 takes half of float32, int8 a quarter, and prompts "
        "that continue from them are computed less exactly; states of running sequences are always float32",
        choices=("float32", "bfloat16", "int8"),
        synonyms={"fp32": "float32", "f32": "float32", "bf16": "bfloat16"},
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache (default: half of what is free, 4 GiB at most)",
        unit="bytes",
        metavar="SIZE",
        minimum=1,
    )
    swap_space: float = option(
        0.0, "GiB of memory that preempted sequences are moved to instead of being computed again", minimum=0
    )
    kv_offloading_size: float = option(
        0.0,
        "on a GPU: GiB of pinned memory that prefixes go to when the KV cache is full, and come back from",
        minimum=0,
    )
    kv_disk_path: str | None = option(
        None,
        "a directory that keeps prefixes of prompts on disk: they outlive the KV cache and the engine, and engines on "
        "one machine may share it",
        metavar="DIR",
    )
    kv_disk_size: float = option(
        16.0, "GiB that this directory holds at most; what was not used for longest goes", minimum=0
    )
    kv_disk_write_policy: str = option(
        "write_back",
        "when blocks go to this directory: write_back, as far as it takes next to nothing from steps, and when the "
        "engine is idle; write_through, each once it is full, so that another engine can go on where one has died",
        choices=("write_back", "write_through"),
    )
    kv_events_config: str | None = option(
        None,
        """publish what the prefix cache gains and loses, for routers, in vLLM's format over ZeroMQ: """
        """'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'""",
        metavar="JSON",
    )
    kv_transfer_config: str | None = option(
        None,
        "compute prompts in another engine, and answer them in this one: "
        """'{"kv_role": "kv_producer", "kv_ip": "0.0.0.0", "kv_port": 14579}' there, and """
        """'{"kv_role": "kv_consumer", "kv_ip": ITS_ADDRESS, "kv_port": 14579}' here""",
        metavar="JSON",
    )
    dtype: str = option(
        "auto",
        "type of activations: float32 on a CPU, bfloat16 on a GPU",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=_FLOATS,
    )
    load_format: str = option(
        "auto",
        "dummy: random weights, for measuring",
        choices=("auto", "dummy"),
        synonyms=dict.fromkeys(_LOADED_BY_CONTENT, "auto"),
    )
    quantization: str | None = option(
        None,
        f"quantize the weights of a plain checkpoint while they are loaded: {', '.join(QUANTIZE)} (fp8, "
        "w8a8 and w4a8, which quantize activations too, on a GPU only); "
        "or what the checkpoint is, such as awq or gptq, which is found out anyway",
        choices=(*QUANTIZE, *STORED),
        synonyms=_SAME_FORMAT,
        metavar="METHOD",
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that this engine may take", minimum=0.01)
    enforce_eager: bool = option(False, "launch every op by itself instead of replaying CUDA graphs")
    batch_invariant: bool = option(False, "on a GPU: the same bits whatever else is in the batch, at a price in speed")
    enable_lora: bool = option(False, "let requests ask for LoRA adapters, by the names these are loaded under")
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapters to load at the start: directories that PEFT has saved, .gguf files, or repositories (with "
        "--models: MODEL:NAME=PATH)",
        metavar="NAME=PATH",
        several=True,
    )
    max_loras: int = option(4, "LoRA adapters used in one step at most; requests for more wait", minimum=1)
    max_lora_rank: int = option(64, "the highest rank of a LoRA adapter", minimum=1)
    speculative_config: str | None = option(
        None,
        """speculative decoding: draft tokens are verified in one step; outputs stay the same: '{"method": "ngram", """
        """"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'""",
        metavar="JSON",
    )
    spec_method: str | None = option(
        None,
        "the method of --speculative-config, in short: ngram, suffix, mtp, or several: suffix,mtp",
        metavar="METHOD",
    )
    spec_model: str | None = option(
        None, "its model, in short: a smaller model that drafts, or a head", metavar="MODEL"
    )
    spec_tokens: int | None = option(None, "its num_speculative_tokens, in short: draft tokens a step at most")
    structured_outputs_config: str | None = option(
        None,
        """how structured output writes JSON where a request does not say: '{"disable_any_whitespace": true, """
        """"disable_additional_properties": true}', or {"whitespace_pattern": REGEX}; and whether it holds from """
        """the first token, without reasoning: {"enable_in_reasoning": true}""",
        metavar="JSON",
    )
    scheduling_policy: str = option(
        "fcfs",
        "which requests run first: as they come, by priority, or by the shares of their keys (fair)",
        choices=("fcfs", "priority", "fair"),
    )
    max_queued_requests: int = option(1024, "requests that may wait before more are answered with 429", minimum=0)
    enable_sleep_mode: bool = option(
        False,
        "let clients end the engine, which gives its memory back, and start it again (vLLM's /sleep and /wake_up): "
        "every client that reaches the port can then stop the server's work; LLM and AsyncEngine can always sleep",
    )
    max_wait: float | None = option(
        None,
        "seconds until the first token; a request that would have to wait longer is answered with 429 at once",
        minimum=0,
    )
    threads: int | None = option(
        None, "threads that compute (default: as many as CPUs this process may use, one less from 12 on)", minimum=1
    )
    tensor_parallel_size: int = option(
        1,
        "processes that compute the model together, each with a part of every matrix; on a CPU, or a GPU for each",
        minimum=1,
    )
    enable_expert_parallel: bool = option(
        False, "each of these processes has whole experts of a MoE model, instead of a part of every expert"
    )
    pipeline_parallel_size: int = option(
        1,
        "processes that compute the model one after the other, each with some of its layers; on a CPU, or a GPU each",
        minimum=1,
    )
    pipeline_stages: str | None = option(
        None,
        "where `quire stage` listens on other machines: the addresses of all stages but the last, in order",
        metavar="HOST:PORT,...",
    )
    cpu_layers: int = option(
        0,
        "layers, the first ones, that the CPU computes where the others are on a GPU which has no room for all",
        minimum=0,
    )
    gpu_layers: int | None = option(
        None, "the same by the other side: layers, the last ones, that are on the GPU", minimum=0
    )
    offload_weights: float = option(
        0.0,
        "GiB of weights that a GPU need not hold: they are in host memory, and copied to it while it computes the "
        "layers before them",
        minimum=0,
    )
    offload_folder: str | None = option(
        None, "where offloaded weights are kept that host memory has no room for", metavar="PATH"
    )
    data_parallel_size: int = option(
        1,
        "engines that each have the whole model, behind one address: a request goes where its prefix is cached, or "
        "where there is least to do",
        minimum=1,
    )
    distributed_executor_backend: str = option(
        "mp",
        "where these engines run: processes of this machine (mp), or nodes of a Ray cluster (ray, needs quire[ray])",
        choices=("mp", "ray"),
        synonyms={"uni": "mp", "auto": "mp", "none": "mp"},
        otherwise="the engine starts its ranks and stages itself, without torchrun or another launcher: leave it out",
    )
    generation_config: str = option(
        "auto",
        "where the defaults of sampling come from: auto is the model's own advice (generation_config.json, GGUF "
        "metadata), none the API's, and a path is that of another generation_config.json",
        metavar="auto|none|PATH",
    )
    override_generation_config: str | None = option(
        None,
        """defaults of sampling that replace those, such as '{"temperature": 0.5, "max_new_tokens": 256}'""",
        metavar="JSON",
    )
    seed: int | None = option(None, "makes requests without a seed of their own repeatable")
    device: str = option(
        "auto",
        "where to compute; auto takes a GPU where there is one and torch",
        choices=("auto", "cpu", "cuda"),
        synonyms={"none": "cpu", "gpu": "cuda", "cuda:0": "cuda", "CUDA0": "cuda"},
        otherwise="CUDA_VISIBLE_DEVICES=N chooses the GPU, and tensor_parallel_size the number of GPUs",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        named_values(self.lora_modules, "lora_modules", "PATH")
        check_placement(self)
        check_tiers(self)
        _ = self.speculation, self.structured_defaults, self.kv_transfer, self.rope  # raise where they are wrong
        check_generation_override(self.override_generation_config)
        if self.gpu_memory_utilization > 1:
            raise BadRequest(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}",
                "it is a share of the memory: at most 1",
                param="gpu_memory_utilization",
            )
        for spec in fields(self):
            choices, value = spec.metadata.get("choices"), getattr(self, spec.name)
            if choices and value is not None and value not in choices:
                hint = f"choose from {', '.join(choices)}"
                if otherwise := spec.metadata.get("otherwise"):
                    hint += f"; {otherwise}"
                raise BadRequest(f"{spec.name} is {value!r}", hint, param=spec.name)

    @property
    def num_loras(self) -> int:
        """LoRA adapters in one step; 0: they are not enabled."""
        return self.max_loras if self.enable_lora or self.lora_modules else 0

    @property
    def stage_addresses(self) -> tuple[str, ...]:
        """The addresses at which stages on other machines listen."""
        return tuple(filter(None, (self.pipeline_stages or "").split(",")))

    @property
    def num_stages(self) -> int:
        return len(self.stage_addresses) + 1 if self.stage_addresses else self.pipeline_parallel_size

    @property
    def is_group(self) -> bool:
        """The model has several engines, or engines elsewhere."""
        return self.data_parallel_size > 1 or self.distributed_executor_backend == "ray"

    @property
    def speculation(self) -> "SpecConfig | None":
        """How draft tokens are proposed; None: no speculative decoding."""
        if all(getattr(self, name) is None for name in SPECULATION):
            return None
        from quire.runtime.spec.config import read_config

        return read_config(self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model)

    @property
    def rope(self) -> str | None:
        """How positions are scaled instead, as JSON; None: as the checkpoint says."""
        params = rope_overrides(
            self.hf_overrides, self.rope_scaling, self.rope_scale, self.rope_theta, self.yarn_orig_ctx
        )
        return json.dumps(params, sort_keys=True) if params else None

    @property
    def kv_events(self) -> "KVEventsConfig | None":
        """Where events of the prefix cache are published; None: they are not."""
        if self.kv_events_config is None:
            return None
        from quire.engine.kv_events_config import read_kv_events_config

        return read_kv_events_config(self.kv_events_config)

    @property
    def kv_transfer(self) -> TransferConfig | None:
        """How KV blocks come from another engine, or go there; None: they stay in this one."""
        return None if self.kv_transfer_config is None else read_transfer_config(self.kv_transfer_config)

    @property
    def structured_defaults(self) -> StructuredDefaults:
        return StructuredDefaults.of(self.structured_outputs_config)

    def without_speculation(self) -> "EngineOptions":
        nothing: dict[str, Any] = dict.fromkeys(SPECULATION)
        return replace(self, **nothing)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "EngineOptions":
        """From keywords; one that does not exist is an error with the nearest that does."""
        known = {spec.name: spec for spec in fields(cls)}
        given = _without_peer_options(given, known)
        for name, value in given.items():
            if name in known:
                given[name] = known[name].metadata.get("synonyms", {}).get(str(value), value)
            else:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
                raise BadRequest(f"there is no option {name}", hint, param=name)
        for name in JSON_OPTIONS:
            if isinstance(config := given.get(name), Mapping):  # as scripts written for vLLM give it
                given[name] = json.dumps(config)
        return cls(**given)


def _without_peer_options(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """With options of other engines under our names, or left out with a warning."""
    values = {name: value for name, value in given.items() if name in known or name not in PEER_OPTIONS}
    for name, value in given.items():
        if name in known or name not in PEER_OPTIONS:
            continue
        peer = PEER_OPTIONS[name]
        if not isinstance(peer, Renamed):
            if text := warning(name, peer, value):
                log.warning("%s", text)
        elif (here := translate(peer, value)) is not None and values.setdefault(peer.option, here) != here:
            raise BadRequest(f"{name} and {peer.option} are both given, and mean the same", "give one", param=name)
    return values


JSON_OPTIONS = (
    "rope_scaling",
    "hf_overrides",
    "speculative_config",
    "structured_outputs_config",
    "override_generation_config",
    "kv_events_config",
    "kv_transfer_config",
)
GENERATION = ("generation_config", "override_generation_config")  # the options of sampling defaults
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")  # the options of speculative decoding
ROPE = ("rope_scaling", "rope_scale", "yarn_orig_ctx", "rope_theta", "hf_overrides")  # the options that scale positions
SERVING = ("max_queued_requests", "enable_sleep_mode")  # the options of servers
ENGINES = ("data_parallel_size", "distributed_executor_backend")  # the options of several engines
LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")  # the options of LoRA adapters
