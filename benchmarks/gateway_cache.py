"""Conversations through a gateway over two engines: what routing that knows the caches is worth.

    python -m benchmarks.gateway_cache                              one engine; round_robin, cache_aware, KV events
    python -m benchmarks.gateway_cache --conversations 6 --turns 4 --memory 84MiB

Each conversation begins with instructions that all share and a text of its own, and goes on turn by turn, in random
order. The caches of both engines together have room for all of it, and one alone has not: what is sent to both does not
fit. `one` is a single engine with the memory of both, whose hit rate is the most that routing can reach. Told for each
policy: turns a second, the share of prompt tokens that was cached, and the time to a turn's answer."""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.gateway import free_port
from benchmarks.gateway_kills import wait_until_ready
from benchmarks.machine import describe
from benchmarks.processes import interruptible, progress, running
from quire.cli.values import read_bytes

POLICIES = ("one", "round_robin", "cache_aware", "events")
AIM = 1.3  # times the turns a second of round_robin
CONFIGURED = {"one": "round_robin", "events": "cache_aware"}
HIT_AIM = 0.97  # of the hit rate of one engine with the memory of all
TEXT = "ship light storm keeper harbour rope lamp night wave stone gull letter winter door boat salt wind glass"


@dataclass
class Outcome:
    policy: str
    turns_per_second: float
    cached: float  # share of prompt tokens
    median_seconds: float
    p90_seconds: float


@dataclass
class Engine:
    port: int
    events: str
    replay: str


def start(stack: ExitStack, args: argparse.Namespace, count: int, memory: int) -> list[Engine]:
    engines = []
    for _ in range(count):
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        engine = Engine(free_port(), *endpoints)
        config = {"enable_kv_cache_events": True, "endpoint": engine.events, "replay_endpoint": engine.replay}
        flags = ["--port", str(engine.port), "--served-model-name", "m", "--threads", str(args.threads)]
        flags += ["--kv-cache-memory-bytes", str(memory), "--kv-events-config", json.dumps(config)]
        stack.enter_context(running([sys.executable, "-m", "quire.cli.main", "serve", args.model, *flags]))
        engines.append(engine)
    wait_until_ready([engine.port for engine in engines])
    return engines


def config(engines: list[Engine], policy: str, model: str) -> str:
    lines = ["port = 0", "admin_port = 0", f'policy = "{CONFIGURED.get(policy, policy)}"']
    if policy == "events":
        lines += ["[models.m]", f"tokenizer = {json.dumps(model)}"]
    for engine in engines:
        lines += ["[[workers]]", f'url = "http://127.0.0.1:{engine.port}"']
        if policy == "events":
            lines += [f'kv_events = "{engine.events}"', f'kv_replay = "{engine.replay}"']
    return "\n".join(lines) + "\n"


async def converse(url: str, args: argparse.Namespace) -> tuple[list[float], float, float]:
    """-> seconds of each turn, share of cached prompt tokens, seconds of all"""
    rng = random.Random(11)
    vocabulary = TEXT.split()

    def words(count: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(count))

    instructions = {"role": "system", "content": words(args.instructions)}
    talks = [[instructions, {"role": "user", "content": words(args.text)}] for _ in range(args.conversations)]
    order = [number for number in range(args.conversations) for _ in range(args.turns)]
    rng.shuffle(order)
    locks = [asyncio.Lock() for _ in talks]
    seconds: list[float] = []
    prompt = cached = 0
    limit = asyncio.Semaphore(args.concurrency)

    async def turn(client: httpx.AsyncClient, number: int) -> None:
        nonlocal prompt, cached
        async with locks[number], limit:
            begin = time.perf_counter()
            asked = {"model": "m", "messages": talks[number], "max_tokens": args.tokens, "seed": 1, "ignore_eos": True}
            answer = (await client.post(f"{url}/v1/chat/completions", json=asked)).raise_for_status().json()
            seconds.append(time.perf_counter() - begin)
            talks[number] = [
                *talks[number],
                answer["choices"][0]["message"],
                {"role": "user", "content": words(args.words)},
            ]
            prompt += answer["usage"]["prompt_tokens"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(timeout=600) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(turn(client, number) for number in order))
        return seconds, cached / prompt, time.perf_counter() - begin


def measure_on_own(policy: str, args: argparse.Namespace) -> Outcome:
    """`one`: a single engine with the memory of all."""
    memory = read_bytes(args.memory)
    with ExitStack() as stack:
        count = 1 if policy == "one" else args.engines
        return measure(start(stack, args, count, memory * args.engines // count), policy, args)


def measure(engines: list[Engine], policy: str, args: argparse.Namespace) -> Outcome:
    with ExitStack() as stack:
        file = Path(stack.enter_context(TemporaryDirectory())) / "gateway.toml"
        file.write_text(config(engines, policy, args.model))
        gateway = stack.enter_context(
            running([sys.executable, "-m", "quire.cli.main", "gateway", "--config", str(file)])
        )
        while not (found := re.search(r"on (http://\S+)\n  curl (http://\S+)/workers", gateway.said())):
            gateway.check()
            time.sleep(0.05)
        url, admin = found.groups()
        for engine in engines:
            httpx.post(f"http://127.0.0.1:{engine.port}/reset_prefix_cache").raise_for_status()
        while policy == "events" and not all(
            each["kv_in_step"] for each in httpx.get(f"{admin}/workers").json()["workers"]
        ):
            time.sleep(0.05)
        while policy == "events" and "the tokenizer of model" not in gateway.said():
            time.sleep(0.05)
        progress(policy)
        seconds, cached, total = asyncio.run(converse(url, args))
    seconds.sort()
    rate, last = len(seconds) / total, seconds[len(seconds) * 9 // 10]
    return Outcome(policy, round(rate, 3), round(cached, 4), round(seconds[len(seconds) // 2], 3), round(last, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of an engine")
    parser.add_argument("--memory", default="176MiB", help="of an engine's KV cache")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--instructions", type=int, default=100, help="words that all conversations begin with")
    parser.add_argument("--text", type=int, default=500, help="words that each begins with")
    parser.add_argument("--words", type=int, default=40, help="of a question")
    parser.add_argument("--tokens", type=int, default=12, help="of an answer")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    args = parser.parse_args()
    interruptible()
    outcomes = {policy: measure_on_own(policy, args) for policy in args.policies}
    for each in outcomes.values():
        print(
            f"{each.policy:12} {each.turns_per_second:6.2f} turns/s   {each.cached:6.1%} cached   "
            f"a turn takes {each.median_seconds:.2f} s (p90 {each.p90_seconds:.2f} s)"
        )
    aware = [outcomes[policy] for policy in ("cache_aware", "events") if policy in outcomes]
    if aware and (plain := outcomes.get("round_robin")):
        ratio = max(each.turns_per_second for each in aware) / plain.turns_per_second
        print(f"{ratio:.2f} times the turns of round_robin ({AIM} is the aim)")
    if aware and (one := outcomes.get("one")):
        ratio = max(each.cached for each in aware) / one.cached
        print(f"{ratio:.3f} times the hit rate of one engine with the memory of all ({HIT_AIM} is the aim)")
    figures = [asdict(each) for each in outcomes.values()]
    print(json.dumps({"benchmark": "gateway_cache", "machine": describe(), **vars(args), "outcomes": figures}))


if __name__ == "__main__":
    main()
