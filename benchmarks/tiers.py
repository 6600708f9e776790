"""The KV cache beyond its pool: what a disk tier gains after a restart and beyond the pool, and what it costs if not.

    python -m benchmarks.tiers [MODEL] [--rounds 5] [--only restart|beyond|misses|control|policies] [--folder /dev/shm]

restart  time to the first token of a 1,024-token prefix, by a new process: computed, from files in the page cache, and
         from files that the page cache has lost
beyond   tokens per second of requests whose prefixes are three times the pool, without and with a disk tier
misses   tokens per second of requests that share nothing, without and with a disk tier, in turns
control  the same by two engines without a disk tier: how far from 1 the ratio is by chance
policies tokens per second of 32 users whose requests share nothing, written back and written through, in turns

Ratios are medians over rounds, with their standard error; beside them the share of a core that the threads which write
and read took. Prints a table and ends in one line of JSON."""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

from quire import LLM, SamplingParams
from quire.core.records import TierStats

PREFIX = 1024  # tokens
VOCAB = range(100, 20_000)
POOL_BLOCKS = 256  # of 16 tokens
PARTS = ("restart", "beyond", "misses", "control", "policies")
USERS = 32
MEDIAN_ERROR = 1.2533  # times the standard error of a mean, of normal numbers


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCAB) for _ in range(length)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


# ---- restart


def first_token(model: str, disk: str | None, seed: int) -> dict[str, Any]:
    """In this process: the TTFT of a prefix, after a short prompt that warms the engine up."""
    llm = LLM(model, max_num_seqs=4, **({"kv_disk_path": disk} if disk else {}))
    llm.generate([prompt(999, 20)], params(2))
    [output] = llm.generate([prompt(seed, PREFIX + 1)], params(4))
    assert output.metrics is not None and output.metrics.ttft is not None
    llm.engine.stop()
    return {"ttft": output.metrics.ttft, "cached": output.num_cached_tokens, "tokens": output.outputs[0].token_ids}


