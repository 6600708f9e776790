"""Quire as a speed worker (see worker.py).

python -m benchmarks.peers.quire_speed MODEL.gguf --threads 2"""

import argparse

from benchmarks.cases import MAX_LENGTH, MAX_SEQS
from benchmarks.peers.worker import answer, claim_stdout
from quire import LLM, SamplingParams
from quire.client.generate_request import GenerateRequest


class Quire:
    def __init__(self, path: str, threads: int) -> None:
        self.llm = LLM(
            path, enable_prefix_caching=False, threads=threads, max_num_seqs=MAX_SEQS, max_model_len=MAX_LENGTH
        )
        self.vocab_size = self.llm.tokenizer.vocab_size

    def submit(self, prompts: list[list[int]], num_output: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        for number, ids in enumerate(prompts):
            self.llm._submit(GenerateRequest(id=f"{number}", params=params, prompt_ids=ids))

    def step(self) -> int:
        self.llm.engine.step()
        record = self.llm.engine.record
        assert record is not None
        return record.num_drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    answers = claim_stdout()
    answer(Quire(args.model, args.threads), answers)
