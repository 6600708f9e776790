"""Microseconds to draw for all lines of a step on a GPU, by features and number of lines.

    python -m benchmarks.gpu.sampler              # checks tokens against the specification, then times
    python -m benchmarks.gpu.sampler --sweep      # also tries ways to split the vocabulary

Times are of a captured graph. Beside each stands how many times the logits could have been copied (read, at the speed
of a device copy measured here) in that time: sampling needs one reading to find the greatest logit, one more to weigh,
one more to list what top_k and top_p decide on."""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire.ops.gpu.sampling.job import Split
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.reference.sampler import TorchSampler
from quire.ops.row_params import RowParams

VOCAB = 128256
LINES = (1, 8, 64, 256)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k=50 top_p=0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p=0.95, flat logits": {"temperature": 0.8, "top_p": 0.95},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "top_k=50, equal logits": {"top_k": 50},  # all are decided one by one
}


def model_like(lines: int, vocab: int, *, flat: bool = False) -> Tensor:
    """A few likely tokens over a broad bell, as a language model has them; flat: as random weights give them."""
    logits = torch.randn((lines, vocab), device="cuda") * (1.0 if flat else 2.5)
    if not flat:
        likely = torch.randint(vocab, (lines, 30), device="cuda")
        logits.scatter_add_(1, likely, torch.empty((lines, 30), device="cuda").exponential_(1 / 6.0))
    return logits


def logits_of(case: str, lines: int, dtype: torch.dtype) -> Tensor:
    if "equal" in case:
        return torch.zeros((lines, VOCAB), device="cuda", dtype=dtype)
    return model_like(lines, VOCAB, flat="flat" in case).to(dtype)


# -- time --------------------------------------------------------------------------------------------------------------


def microseconds(launch: Callable[[], object], repeats: int = 30) -> float:
    """Of one replay of a graph of it: the median of `repeats`, each of them several replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 5)
    return median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source), 10) * 1e6


def time_case(case: str, lines: int, dtype: torch.dtype, split: Split | None) -> float:
    sampler = DeviceSampler(lines, VOCAB, "cuda", split=split)
    for row in range(lines):
        sampler.admit(row, RowParams(seed=row, sample=0, **CASES[case]), list(range(512)), 512)
    sampler.upload()
    logits, rows = logits_of(case, lines, dtype), torch.arange(lines, dtype=torch.int32, device="cuda")
    features = sampler.needs(range(lines))
    return microseconds(lambda: sampler.launch(logits, rows, lines, features))


# -- the same tokens ---------------------------------------------------------------------------------------------------


def random_params(choose: random.Random, vocab: int) -> RowParams:
    def ids(count: int) -> tuple[int, ...]:
        return tuple({choose.randrange(vocab) for _ in range(count)})

    return RowParams(
        seed=choose.randrange(-(2**63), 2**64),
        sample=choose.randrange(128),
        temperature=choose.choice([0.0, 0.3, 0.8, 1.0, 1.0, 3.0, 50.0]),
        top_k=choose.choice([0, 0, 0, 1, 40, 3000]),
        top_p=choose.choice([1.0, 0.999, 0.95, 0.5, 1e-9]),
        min_p=choose.choice([0.0, 0.0, 0.05]),
        repetition_penalty=choose.choice([1.0, 1.0, 1.3]),
        presence_penalty=choose.choice([0.0, 0.0, 0.6]),
        frequency_penalty=choose.choice([0.0, 0.0, 0.3]),
        logit_bias=tuple((id, choose.uniform(-9, 9)) for id in ids(choose.choice([0, 0, 5]))),
        allowed=choose.choice([None, None, None, ids(9)]),
        banned=tuple((id,) for id in ids(choose.choice([0, 0, 5]))),
        stop_ids=ids(2),
        min_tokens=choose.choice([0, 3]),
        num_logprobs=choose.choice([-1, -1, 2]),
    )


def shapes() -> Iterator[tuple[int, int, torch.dtype, float]]:
    """(vocab, lines, dtype, spread of the logits)"""
    for vocab in (17, 1000, 32003, VOCAB, 262144):
        yield vocab, 12, torch.float32, 2.5
    yield 32003, 5, torch.bfloat16, 1.0
    yield VOCAB, 6, torch.float32, 0.01


def check(choose: random.Random) -> tuple[int, int]:
    """-> draws compared, draws that differ"""
    compared = wrong = 0
    for vocab, lines, dtype, spread in shapes():
        ours, spec = DeviceSampler(lines, vocab, "cuda"), TorchSampler(lines, vocab)
        rows = list(range(lines))
        for row in rows:
            params, tokens = random_params(choose, vocab), [choose.randrange(vocab) for _ in range(20)]
            for sampler in (ours, spec):
                sampler.admit(row, params, tokens, 10)
        for _ in range(2):
            logits = (model_like(lines, vocab) * (spread / 2.5)).to(dtype)
            logits[choose.randrange(lines), choose.randrange(vocab)] = float("nan")
            logits[choose.randrange(lines), choose.randrange(vocab)] = float("inf")
            timings, expected = ours.draw(logits, rows), spec.draw(logits.float().cpu(), rows)
            for row, one, other in zip(rows, timings, expected, strict=True):
                compared += 1
                same = [(e.token, e.rank) for e in one.logprobs] == [(e.token, e.rank) for e in other.logprobs]
                if one.tokens != other.tokens or not same:
                    wrong += 1
                    print(f"DIFFERS: vocab {vocab}, {dtype}, row {row}: {one} and {other} of {spec._rows[row].params}")
    return compared, wrong


# -- the table ---------------------------------------------------------------------------------------------------------


SPLITS = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16)]
SWEPT = ["temperature", "top_k=50 top_p=0.95", "top_p=0.95, flat logits", "greedy, penalties"]


def sweep(dtype: torch.dtype) -> None:
    for case in SWEPT:
        for lines in LINES:
            timings: list[tuple[float, Split]] = []
            for split in (Split(tile, warps) for tile, warps in SPLITS):
                try:
                    timings.append((time_case(case, lines, dtype, split), split))
                except Exception as error:  # one that does not compile must not end the sweep
                    print(f"{case}, {lines} lines, {split}: {type(error).__name__}: {str(error)[:80]}")
            timings.sort(key=lambda entry: entry[0])
            times = ", ".join(f"{split.tile}/{split.warps} {us:.1f}" for us, split in timings)
            print(f"sweep {case:26}{lines:5} lines: {times} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)

    compared, wrong = check(random.Random(0))
    print(f"{compared - wrong} of {compared} draws are those of the specification", flush=True)
    ceiling = copy_bandwidth()
    print(f"copy: {ceiling / 1e12:.2f} TB/s; logits {args.dtype}, vocabulary {VOCAB}")
    print(f"{'':28}" + "".join(f"{f'{lines} lines':>22}" for lines in LINES))
    results: dict[str, dict[int, float]] = {}
    for case in CASES:
        results[case] = {}
        line = f"{case:28}"
        for lines in LINES:
            us = time_case(case, lines, dtype, None)
            results[case][lines] = round(us, 1)
            reading = lines * VOCAB * dtype.itemsize / ceiling * 1e6
            line += f"{us:10.1f} us {us / reading:5.1f} x"
        print(line, flush=True)
    if args.sweep:
        sweep(dtype)
    print(json.dumps({"bench": "gpu.sampler", "dtype": args.dtype, "wrong": wrong, "us": results}))


if __name__ == "__main__":
    main()
