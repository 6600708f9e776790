"""llama.cpp as a speed worker (see worker.py), run by an interpreter that has llama-cpp-python.

python -m benchmarks.peers.llama_cpp_speed MODEL.gguf --threads 2"""

import argparse
from itertools import islice

from benchmarks.cases import MAX_LENGTH, MAX_SEQS
from benchmarks.peers.llama_cpp import BATCH, Context
from benchmarks.peers.worker import answer, claim_stdout


class LlamaCpp:
    """Prompts one after the other in batches of `BATCH` tokens, then one token of every sequence a batch."""

    def __init__(self, path: str, threads: int) -> None:
        self.context = Context(path, threads, MAX_SEQS, MAX_LENGTH)
        self.vocab_size = self.context.vocab_size

    def submit(self, prompts: list[list[int]], num_output: int) -> None:
        self.context.clear()
        self.pending = (
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        )
        self.known = [len(prompt) for prompt in prompts]  # tokens in the cache, once the prompts are
        self.newest = [0] * len(prompts)

    def step(self) -> int:
        batch = list(islice(self.pending, BATCH))
        if not batch:
            batch = [(self.newest[seq], known, seq, True) for seq, known in enumerate(self.known)]
            self.known = [known + 1 for known in self.known]
        self.context.decode(*zip(*batch, strict=True))
        drawn = 0
        for row, (_, _, seq, wanted) in enumerate(batch):
            if wanted:
                self.newest[seq] = int(self.context.logits(row).argmax())
                drawn += 1
        return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    answers = claim_stdout()
    answer(LlamaCpp(args.model, args.threads), answers)
