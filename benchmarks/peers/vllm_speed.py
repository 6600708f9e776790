"""vLLM as a speed worker (see worker.py), run by an interpreter that has it.

    VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \\
        python -m benchmarks.peers.vllm_speed CHECKPOINT --dtype float32

The engine runs in this process, so that a step is a call."""

import argparse

from benchmarks.cases import MAX_LENGTH, MAX_SEQS
from benchmarks.peers.worker import answer, claim_stdout


class Vllm:
    def __init__(self, path: str, dtype: str) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        llm = LLM(
            model=path,
            dtype=dtype,
            max_model_len=MAX_LENGTH,
            max_num_seqs=MAX_SEQS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.engine = llm.llm_engine
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.drawn: dict[str, int] = {}  # tokens of each request so far
        self.num_requests = 0

    def submit(self, prompts: list[list[int]], num_output: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        self.drawn = {}
        for ids in prompts:
            self.num_requests += 1
            self.engine.add_request(str(self.num_requests), {"prompt_token_ids": ids}, params)

    def step(self) -> int:
        gained = 0
        for output in self.engine.step():
            drawn = len(output.outputs[0].token_ids)
            gained += drawn - self.drawn.get(output.request_id, 0)
            self.drawn[output.request_id] = drawn
        return gained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    answers = claim_stdout()
    answer(Vllm(args.model, args.dtype), answers)
