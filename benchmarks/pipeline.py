"""What stages gain: pipeline parallel on several cores beside one process on one of them.

    python -m benchmarks.pipeline                       the default model: 2 stages on cores 0 and 1, one on core 0
    python -m benchmarks.pipeline MODEL.gguf --size 2 --rounds 5
    python -m benchmarks.pipeline --tcp                 with stages that are reached over loopback TCP, too

Every stage has one thread, pinned to a core of its own; the engine's process has the last stage. Engines take turns;
the table has medians. The bubble of a stage is the share of the time in which it computes nothing, by its CPU time.
Beside it stands (p - 1) / (m + p - 1): the bubble of p stages that are emptied after every m micro-batches."""

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import note_others
from benchmarks.processes import progress
from benchmarks.ranks import cpu_seconds
from quire import LLM, SamplingParams
from quire.hub import resolve_model
from quire.ops.compiled import native

CASES = {  # name -> (sequences, prompt tokens, output tokens)
    "decode 1": (1, 16, 64),
    "decode 4": (4, 16, 64),
    "decode 16": (16, 16, 64),
    "decode 32": (32, 16, 64),
    "prefill 16 x 256": (16, 256, 1),
}
OPTIONS = {"max_num_seqs": 32, "max_model_len": 1024, "enable_prefix_caching": False}


class Pinned:
    """An engine whose stages have a core each: the last stage, in this process, has the first core."""

    def __init__(self, path: Path, size: int, cores: list[int], tcp: bool = False) -> None:
        self.cores = cores[:size]
        os.sched_setaffinity(0, cores)
        if tcp:
            self.listeners = [start_listener(path) for _ in range(size - 1)]
            addresses = ",".join(address for _, address in self.listeners)
            self.llm = LLM(path, threads=1, pipeline_stages=addresses, **OPTIONS)
            self.others = [child_of(process.pid) for process, _ in self.listeners]
        else:
            self.llm = LLM(path, threads=size, pipeline_parallel_size=size, **OPTIONS)
            executor: Any = self.llm.engine.executor
            self.others = [one.process.pid for one in executor.ranks.processes] if size > 1 else []
        for process, core in zip(self.others, self.cores[1:], strict=True):
            os.sched_setaffinity(process, {core})

    def measure(self, case: str, seed: int) -> tuple[float, list[float]]:
        """-> tokens a second (of prompts where one token is asked for, else of output), the bubble of each stage"""
        num_seqs, num_prompt, num_output = CASES[case]
        random = np.random.default_rng(seed)
        prompts = [{"prompt_token_ids": random.integers(100, 10_000, num_prompt).tolist()} for _ in range(num_seqs)]
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        processes = [*self.others, os.getpid()]
        os.sched_setaffinity(0, {self.cores[0]})
        before, begin = [cpu_seconds([process]) for process in processes], time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        busy = [cpu_seconds([process]) - old for process, old in zip(processes, before, strict=True)]
        num_tokens = num_seqs * (num_prompt if num_output == 1 else num_output)
        return num_tokens / seconds, [max(0.0, 1 - one / seconds) for one in busy]


def start_listener(path: Path) -> tuple[subprocess.Popen[str], str]:
    """`quire stage`, and its address."""
    command = [sys.executable, "-m", "quire.cli.main", "stage", str(path), "--listen", "127.0.0.1:0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = process.stderr.readline().split(" on ")[1].strip()
    atexit.register(process.terminate)
    return process, address


def child_of(process: int) -> int:
    [child] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def measure(path: Path, size: int, rounds: int, tcp: bool) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < size:
        raise SystemExit(f"{size} stages need {size} cores, and this process has {len(cores)}")
    engines = {"one stage": Pinned(path, 1, cores), f"{size} stages": Pinned(path, size, cores)}
    if tcp:
        engines["over TCP"] = Pinned(path, size, cores, tcp=True)
    found: dict[str, dict[str, list[tuple[float, list[float]]]]] = {
        case: {name: [] for name in engines} for case in CASES
    }
    for number in range(rounds + 1):
        note_others(f"round {number} of {rounds}")
        for case, of_case in found.items():
            for name, engine in engines.items():
                measured = engine.measure(case, seed=number)
                if number:  # the first is to warm up
                    of_case[name].append(measured)
    micro_batches = engines[f"{size} stages"].llm.engine.capacity.micro_batches
    return {
        "stages": size,
        "micro-batches": micro_batches,
        "(p-1)/(m+p-1)": (size - 1) / (micro_batches + size - 1),
        "cases": {case: {name: _medians(rows) for name, rows in of_case.items()} for case, of_case in found.items()},
    }


def _medians(rows: list[tuple[float, list[float]]]) -> dict[str, Any]:
    bubbles = zip(*(bubble for _, bubble in rows), strict=True)
    return {
        "tokens/s": statistics.median(rate for rate, _ in rows),
        "bubbles": [statistics.median(of_stage) for of_stage in bubbles],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--size", type=int, default=2, help="stages (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tcp", action="store_true", help="also with stages over loopback TCP")
    args = parser.parse_args()
    progress("loading the model, once in one stage and once in several")
    result = {"isa": native.isa(), **measure(resolve_model(args.model).path, args.size, args.rounds, args.tcp)}
    print(f"{'tokens/s':32}{'one stage':>12}{'stages':>12}{'times':>8}   bubbles, by stage")
    for case, row in result["cases"].items():
        alone, *others = row.items()
        for name, staged in others:
            bubbles = " ".join(f"{bubble:4.0%}" for bubble in staged["bubbles"])
            rates = alone[1]["tokens/s"], staged["tokens/s"]
            print(f"{f'{case}, {name}':32}{rates[0]:>12.1f}{rates[1]:>12.1f}{rates[1] / rates[0]:>8.2f}   {bubbles}")
    print(f"(p - 1) / (m + p - 1): {result['(p-1)/(m+p-1)']:.0%}, with {result['micro-batches']} micro-batches")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
