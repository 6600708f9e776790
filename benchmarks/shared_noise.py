"""How often a draft that is drawn is the token that the verifier draws, by how both draw.

    python -m benchmarks.shared_noise                          # the default model, drafted for by rougher copies of it
    python -m benchmarks.shared_noise --tokens 2000 --methods Q3_K_M,Q2_K --temperature 1

Texts are drawn by the model itself; at each position its distribution p and the draft's q are known, and so is the
probability that both draw the same token:

- greedy: the draft is the likeliest token of q
- inverse CDF: one number u for both, and the token at which the running sum over ids passes u
- race: one exponential number a token for both, and the token whose number divided by its probability is the least (how
  Quire samples)
- maximal: the most that any way of drawing can reach, 1 - TV(p, q); rejection sampling accepts as often

Nothing here depends on the speed of the machine."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.executors.local import LocalExecutor
from quire.ops.opset import StepBatch

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "The main difference between a compiler and an interpreter is",
    "def quicksort(items):\n",
    "Dear Ms. Hill,\n\nthank you for your letter of",
    "1. Preheat the oven to 200 degrees.\n2.",
    "The history of paper begins in",
    '{"name": "Ann", "age": 31, "city":',
    "Q: Why is the sky blue?\nA:",
)
WAYS = ("greedy", "inverse CDF", "race", "maximal")


def logits_of(executor: LocalExecutor, tokens: "np.ndarray[Any, np.dtype[np.int32]]") -> "np.ndarray[Any, Any]":
    """[tokens, vocab]: one step over a sequence of these tokens."""
    length, block_size = len(tokens), executor.options.block_size
    places = np.arange(length, dtype=np.int32)
    blocks = np.arange(-(-length // block_size), dtype=np.int32)[None]
    starts, contexts = np.array([0, length], np.int32), np.array([length], np.int32)
    logits = executor.runner.program.run(StepBatch(tokens, places, places, starts, contexts, blocks, places))
    return np.array(logits, np.float64)


def softmax(logits: Any, temperature: float) -> Any:
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def agreement(p: Any, q: Any) -> dict[str, Any]:
    """For each token, the probability that the model draws it and the draft is it. p, q [vocab]."""
    greedy = np.zeros_like(p)
    greedy[q.argmax()] = p[q.argmax()]
    upper_p, upper_q = p.cumsum(), q.cumsum()
    overlap = np.minimum(upper_p, upper_q) - np.maximum(upper_p - p, upper_q - q)
    return {
        "greedy": greedy,
        "inverse CDF": np.maximum(overlap, 0.0),
        "race": race_agreement(p, q),
        "maximal": np.minimum(p, q),
    }


def race_agreement(p: Any, q: Any) -> Any:
    """Token i wins both races with probability 1 / sum_j max(p_j / p_i, q_j / q_i). Where p_j / q_j is at least p_i /
    q_i, the first is the larger: sums over the tokens sorted by that ratio."""
    both = (p > 0) & (q > 0)
    ratio = np.where(both, p / np.where(q > 0, q, 1.0), np.where(p > 0, np.inf, 0.0))
    order = np.argsort(ratio, kind="stable")
    q_before = np.concatenate([[0.0], q[order].cumsum()[:-1]])
    p_from = p[order][::-1].cumsum()[::-1]
    p_sorted, q_sorted = p[order], q[order]
    with np.errstate(divide="ignore", invalid="ignore"):
        wins = 1.0 / (p_from / p_sorted + q_before / q_sorted)
    result = np.zeros_like(p)
    result[order] = np.where(both[order], wins, 0.0)
    return result


def measure(target: LLM, draft: LLM, texts: list[tuple[list[int], int]], temperature: float, k: int) -> dict[str, Any]:
    """Over all positions of the answers: the share of drafts accepted, and the mean length with `k` drafts."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    lengths: dict[str, list[float]] = {way: [] for way in WAYS}
    distances = []
    for ids, num_prompt in texts:
        tokens = np.array(ids, np.int32)
        p_all, q_all = (
            softmax(logits_of(llm.engine.executor, tokens)[num_prompt - 1 : -1], temperature)  # type: ignore[arg-type]
            for llm in (target, draft)
        )
        accepted: dict[str, list[float]] = {way: [] for way in WAYS}
        for p, q, token in zip(p_all, q_all, ids[num_prompt:], strict=True):
            distances.append(0.5 * np.abs(p - q).sum())
            for way, joint in agreement(p, q).items():
                rates[way].append(float(joint.sum()))
                accepted[way].append(float(joint[token] / p[token]))  # if the model draws this token
        for way, chain in accepted.items():
            for start in range(len(chain) - k):
                lengths[way].append(1.0 + float(np.cumprod(chain[start : start + k]).sum()))
    return {
        "distance": float(np.mean(distances)),
        "accepted": {way: float(np.mean(values)) for way, values in rates.items()},
        "length": {way: float(np.mean(values)) for way, values in lengths.items()},
    }


def draw_texts(llm: LLM, num_tokens: int, temperature: float) -> list[tuple[list[int], int]]:
    """The model's own answers, and how many of their tokens are the prompt."""
    each = max(num_tokens // len(PROMPTS), 8)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=each, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(list(PROMPTS), params)
    return [
        ([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids)) for output in outputs
    ]


def rougher_copy(model: str, method: str, folder: Path) -> Path:
    from quire.cli.main import main

    path = folder / f"{method}.gguf"
    code = main(["quantize", model, str(path), "--method", method, "--requantize", "--report-tokens", "0", "--quiet"])
    assert not code, f"{model} could not be quantized to {method}"
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", default="Q4_0,Q3_K_M,Q2_K", help="of quire quantize: what drafts")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("-k", type=int, default=3, help="draft tokens of a step")
    args = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": len(PROMPTS), "max_num_batched_tokens": 1024}
    target = LLM(args.model, **options)
    result: dict[str, Any] = {}
    print(f"{'draft':10} {'temp':>5} {'TV':>6}  " + "".join(f"{way:>22}" for way in WAYS))
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods.split(","):
            draft = LLM(rougher_copy(args.model, method, Path(folder)), **options)
            for temperature in args.temperature:
                texts = draw_texts(target, args.tokens, temperature)
                found = measure(target, draft, texts, temperature, args.k)
                result.setdefault(method, {})[str(temperature)] = found
                cells = (f"{found['accepted'][way]:13.1%} ({found['length'][way]:.2f})" for way in WAYS)
                print(f"{method:10} {temperature:5} {found['distance']:6.3f}  " + " ".join(cells), flush=True)
            del draft
    print(json.dumps({"benchmark": "shared_noise", "machine": describe(), **vars(args), "drafts": result}))


if __name__ == "__main__":
    main()
