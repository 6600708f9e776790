"""The comparisons by name: where each is (`compare(lab) -> Result`), what it shows, and the sizes it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALL = "all"
FIXED = ("task", "max_model_len", "max_num_seqs", "enable_prefix_caching")  # engine options that every comparison sets


@dataclass(frozen=True, slots=True)
class Comparison:
    module: str
    what: str
    sizes: Mapping[str, Any]  # fields of Sizes that are flags of this comparison, with its defaults
    varies: tuple[str, ...] = ()  # engine options that it sets itself, and that are no flags of it


_HERE = "quire.cli.bench.compare"
COMPARISONS = {
    "batching": Comparison(
        f"{_HERE}.batching",
        "static against continuous batching: throughput and latency",
        {"repeats": 3, "num_prompts": 24, "batch_size": 8, "input_len": 16, "output_len": 32},
    ),
    "kv-cache": Comparison(
        f"{_HERE}.kv_cache",
        "without against with a KV cache: time of a token by length",
        {"repeats": 3, "lengths": (16, 32, 64, 128, 256, 512)},
    ),
    "paged": Comparison(
        f"{_HERE}.paged",
        "contiguous reservation against pages: waste, and sequences that fit",
        {"repeats": 2, "num_prompts": 24, "batch_size": 4, "input_len": 32, "output_len": 64, "context": 1024},
        ("kv_cache_memory_bytes",),
    ),
    "prefix-cache": Comparison(
        f"{_HERE}.prefix_cache",
        "prefix cache cold against warm: time to the first token",
        {"repeats": 3, "lengths": (128, 256, 512), "input_len": 16},
    ),
    "chunked-prefill": Comparison(
        f"{_HERE}.chunked_prefill",
        "chunked prefill off and on: gaps between tokens while long prompts arrive",
        {"repeats": 3, "num_prompts": 2, "batch_size": 4, "input_len": 512, "output_len": 40, "chunk_size": 64},
        ("max_num_batched_tokens", "long_prefill_token_threshold", "target_itl_ms"),
    ),
    "attention": Comparison(
        f"{_HERE}.attention",
        "naive against flash attention: time and memory by length",
        {"repeats": 3, "lengths": (128, 256, 512, 1024, 2048)},
        ("threads", "enforce_eager"),
    ),
    "formats": Comparison(
        f"{_HERE}.formats",
        "formats of one model: size, memory, tokens/s, perplexity, KL",
        {"repeats": 3, "input_len": 128, "output_len": 32, "text": None, "text_len": 512},
        ("max_num_batched_tokens",),
    ),
    "kv-heads": Comparison(
        f"{_HERE}.kv_heads",
        "MHA, GQA, MQA and MLA: size of the KV cache (computed)",
        {"lengths": (1024, 4096, 16384, 131072)},
    ),
    "speculation": Comparison(
        f"{_HERE}.speculation",
        "speculative decoding off and on, with the acceptance rate",
        {"repeats": 3, "output_len": 64},
    ),
    "cuda-graphs": Comparison(
        f"{_HERE}.cuda_graphs",
        "CUDA graphs off and on: time of a token by batch size",
        {"repeats": 3, "batch_sizes": (1, 8, 32), "input_len": 32, "output_len": 64},
        ("enforce_eager",),
    ),
    "batch-size": Comparison(
        f"{_HERE}.batch_size",
        "batch size against latency and throughput",
        {"repeats": 3, "batch_sizes": (1, 2, 4, 8, 16, 32), "input_len": 16, "output_len": 16},
    ),
}
