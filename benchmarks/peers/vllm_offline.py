"""vLLM as a worker that generates and says how long it took (see tiers_worker.py), run by an interpreter that has it.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 \\
        python -m benchmarks.peers.vllm_offline FOLDER '{"quantization": "fp8", "max_num_seqs": 512}'

`LLM` with its defaults: the engine in a process of its own, compiled. With that variable, functions reach this process,
and packed weights are random (vllm_packed.py)."""

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.peers.tiers_worker import answer
from benchmarks.peers.vllm_packed import fill_packed
from benchmarks.peers.worker import claim_stdout


class Vllm:
    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        given = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, **options}
        self._llm = LLM(model=folder, **given)
        if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1":
            print(f"{sum(self._llm.apply_model(fill_packed))} packed weights are random", file=sys.stderr)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        """No token is cached."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        gained = sum(len(each.outputs[0].token_ids) for each in outputs)
        assert gained == len(prompts) * num_output, f"{gained} tokens of {len(prompts)} x {num_output}"
        return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("options", type=json.loads, help="of LLM, as JSON")
    arguments = parser.parse_args()
    answers = claim_stdout()
    answer(Vllm(arguments.folder, arguments.options), answers)
