"""llama.cpp's greedy tokens and losses, run by an interpreter that has llama-cpp-python.

    python -m benchmarks.peers.llama_cpp_accuracy MODEL.gguf < job.json

Prints one line of JSON."""

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np

from benchmarks.peers.llama_cpp import Context


def prefill(context: Context, tokens: list[int], all_logits: bool = False) -> None:
    count = len(tokens)
    context.decode(tokens, range(count), [0] * count, [all_logits or i == count - 1 for i in range(count)])


def accuracy(path: str, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations of job["prompts"], and the mean loss over job["chunks"] after their first token."""
    context = Context(path, threads, 1, 2048)
    greedy = []
    for prompt in job["prompts"]:
        context.clear()
        prefill(context, prompt)
        new: list[int] = []
        row = len(prompt) - 1
        for _ in range(job["max_tokens"]):
            new.append(int(context.logits(row).argmax()))
            context.decode([new[-1]], [len(prompt) + len(new) - 1], [0], [True])
            row = 0
        greedy.append(new)
    losses = []
    for chunk in job["chunks"]:
        context.clear()
        prefill(context, chunk, all_logits=True)
        for i, target in enumerate(chunk[1:]):
            logits = context.logits(i).astype(np.float64)
            peak = logits.max()
            losses.append(peak + np.log(np.exp(logits - peak).sum()) - logits[target])
    return {"greedy": greedy, "loss": statistics.fmean(losses)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(json.dumps(accuracy(args.model, args.threads, json.load(sys.stdin))))
