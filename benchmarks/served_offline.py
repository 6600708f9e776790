"""The loads of `benchmarks.served` without a server: `LLM.generate` in a process of its own.

    echo '{"prompts": [[5, 6, 7]], "num_output": 64}' | python -m benchmarks.served_offline '{"model": "smollm2"}'

A line of stdin is one wave of prompts; its answer is a line with the seconds it took."""

import json
import os
import sys
import time

from benchmarks.peers.worker import claim_stdout
from quire import LLM, SamplingParams


def main() -> None:
    answers = claim_stdout()
    llm = LLM(**json.loads(sys.argv[1]))
    os.write(answers, b"\n")
    for line in sys.stdin:
        wave = json.loads(line)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=wave["num_output"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in wave["prompts"]]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        drawn = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert drawn == len(prompts) * wave["num_output"], f"{drawn} tokens were drawn"
        os.write(answers, f"{seconds}\n".encode())


if __name__ == "__main__":
    main()
