"""Options that people type from the guides of other engines: a table for each engine. What is about several devices,
about drafts, and about prefixes beyond the KV cache stands in a file of that topic, for all engines."""

from quire.engine.peers.devices import SHORT_FLAGS as DEVICES
from quire.engine.peers.drafts import SHORT_FLAGS as SPECULATION
from quire.engine.peers.kinds import PeerOption
from quire.engine.peers.llama_server import LLAMA_SERVER
from quire.engine.peers.sglang import SGLANG
from quire.engine.peers.tgi import TGI
from quire.engine.peers.tiers import SHORT_FLAGS as TIERS
from quire.engine.peers.transformers import TRANSFORMERS
from quire.engine.peers.vllm import VLLM

PEER_OPTIONS: dict[str, PeerOption] = {**VLLM, **TGI, **LLAMA_SERVER, **SGLANG, **TRANSFORMERS}

# Flags of one dash, and names that are short: -> the option they stand for.
SHORT_FLAGS = {
    **TIERS,
    **SPECULATION,
    **DEVICES,
    "-C": "cpu_mask",
    "-Cr": "cpu_range",
    "-O": "optimization_level",
    "-a": "alias",
    "-b": "batch_size",
    "-c": "ctx_size",
    "-cb": "cont_batching",
    "-cc": "compilation_config",
    "-cl": "cache_list",
    "-cms": "checkpoint_min_step",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-dio": "direct_io",
    "-dr": "docker_repo",
    "-e": "escape",
    "-fa": "flash_attn",
    "-fit": "fit",
    "-fitc": "fit_ctx",
    "-fitt": "fit_target",
    "-hf": "hf_repo",
    "-hff": "hf_file",
    "-hfr": "hf_repo",
    "-hft": "hf_token",
    "-j": "json_schema",
    "-jf": "json_schema_file",
    "-kvo": "kv_offload",
    "-l": "logit_bias",
    "-lm": "load_mode",
    "-lv": "verbosity",
    "-m": "model",
    "-md": "model_draft",
    "-mm": "mmproj",
    "-mmu": "mmproj_url",
    "-mu": "model_url",
    "-n": "n_predict",
    "-np": "parallel",
    "-q": "quantization",
    "-rea": "reasoning",
    "-s": "seed",
    "-sp": "special",
    "-t": "threads",
    "-tb": "threads_batch",
    "-to": "timeout",
    "-ub": "ubatch_size",
    "-v": "verbose",
}
