"""Attention of steps in which every sequence has one token (ops/gpu/attention/decode_step.py): microseconds a layer,
and the share of the time in which keys and values could be read.

    python -m benchmarks.gpu.decode_step
    python -m benchmarks.gpu.decode_step --sweep     which launches are the fastest: half a minute

Layers take turns in one CUDA graph, so that the cache holds no pages for the next call."""

import argparse
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.attention import BF16, FP8, WORKING_SET, Step
from benchmarks.gpu.measuring import Calls, seconds_a_call
from quire.ops.gpu.attention.decode import DecodeLaunch, decode_launch
from quire.ops.gpu.attention.decode_step import decode_step
from quire.ops.gpu.attention.pages import Scoring
from quire.ops.gpu.attention.plan import num_workers, plan_decode
from quire.ops.gpu.compile_ahead import compile_ahead

BANDWIDTH = 4.8e12  # bytes a second, of an H200
MAX_MODEL_LEN, MAX_LAYERS, ROWS = 32768, 12, 16
SIZES = ((32, 150), (256, 150), (256, 1000), (32, 16000))  # sequences, and tokens of each
LAUNCHES = tuple(  # positions a round, warps, stages, programs a multiprocessor
    DecodeLaunch(*launch)
    for launch in (
        (16, 1, 2, 16), (16, 1, 3, 12), (16, 1, 5, 8), (32, 1, 2, 12), (32, 1, 2, 16), (32, 1, 3, 8), (64, 1, 2, 8),
        (16, 2, 2, 12), (16, 2, 3, 8), (32, 2, 2, 8), (32, 2, 4, 4), (64, 2, 2, 8), (64, 2, 4, 4), (128, 4, 1, 4),
    )
)  # fmt: skip


class Heads(NamedTuple):
    queries: int
    kv: int
    dim: int


HEADS = {"gpt-oss-20b": Heads(64, 8, 64), "Llama-3.1-8B": Heads(32, 8, 128), "Qwen3-30B-A3B": Heads(32, 4, 128)}
HEADS |= {"heads of 256": Heads(16, 4, 256)}


def step_of(heads: Heads, num_seqs: int, length: int, kept: torch.dtype) -> Step:
    nbytes = num_seqs * length * 2 * heads.kv * heads.dim * kept.itemsize
    layers = max(2, min(MAX_LAYERS, WORKING_SET // nbytes))
    return Step([(length, 1)] * num_seqs, kept, 16, layers, heads.queries, heads.kv, heads.dim)


def calls_of(step: Step, heads: Heads, launch: DecodeLaunch) -> Calls:
    num_seqs, length = len(step.lengths), step.lengths[0][0]
    sizes = [heads.queries * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim]
    projected = torch.randn(num_seqs, sum(sizes), device="cuda").to(BF16).split(sizes, 1)
    angles = torch.randn(num_seqs, heads.dim, device="cuda")
    last = length - 1
    slots = (step.runs.block_tables[:, last // step.block_size] * step.block_size + last % step.block_size).int()
    workers = num_workers(angles.device, launch.per_multiprocessor, heads.kv, num_seqs, MAX_MODEL_LEN)
    plan, scoring = plan_decode(step.runs, workers), Scoring(heads.dim**-0.5)
    return [
        partial(decode_step, *projected, angles, slots, pages, step.runs, plan, scoring, launch=launch)
        for pages in step.pages
    ]


def measure(sweep: bool) -> None:
    found: list[tuple[str, Step, DecodeLaunch, Calls]] = []
    for name, heads in HEADS.items():
        for kept in (BF16, FP8):
            for num_seqs, length in SIZES:
                step = step_of(heads, num_seqs, length, kept)
                taken = decode_launch(heads.dim, ROWS, kept, num_seqs)
                case = f"{name}, {str(kept).removeprefix('torch.')}, {num_seqs} x {length}"
                for launch in dict.fromkeys((taken, *(LAUNCHES if sweep else ()))):
                    found.append((case, step, launch, calls_of(step, heads, launch)))
    compile_ahead(calls[0] for _, _, _, calls in found)
    timed: dict[str, list[tuple[float, DecodeLaunch]]] = {}
    for case, step, launch, calls in found:
        seconds = seconds_a_call(calls)
        if case not in timed:
            share = step.kv_bytes / seconds / BANDWIDTH
            print(f"{case:40} {seconds * 1e6:7.1f} us  {share:4.0%}  {_short(launch)}", flush=True)
        timed.setdefault(case, []).append((seconds, launch))
    if sweep:
        for case, times in timed.items():
            best = sorted(times, key=lambda each: each[0])[:4]
            print(f"{case:40} " + "  ".join(f"{_short(launch)} {seconds * 1e6:.1f}" for seconds, launch in best))


def _short(launch: DecodeLaunch) -> str:
    return f"({launch.block_n}, {launch.num_warps}, {launch.num_stages}, {launch.per_multiprocessor})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    measure(parser.parse_args().sweep)


if __name__ == "__main__":
    main()
