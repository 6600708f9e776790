"""A host tier beside a GPU: a long prefix back from main memory, and how fast blocks move.

    python -m benchmarks.tiers_gpu [--tokens 10000] [--rounds 5]

The shape of Llama 3.1 8B with random weights. The pool holds the prefix once and a little more, so that other prompts
evict it; then it comes from the host, or is computed.

Prints a table and ends in one line of JSON."""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.planning.shapes import SHAPES

VOCAB = 49152  # of the default model, whose tokenizer this one has
BLOCK = 16


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(length)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def engine(folder: str, num_tokens: int, host_gib: float) -> LLM:
    (Path(folder) / "config.json").write_text(json.dumps({**SHAPES["llama-3.1-8b"], "vocab_size": VOCAB}))
    kv_bytes = 131072  # of a token: 32 layers, 8 heads of 128, keys and values in 16 bits
    return LLM(
        folder, device="cuda", load_format="dummy", tokenizer=str(resolve_model(DEFAULT_MODEL).path),
        max_model_len=num_tokens + 512, max_num_batched_tokens=2048, kv_offloading_size=host_gib,
        kv_cache_memory_bytes=int(1.5 * num_tokens) * kv_bytes,
    )  # fmt: skip


def first_token(llm: LLM, tokens: list[int]) -> tuple[float, int]:
    [output] = llm.generate([tokens], params(2), use_tqdm=False)
    assert output.metrics is not None and output.metrics.ttft is not None
    return output.metrics.ttft, output.num_cached_tokens or 0


def from_host(llm: LLM, num_tokens: int, rounds: int) -> dict[str, Any]:
    computed, fetched, cached = [], [], 0
    first_token(llm, prompt(999, num_tokens + 1))  # kernels
    for seed in range(rounds):
        computed.append(first_token(llm, prompt(seed, num_tokens + 1))[0])
        first_token(llm, prompt(1000 + seed, num_tokens))  # evicts it
        seconds, cached = first_token(llm, prompt(seed, num_tokens + 1))
        fetched.append(seconds)
        assert cached >= num_tokens - BLOCK, f"{cached} tokens were cached"
    result = {"computed": median(computed), "host": median(fetched), "tokens": cached}
    for name in ("computed", "host"):
        share = result["computed"] / result[name]
        print(f"first token after {num_tokens} tokens, {name:<9} {1000 * result[name]:8.1f} ms   1/{share:.1f}")
    return result


def moved(llm: LLM, num_tokens: int, rounds: int) -> dict[str, float]:
    """GB/s of copies, alone."""
    import torch

    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    cache = runner.cache
    pairs = [(block, block) for block in range(num_tokens // BLOCK)]
    nbytes = len(pairs) * cache.spec.block_bytes

    def timed(work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        work()
        torch.cuda.synchronize()
        return perf_counter() - begin

    result = {}
    for name, move in (("to the host", cache.swap_out), ("from the host", cache.swap_in)):
        move(pairs)
        result[name] = nbytes / median(timed(partial(move, pairs)) for _ in range(rounds)) / 1e9
        print(f"{name:<16} {result[name]:6.1f} GB/s, {len(pairs)} blocks")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(folder, arguments.tokens, host_gib=32.0)
        result = {
            "benchmark": "tiers_gpu",
            "machine": describe(),
            "first_token": from_host(llm, arguments.tokens, arguments.rounds),
            "moved": moved(llm, arguments.tokens, arguments.rounds),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
