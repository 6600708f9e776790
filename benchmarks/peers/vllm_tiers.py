"""vLLM as a tier worker (see tiers_worker.py), run by an interpreter that has it.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.peers.vllm_tiers FOLDER LIMITS [--lmcache] [--eager]

The engine runs in this process. Decoding is captured into CUDA graphs; nothing is compiled unless `--compile` says so,
which takes a minute. Host memory is that of vLLM's OffloadingConnector, or LMCache's."""

import argparse
import os
from typing import Any

from benchmarks.peers.tiers_worker import KV_BYTES, Limits, answer, limits_of
from benchmarks.peers.worker import claim_stdout


class Vllm:
    def __init__(self, folder: str, limits: Limits, **options: Any) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._llm = LLM(
            model=folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
            enable_prefix_caching=True, kv_cache_memory_bytes=limits.pool_tokens * KV_BYTES,
            gpu_memory_utilization=0.3, max_model_len=limits.max_model_len, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens, **options,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [each.num_cached_tokens or 0 for each in outputs]


def host_memory(gib: float, lmcache: bool) -> dict[str, Any]:
    """What names the host tier."""
    if not lmcache:
        return {"kv_offloading_size": gib, "kv_offloading_backend": "native"}
    settings = {"LOCAL_CPU": "True", "MAX_LOCAL_CPU_SIZE": str(gib), "CHUNK_SIZE": "256"}
    os.environ.update({f"LMCACHE_{name}": value for name, value in settings.items()})
    return {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}


def how_run(eager: bool, compiled: bool, max_num_seqs: int) -> dict[str, Any]:
    if eager:
        return {"enforce_eager": True}
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= max_num_seqs]
    graphs = {"cudagraph_capture_sizes": sizes}
    return {"compilation_config": graphs if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **graphs}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("limits", type=limits_of)
    parser.add_argument("--lmcache", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="as vLLM does unless told otherwise")
    arguments = parser.parse_args()
    answers = claim_stdout()
    how = how_run(arguments.eager, arguments.compile, arguments.limits.max_num_seqs)
    memory = host_memory(arguments.limits.host_gib, arguments.lmcache)
    answer(Vllm(arguments.folder, arguments.limits, **how, **memory), answers)
