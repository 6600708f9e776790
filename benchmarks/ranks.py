"""What dividing a model among processes costs: tensor parallel beside one process, on the same cores.

    python -m benchmarks.ranks                        exchanges between two processes, then the default model
    python -m benchmarks.ranks --only exchange        microseconds of one exchange, beside gloo's
    python -m benchmarks.ranks MODEL.gguf --size 2 --rounds 5

One process with a thread for each core and as many ranks of one thread each take turns; the table has medians, and the
share of one process's speed. Then: the CPU time that idle ranks take."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import note_others
from benchmarks.processes import progress
from quire import LLM, SamplingParams
from quire.hub import resolve_model
from quire.ops.compiled import native
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory

COLUMNS = 576  # of the default model's hidden states
EXCHANGES = {"2.3 KB": 1, "295 KB": 128}  # rows
NUM_EXCHANGES = 1000  # in one step
IDLE_SECONDS = 5.0

CASES = {  # name -> (sequences, prompt tokens, output tokens)
    "decode 1": (1, 16, 128),
    "decode 8": (8, 16, 128),
    "prefill 512": (1, 512, 1),
}


def exchange_step(group: RankGroup, rows: int) -> Callable[[], None]:
    """A step of exchanges: each rank writes its columns, waits for the others, and reads all columns."""
    cut = RankIndex(group.rank, group.size).even(COLUMNS)
    shared = group.allocate(2 * 4 * (rows * COLUMNS + 64))
    tape = native.Tape(
        np.zeros(4096, np.uint8), num_blocks=1, num_layers=1, num_kv_heads=1, head_dim=8, block_size=8,
        dtype="float32", latent=0, conv_layers=0, conv_rows=0, conv_channels=0, max_tokens=rows,
        arena_size=2 * rows * COLUMNS, num_threads=1, group=group.native, shared=shared,
    )  # fmt: skip
    own = native.View(0, cut.count, cut.count, False)
    read = native.View(rows * COLUMNS, COLUMNS, COLUMNS, False)
    ones = np.ones((1, cut.count), np.float32).view(np.uint8)
    tape.embedding(False, "F32", ones, None, own)  # what an arena holds at first may be slow to compute with
    for number in range(NUM_EXCHANGES):
        start = number % 2 * rows * COLUMNS  # a rank may be one exchange ahead
        tape.copy_columns(own, native.View(start + cut.first, COLUMNS, cut.count, False, True))
        tape.rank_barrier()
        tape.scale(native.View(start, COLUMNS, COLUMNS, False, True), 1.0, read)
    ids = np.zeros(rows, np.int32)
    one_sequence = np.array([0, rows], np.int32), np.array([rows], np.int32), np.zeros((1, rows), np.int32)
    nothing = np.zeros(0, np.int32), np.zeros((0, 1), np.float32)

    def run(held: Any = (shared, ones)) -> None:  # the tape points to them
        tape.run(ids, ids, ids, *one_sequence, *nothing)

    return run


def exchange_seconds(group: RankGroup, rows: int) -> float:
    """Of one exchange: the median of some steps."""
    run, seconds = exchange_step(group, rows), []
    for _ in range(9):
        group.barrier()
        begin = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - begin) / NUM_EXCHANGES)
    return statistics.median(seconds)


def other_rank(memory: int) -> None:
    group = RankGroup(memory, 1, 2)
    for rows in EXCHANGES.values():
        exchange_seconds(group, rows)


def measure_exchanges() -> dict[str, float]:
    """Microseconds."""
    memory = new_shared_memory()
    with subprocess.Popen([sys.executable, "-m", "benchmarks.ranks", "--memory", str(memory)], pass_fds=[memory]):
        group = RankGroup(memory, 0, 2)
        return {name: 1e6 * exchange_seconds(group, rows) for name, rows in EXCHANGES.items()}


def gloo_seconds(rank: int, address: str) -> dict[str, float]:
    """Of an all-reduce of as many bytes by torch.distributed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    for name, rows in EXCHANGES.items():
        x = torch.zeros(rows, COLUMNS)
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - begin)
        found[name] = 1e6 * statistics.median(times)
    dist.destroy_process_group()
    return found


def measure_gloo() -> dict[str, float]:
    address = f"file:///tmp/quire-gloo-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-m", "benchmarks.ranks", "--gloo", address]):
        found = gloo_seconds(0, address)
    Path(address.removeprefix("file://")).unlink(missing_ok=True)
    return found


def rate(llm: LLM, case: str, seed: int) -> float:
    """Tokens a second: of prompts where one token is asked for, else of output."""
    num_seqs, num_prompt, num_output = CASES[case]
    random = np.random.default_rng(seed)
    prompts = [{"prompt_token_ids": random.integers(100, 10_000, num_prompt).tolist()} for _ in range(num_seqs)]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return num_seqs * (num_prompt if num_output == 1 else num_output) / seconds


def cpu_seconds(processes: list[int]) -> float:
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_model(path: Path, size: int, rounds: int) -> dict[str, Any]:
    options = {"threads": size, "max_num_seqs": 16, "max_model_len": 1024, "enable_prefix_caching": False}
    engines = {"one process": LLM(path, **options), f"{size} ranks": LLM(path, tensor_parallel_size=size, **options)}
    found: dict[str, dict[str, list[float]]] = {case: {name: [] for name in engines} for case in CASES}
    for number in range(rounds + 1):
        note_others(f"round {number} of {rounds}")
        for case, rates in found.items():
            for name, llm in engines.items():
                measured = rate(llm, case, seed=number)
                if number:  # the first is to warm up
                    rates[name].append(measured)
    medians = {case: {name: statistics.median(rates) for name, rates in row.items()} for case, row in found.items()}
    executor: Any = engines[f"{size} ranks"].engine.executor
    processes = [one.process.pid for one in executor.ranks.processes]
    before = cpu_seconds(processes)
    time.sleep(IDLE_SECONDS)
    idle = (cpu_seconds(processes) - before) / IDLE_SECONDS / len(processes)
    return {"tokens/s": medians, "idle share of a CPU": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--size", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("exchange", "model"))
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)  # this process is the other rank
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory is not None:
        return other_rank(args.memory)
    if args.gloo:
        gloo_seconds(1, args.gloo)
        return None
    result: dict[str, Any] = {"isa": native.isa(), "cpus": os.cpu_count()}
    if args.only != "model":
        result["exchange us"] = ours = measure_exchanges()
        print(f"{'exchange, 2 processes':24}{'quire us':>10}{'gloo us':>10}")
        try:
            result["gloo us"] = theirs = measure_gloo()
        except ModuleNotFoundError:
            theirs = {}
        for name, microseconds in ours.items():
            print(f"{name:24}{microseconds:>10.1f}" + (f"{theirs[name]:>10.0f}" if theirs else f"{'-':>10}"))
    if args.only != "exchange":
        progress("loading the model, once in one process and once in ranks")
        measured = measure_model(resolve_model(args.model).path, args.size, args.rounds)
        result |= measured
        print(f"\n{'tokens/s':24}{'one process':>14}{f'{args.size} ranks':>14}{'share':>8}")
        for case, (alone, ranks) in ((case, row.values()) for case, row in measured["tokens/s"].items()):
            print(f"{case:24}{alone:>14.1f}{ranks:>14.1f}{ranks / alone:>8.2f}")
        print(f"idle: {measured['idle share of a CPU']:.1%} of a CPU for each rank")
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
