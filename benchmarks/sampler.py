"""Microseconds a row to draw a token, by kind of request and size of the vocabulary.

    python -m benchmarks.sampler                 # one thread
    python -m benchmarks.sampler --threads 2 --rows 64

Logits are made like a language model's: a few likely tokens over a broad bell, from one fixed seed. Beside each time
stands how many bytes of logits a second that is; what bounds the greedy row is reading them."""

import argparse
import json
import platform
import time
from typing import Any

import numpy as np

from quire.ops.native.sampler import NativeSampler
from quire.ops.opset import Float32
from quire.ops.row_params import DryParams, MirostatParams, RowParams

VOCABS = (49152, 151936)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k=50 top_p=0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical_p=0.9": {"temperature": 0.8, "typical_p": 0.9},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "greedy, logprobs=5": {"temperature": 0.0, "num_logprobs": 5},
    "dry": {"temperature": 0.8, "dry": DryParams(0.8)},
    "greedy, dry": {"temperature": 0.0, "dry": DryParams(0.8)},
    "no_repeat_ngram=3": {"temperature": 0.8, "no_repeat_ngram": 3},
    "top_n_sigma=1": {"temperature": 0.8, "top_n_sigma": 1.0},
    "dynatemp_range=0.5": {"temperature": 0.8, "dynatemp_range": 0.5},
    "xtc": {"temperature": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc, min_p=0.05": {"temperature": 0.8, "min_p": 0.05, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    "mirostat 1": {"temperature": 0.8, "mirostat": MirostatParams(1)},
    "mirostat 2": {"temperature": 0.8, "mirostat": MirostatParams(2)},
}
PROMPT = [token % 300 for token in range(2048)]


def model_like(rng: np.random.Generator, rows: int, vocab: int) -> Float32:
    logits = rng.normal(0.0, 2.5, (rows, vocab))
    for line in logits:
        line[rng.choice(vocab, 30, replace=False)] += rng.exponential(6.0, 30)
    return logits.astype(np.float32)


def microseconds_a_row(params: dict[str, Any], logits: Float32, threads: int, repeats: int) -> float:
    rows, vocab = logits.shape
    best = float("inf")
    for _ in range(repeats):
        sampler = NativeSampler(rows, vocab, threads)
        for row in range(rows):
            sampler.admit(row, RowParams(seed=row, sample=0, **params), PROMPT, len(PROMPT))
        sampler.draw(logits, range(rows))  # warms the scratch memory
        start = time.perf_counter()
        sampler.draw(logits, range(rows))
        best = min(best, time.perf_counter() - start)
    return float(best / rows * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocabs", type=int, nargs="+", default=VOCABS)
    args = parser.parse_args()

    print(f"{'':24}" + "".join(f"{f'vocab {vocab}':>28}" for vocab in args.vocabs))
    results: dict[str, dict[int, float]] = {name: {} for name in CASES}
    inputs = {vocab: model_like(np.random.default_rng(0), args.rows, vocab) for vocab in args.vocabs}
    for name, params in CASES.items():
        line = f"{name:24}"
        for vocab, logits in inputs.items():
            us = microseconds_a_row(params, logits, args.threads, args.repeats)
            results[name][vocab] = round(us, 1)
            line += f"{us:14.1f} us {vocab * 4 / us / 1e3:6.2f} GB/s"
        print(line)
    print(json.dumps({"bench": "sampler", "machine": platform.machine(), **vars(args), "us_a_row": results}))


if __name__ == "__main__":
    main()
