"""Quire as a tier worker (see tiers_worker.py).

python -m benchmarks.peers.quire_tiers FOLDER LIMITS"""

import argparse

from benchmarks.peers.tiers_worker import KV_BYTES, Limits, answer, limits_of
from benchmarks.peers.worker import claim_stdout
from quire import LLM, SamplingParams


class Quire:
    def __init__(self, folder: str, limits: Limits, device: str) -> None:
        self._llm = LLM(
            folder, device=device, load_format="dummy", kv_cache_memory_bytes=limits.pool_tokens * KV_BYTES,
            kv_offloading_size=limits.host_gib, max_model_len=limits.max_model_len, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        return [each.num_cached_tokens or 0 for each in self._llm.generate(prompts, params, use_tqdm=False)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("limits", type=limits_of)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    answers = claim_stdout()
    answer(Quire(arguments.folder, arguments.limits, arguments.device), answers)
