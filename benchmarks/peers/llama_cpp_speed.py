"""llama.cpp's speed and accuracy, run by the interpreter of an environment that has llama-cpp-python.

    python benchmarks/peers/llama_cpp_speed.py speed MODEL.gguf --threads 2
    python benchmarks/peers/llama_cpp_speed.py accuracy MODEL.gguf < job.json

Prints one line of JSON."""

import argparse
import ctypes
import json
import statistics
import sys
import time

import llama_cpp as lc
import numpy as np


class Context:
    """A model and a cache of `num_seqs` sequences, through the C interface: no Python between the tokens."""

    def __init__(self, path: str, threads: int, num_seqs: int, length: int) -> None:
        lc.llama_backend_init()
        lc.llama_log_set(_silent, ctypes.c_void_p(0))
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        params = lc.llama_context_default_params()
        params.n_ctx = num_seqs * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(512, 0, 1)

    def decode(self, tokens: list[int], positions: list[int], seqs: list[int], wanted: list[bool]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq, logits) in enumerate(zip(tokens, positions, seqs, wanted, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, seq
            batch.logits[i] = logits
        assert lc.llama_decode(self.context, batch) == 0

    def logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, row), shape=(self.vocab_size,))

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)


@lc.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def prefill(context: Context, tokens: list[int], all_logits: bool = False) -> None:
    last = len(tokens) - 1
    context.decode(
        tokens, list(range(len(tokens))), [0] * len(tokens), [all_logits or i == last for i in range(len(tokens))]
    )


def speed(path: str, threads: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second, one figure for each repeat."""
    context = Context(path, threads, 32, 1024)
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"prefill 512": [], "decode 1": [], "decode 32": []}
    for _ in range(repeats + 1):
        context.clear()
        prompt = rng.integers(100, context.vocab_size - 100, 512).tolist()
        begin = time.perf_counter()
        prefill(context, prompt)
        found["prefill 512"].append(512 / (time.perf_counter() - begin))
        for num_seqs, steps in ((1, 64), (32, 16)):
            context.clear()
            for start in range(16):  # a short context for everyone
                ids = rng.integers(100, context.vocab_size - 100, num_seqs).tolist()
                context.decode(ids, [start] * num_seqs, list(range(num_seqs)), [True] * num_seqs)
            begin = time.perf_counter()
            for step in range(steps):
                ids = [int(context.logits(row).argmax()) for row in range(num_seqs)]
                context.decode(ids, [16 + step] * num_seqs, list(range(num_seqs)), [True] * num_seqs)
            found[f"decode {num_seqs}"].append(num_seqs * steps / (time.perf_counter() - begin))
    return {name: rates[1:] for name, rates in found.items()}  # the first round warms up


def accuracy(path: str, threads: int, job: dict) -> dict:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.what == "speed":
        print(json.dumps(speed(args.model, args.threads, args.repeats)))
    else:
        print(json.dumps(accuracy(args.model, args.threads, json.load(sys.stdin))))