def in_new_process(model: str, disk: str | None, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tiers", model, "--first-token", disk or "", "--seed", str(seed)]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def drop_from_page_cache(folder: str) -> None:
    for path in Path(folder).rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def restart(model: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"computed": [], "page cache": [], "disk": []}
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as disk:
            cold = in_new_process(model, disk, seed)  # it computes and saves
            for name in ("page cache", "disk"):
                if name == "disk":
                    drop_from_page_cache(disk)
                warm = in_new_process(model, disk, seed)
                assert warm["tokens"] == cold["tokens"] and warm["cached"] == PREFIX, (warm, cold)
                times[name].append(warm["ttft"])
        alone = in_new_process(model, None, seed)
        assert alone["tokens"] == cold["tokens"] and alone["cached"] == 0
        times["computed"].append(alone["ttft"])
    result = {name: median(each) for name, each in times.items()}
    for name, seconds in result.items():
        share = f"1/{result['computed'] / seconds:.1f}"
        print(f"restart   first token, {name:<11} {1000 * seconds:9.1f} ms   {share} of computed")
    return result


# ---- throughput


def measured(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
    """-> tokens per second, and the share of a core that threads of tiers took"""
    begin, cpu = perf_counter(), tier_cpu_seconds()
    outputs = llm.generate(prompts, params(max_tokens), use_tqdm=False)
    num_tokens = sum(len(each) for each in prompts) + sum(len(o.outputs[0].token_ids) for o in outputs)
    seconds = perf_counter() - begin
    return num_tokens / seconds, (tier_cpu_seconds() - cpu) / seconds


def tier_cpu_seconds() -> float:
    """Of the threads of this process that write and read blocks."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("kv-")]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in ids) / 1e9


def compared(name: str, engines: dict[str, LLM], rounds: list[list[list[int]]], max_tokens: int) -> Any:
    """The same rounds of prompts by two engines, in turns. -> the rates of both, and what the second did"""
    first, second = engines
    rates: dict[str, list[float]] = {kind: [] for kind in engines}
    shares: dict[str, list[float]] = {kind: [] for kind in engines}
    for number, prompts in enumerate(rounds):
        for kind in sorted(engines, reverse=number % 2 == 0):
            rate, share = measured(engines[kind], prompts, max_tokens)
            rates[kind].append(rate)
            shares[kind].append(share)
    tier = engines[second].engine.stats().tiers.get("disk", TierStats())
    for llm in engines.values():
        llm.engine.stop()
    result: dict[str, Any] = {kind: median(each[1:]) for kind, each in rates.items()}  # the first round fills caches
    for kind, rate in result.items():
        print(
            f"{name:<9} {kind:<24} {rate:9.1f} tokens/s   {100 * mean(shares[kind][1:]):5.2f} % of a core for the tier"
        )
    ratios = [b / a for a, b in zip(rates[first][1:], rates[second][1:], strict=True)]
    error = MEDIAN_ERROR * stdev(ratios) / len(ratios) ** 0.5
    written = f"{tier.written_bytes / 2**20:.0f} MiB written, {tier.skipped_blocks} blocks skipped"
    print(f"{name:<9} {'ratio':<24} {median(ratios):9.3f} ± {error:.3f}   {tier.hits} tokens from disk, {written}")
    return {
        **result,
        "ratio": median(ratios),
        "error": error,
        "core shares": {kind: mean(each[1:]) for kind, each in shares.items()},
        "hits": tier.hits,
        "written": tier.written_bytes,
        "skipped": tier.skipped_blocks,
    }


def without_and_with(model: str, disk: str, options: dict[str, Any]) -> dict[str, LLM]:
    return {"without a disk tier": LLM(model, **options), "with a disk tier": LLM(model, kv_disk_path=disk, **options)}


def beyond(model: str, rounds: int, disk: str) -> Any:
    prefixes = [prompt(1000 + i, PREFIX) for i in range(3 * POOL_BLOCKS * 16 // PREFIX)]
    rng = random.Random(0)
    served = []
    for number in range(rounds + 1):
        order = rng.sample(range(len(prefixes)), len(prefixes))
        served.append([prefixes[i] + prompt(10_000 + number * 100 + i, 32) for i in order])
    block_bytes = _block_bytes(model)
    options = {"max_num_seqs": 2, "max_model_len": 2048, "kv_cache_memory_bytes": POOL_BLOCKS * block_bytes}
    return compared("beyond", without_and_with(model, disk, options), served, 16)


def misses(model: str, rounds: int, disk: str) -> Any:
    options = {"max_num_seqs": 8, "max_model_len": 2048}
    return compared("misses", without_and_with(model, disk, options), nothing_shared(rounds), 32)


def control(model: str, rounds: int) -> Any:
    engines = {name: LLM(model, max_num_seqs=8, max_model_len=2048) for name in ("an engine", "another one")}
    return compared("control", engines, nothing_shared(rounds), 32)


def nothing_shared(rounds: int) -> list[list[list[int]]]:
    return [[prompt(100_000 + number * 100 + i, 256) for i in range(16)] for number in range(2 * rounds + 1)]


def policies(model: str, rounds: int, disk: str) -> Any:
    served = [[prompt(200_000 + number * 100 + i, 128) for i in range(USERS)] for number in range(2 * rounds + 1)]
    engines = {
        policy: LLM(
            model, max_num_seqs=USERS, max_model_len=2048, kv_disk_path=f"{disk}/{policy}", kv_disk_write_policy=policy
        )
        for policy in ("write_back", "write_through")
    }
    return compared("policies", engines, served, 64)


def _block_bytes(model: str) -> int:
    llm = LLM(model, max_num_seqs=1, max_model_len=64)
    return llm.engine.capacity.cache_bytes // llm.engine.capacity.num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--folder", help="where the disk tiers are (default: the folder of temporary files)")
    parser.add_argument("--first-token", metavar="DIR", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_token is not None:
        print(json.dumps(first_token(arguments.model, arguments.first_token or None, arguments.seed)))
        return
    result: dict[str, Any] = {"machine": platform.machine(), "model": arguments.model}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as disk:
        # First what shares nothing: ext4 makes files more slowly for some minutes after many were removed.
        if arguments.only in (None, "misses"):
            result["misses"] = misses(arguments.model, arguments.rounds, f"{disk}/misses")
        if arguments.only in (None, "control"):
            result["control"] = control(arguments.model, arguments.rounds)
        if arguments.only in (None, "policies"):
            result["policies"] = policies(arguments.model, arguments.rounds, f"{disk}/policies")
        if arguments.only in (None, "beyond"):
            result["beyond"] = beyond(arguments.model, arguments.rounds, f"{disk}/beyond")
        if arguments.only in (None, "restart"):
            result["restart"] = restart(arguments.model, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
