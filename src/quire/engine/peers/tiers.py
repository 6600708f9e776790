"""Options of other engines for prefixes beyond the KV cache, and for prefill and decode apart."""

from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.reasons import OFF, ON

BEYOND = "prefixes beyond the KV cache are kept with kv_disk_path, and beside a GPU with kv_offloading_size"
SAVED_PROMPTS = Only(OFF, "every prefix is kept, and found again by itself, with kv_disk_path")
CHECKPOINTS = NoEffect("states and windows of prefixes are kept as long as there is room")
HOST_COPIES = NoEffect("blocks are copied to host memory and back as they lie in the KV cache")
DISK_CACHE = Only(OFF, "set kv_disk_path to a directory, which engines may share")
PREFILL_PEERS = NoEffect("kv_transfer_config names the address of the prefill engine")

VLLM: dict[str, PeerOption] = {
    "kv_offloading_backend": Only(("native", "none"), f"blocks are kept by the engine itself: {BEYOND}"),
}

LLAMA_SERVER: dict[str, PeerOption] = {
    "cache_prompt": Renamed("enable_prefix_caching", ON, switch=True),
    "cache_ram": NoEffect(f"kv_cache_memory_bytes sizes the KV cache, and {BEYOND}"),
    "cache_reuse": NoEffect("the longest prefix is always reused, and what follows a change is computed"),
    "ctx_checkpoints": CHECKPOINTS,
    "defrag_thold": NoEffect("a KV cache of blocks does not need to be defragmented"),
    "kv_unified": NoEffect("there is one block pool", switch=True),
    "prompt_cache": SAVED_PROMPTS,
    "prompt_cache_all": Only(OFF, SAVED_PROMPTS.reason, switch=True),
    "prompt_cache_ro": Only(OFF, SAVED_PROMPTS.reason, switch=True),
    "slot_prompt_similarity": NoEffect("a prompt continues the longest prefix that is cached"),
    "slot_save_path": SAVED_PROMPTS,
    "swa_checkpoints": CHECKPOINTS,
    "swa_full": NoEffect("a window is kept with the prefix that it ends", switch=True),
}

SGLANG: dict[str, PeerOption] = {
    "disaggregation_bootstrap_port": PREFILL_PEERS,
    "disaggregation_ib_device": PREFILL_PEERS,
    "disaggregation_mode": Only(
        ("null", "none"), "set prefill_engines and decode_engines on one machine, kv_transfer_config on several"
    ),
    "disaggregation_transfer_backend": PREFILL_PEERS,
    "enable_cache_report": NoEffect("usage always has cached tokens", switch=True),
    "enable_hierarchical_cache": NoEffect(
        "host memory keeps prefixes where kv_offloading_size (hicache_size) says how much, a disk where kv_disk_path "
        "says where",
        switch=True,
    ),
    "enable_lmcache": Only(OFF, BEYOND, switch=True),
    "hicache_io_backend": HOST_COPIES,
    "hicache_mem_layout": HOST_COPIES,
    "hicache_ratio": Only((), "host memory is not sized by the KV cache: set kv_offloading_size, in GiB"),
    "hicache_size": Renamed("kv_offloading_size", {"0": None}),
    "hicache_storage_backend": DISK_CACHE,
    "hicache_storage_backend_extra_config": DISK_CACHE,
    "hicache_storage_prefetch_policy": NoEffect("a prompt waits for the disk where that is quicker than computing"),
    "hicache_write_policy": NoEffect(
        "blocks go to host memory once they are full, and to the disk as kv_disk_write_policy says"
    ),
}

SHORT_FLAGS = {
    "-cram": "cache_ram",
    "-ctxcp": "ctx_checkpoints",
    "-dt": "defrag_thold",
    "-kvu": "kv_unified",
    "-sps": "slot_prompt_similarity",
}
