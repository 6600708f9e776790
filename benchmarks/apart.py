"""Prefill and decode apart: how long answers pause while long prompts arrive, and when the prompts' first tokens come.

    python -m benchmarks.apart [MODEL] [--rounds 3] [--users 8] [--prompt-tokens 2048] [--output-tokens 192]

Eight users decode all the time. In turns, nothing else arrives, or one long prompt after the other does. Servers:

one engine       on all cores, as `quire serve` starts it
one core         one engine with one thread: what a prompt takes that is computed where it is answered
apart            --prefill-engines 1 --decode-engines 1: the cores are divided, so on two each engine has one

Prints a table and ends in one line of JSON. The machine should have two cores and nothing else to do."""

import argparse
import asyncio
import json
import random
from statistics import median
from typing import Any

import uvloop

from benchmarks.load import Ask
from benchmarks.machine import describe, note_others
from benchmarks.own_server import own_server
from benchmarks.processes import progress
from quire.cli.bench.serve.generator import complete, generate_load
from quire.cli.bench.serve.http_client import HttpClient
from quire.planning.percentiles import percentile

SERVERS = {
    "one engine": (),
    "one core": ("--threads", "1"),
    "apart": ("--prefill-engines", "1", "--decode-engines", "1"),
}
PATH = "/v1/completions"
VOCAB = range(100, 20_000)
USER_PROMPT = 16  # tokens
REQUESTS_A_USER = 2  # in one turn
NUM_ALONE = 5  # prompts that are measured without users


def asks(rng: random.Random, count: int, num_prompt: int, num_output: int) -> list[bytes]:
    return [Ask(rng.choices(VOCAB, k=num_prompt), num_output).body() for _ in range(count)]


class Measured:
    """Of one server: gaps between tokens of users, and times to first tokens of prompts."""

    def __init__(self) -> None:
        self.gaps: dict[str, list[float]] = {"none": [], "prompts": []}
        self.ttft: dict[str, list[float]] = {"alone": [], "beside users": []}

    def summary(self) -> dict[str, float]:
        figures = {
            f"gap p{share}, {kind}": percentile(gaps, share) for kind, gaps in self.gaps.items() for share in (50, 99)
        }
        figures |= {f"ttft, {kind}": median(times) for kind, times in self.ttft.items()}
        figures["ratio of p99"] = figures["gap p99, prompts"] / figures["gap p99, none"]
        figures["prompts"] = len(self.ttft["beside users"])
        return figures


async def prompt_alone(url: str, body: bytes) -> float:
    client = HttpClient(url)
    try:
        return (await complete(client, PATH, body)).ttft
    finally:
        await client.close()


async def turn(url: str, args: argparse.Namespace, rng: random.Random, with_prompts: bool, into: Measured) -> None:
    """All users, until each has its answers; with prompts, one after the other all the time."""
    client, bodies = HttpClient(url), asks(rng, args.users * REQUESTS_A_USER, USER_PROMPT, args.output_tokens)
    prompts = asks(rng, 1000, args.prompt_tokens, args.answer_tokens)

    async def arrive() -> None:
        await asyncio.sleep(0.5)
        for body in prompts:
            into.ttft["beside users"].append((await complete(client, PATH, body)).ttft)

    arriving = asyncio.create_task(arrive()) if with_prompts else None
    try:
        run = await generate_load(client, PATH, bodies, [0.0] * len(bodies), max_concurrency=args.users)
    finally:
        if arriving is not None:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
        await client.close()
    for outcome in run.outcomes:
        assert outcome.answer is not None, outcome.failure
        into.gaps["prompts" if with_prompts else "none"] += outcome.answer.gaps


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    measured, rng = Measured(), random.Random(args.seed)
    note_others(f"{name}: {' '.join(SERVERS[name]) or 'no flags'}")
    with own_server(args.model, *SERVERS[name], "--max-model-len", str(args.prompt_tokens + 1024)) as (url, _):
        for body in asks(rng, NUM_ALONE + 1, args.prompt_tokens, args.answer_tokens):
            measured.ttft["alone"].append(uvloop.run(prompt_alone(url, body)))
        del measured.ttft["alone"][0]  # memory is touched for the first time
        for number in range(args.rounds):
            for with_prompts in (False, True):
                progress(f"  round {number + 1}, {'prompts arrive' if with_prompts else 'none arrive'}")
                uvloop.run(turn(url, args, rng, with_prompts, measured))
    return measured.summary()


def show(results: dict[str, dict[str, float]]) -> None:
    print(
        f"{'':<12}{'gaps, none (ms)':>22}{'gaps, prompts (ms)':>22}"
        f"{'p99 ratio':>11}{'TTFT alone':>13}{'beside users':>14}"
    )
    for name, each in results.items():
        none, prompts = (
            f"{1e3 * each[f'gap p50, {kind}']:.1f} / {1e3 * each[f'gap p99, {kind}']:.1f}"
            for kind in ("none", "prompts")
        )
        ttft = [f"{1e3 * each[f'ttft, {kind}']:.0f} ms" for kind in ("alone", "beside users")]
        print(f"{name:<12}{none:>22}{prompts:>22}{each['ratio of p99']:>11.2f}{ttft[0]:>13}{ttft[1]:>14}")
    print("gaps: p50 / p99 between tokens of the users")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=192, help="of a user's request")
    parser.add_argument(
        "--answer-tokens",
        type=int,
        default=1,
        help="of a long prompt: a row with a long context makes every step longer, wherever it is computed",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(SERVERS), default=list(SERVERS), help="these servers alone")
    args = parser.parse_args()
    results: dict[str, Any] = {name: measure(name, args) for name in args.only}
    show(results)
    if {"apart", "one core"} <= results.keys():
        ratio = results["apart"]["ttft, alone"] / results["one core"]["ttft, alone"]
        results["ttft ratio"] = ratio
        print(f"TTFT alone, apart over one core: {ratio:.2f}")
    print(json.dumps({"machine": describe(), "arguments": vars(args), **results}))


if __name__ == "__main__":
    main()
