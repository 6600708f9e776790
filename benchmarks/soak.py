"""Hours of mixed requests: does anything go wrong, and does the memory of a process grow?

    python -m benchmarks.soak                        an hour, 8 users, the default model
    python -m benchmarks.soak MODEL --seconds 300 --users 16
    python -m benchmarks.soak --flags --kv-disk-path FOLDER --kv-disk-size 1     flags of the server come last

Users send chats, completions, structured output, tool calls, other servers' dialects, embeddings of tokens, bad
requests, and leave in the middle of streams. Every ten seconds the memory of each process is read, by kind: pages
of their own (anonymous), of shared mappings (the weights of the file), and shared memory. The pool of the KV cache is
small, so that all of it is touched within the first minutes; what grows after the first third is a leak."""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.crowd import metrics
from benchmarks.machine import describe
from benchmarks.own_server import own_server
from benchmarks.processes import Running, interruptible, progress

CACHE = "128MiB"  # of keys and values
EVERY = 10.0  # seconds between two looks at the memory
GROWTH = 8.0  # MiB an hour that a process may grow by after the first third: what an allocator's heaps still move
MODULES = {"engine": "quire.engine.process", "grammars": "quire.client.grammar_process"}
PROCESSES = ("server", *MODULES)
KINDS = ("RssAnon", "RssFile", "RssShmem")
WORDS = ["river", "stone", "letter", "morning", "engine", "garden", "winter", "paper", "signal", "window", "market"]

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def text(rng: random.Random, most: int) -> str:
    """Some shared beginnings, so that the prefix cache has hits, and then words by chance."""
    start = f"Story {rng.randrange(40)}. " * rng.randrange(1, 6)
    return start + " ".join(rng.choices(WORDS, k=rng.randrange(1, most)))


def messages(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text(rng, 80)}]


def json_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


Body = dict[str, Any]
REQUESTS: dict[str, tuple[str, Callable[[random.Random], Body], int]] = {  # name: (route, body, status)
    "chat": (
        "/v1/chat/completions",
        lambda rng: {"messages": messages(rng), "max_tokens": rng.randrange(1, 64), "stream": rng.random() < 0.7},
        200,
    ),
    "several": (
        "/v1/completions",
        lambda rng: {"prompt": text(rng, 60), "max_tokens": 16, "n": rng.randrange(1, 5), "logprobs": 3},
        200,
    ),
    "long": ("/v1/completions", lambda rng: {"prompt": text(rng, 900), "max_tokens": 8, "stream": True}, 200),
    "sampled": (
        "/v1/completions",
        lambda rng: {
            "prompt": text(rng, 40), "max_tokens": 32, "temperature": 1.0, "top_p": 0.9, "seed": rng.randrange(1 << 30),
            "repetition_penalty": 1.1, "stop": ["\n\n", "Story"], "logit_bias": {"42": -5},
        },
        200,
    ),
    "schema": (
        "/v1/chat/completions",
        lambda rng: {"messages": messages(rng), "max_tokens": 60, "response_format": json_schema("person", PERSON)},
        200,
    ),
    "new schema": (  # compiled for this request alone
        "/v1/chat/completions",
        lambda rng: {
            "messages": messages(rng),
            "max_tokens": 24,
            "response_format": json_schema("one", {"enum": [f"{word} {rng.random()}" for word in WORDS]}),
        },
        200,
    ),
    "regex": (
        "/v1/completions",
        lambda rng: {"prompt": "On ", "max_tokens": 16, "structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}},
        200,
    ),
    "tools": (
        "/v1/chat/completions",
        lambda rng: {"messages": messages(rng), "max_tokens": 40, "tools": [WEATHER], "tool_choice": "required"},
        200,
    ),
    "responses": ("/v1/responses", lambda rng: {"input": text(rng, 40), "max_output_tokens": 24}, 200),
    "anthropic": (
        "/v1/messages",
        lambda rng: {"messages": messages(rng), "max_tokens": 24, "stream": True},
        200,
    ),
    "ollama": (
        "/api/chat",
        lambda rng: {"messages": messages(rng), "options": {"num_predict": 24}},
        200,
    ),
    "tgi": (
        "/generate_stream",
        lambda rng: {"inputs": text(rng, 40), "parameters": {"max_new_tokens": 24}},
        200,
    ),
    "tokenize": ("/tokenize", lambda rng: {"prompt": text(rng, 2000)}, 200),
    "bad field": ("/v1/completions", lambda rng: {"prompt": "x", "temperature": -rng.random()}, 400),
    "bad schema": (
        "/v1/chat/completions",
        lambda rng: {"messages": messages(rng), "response_format": json_schema("x", {"type": f"{rng.random()}"})},
        400,
    ),
    "too long": ("/v1/completions", lambda rng: {"prompt": text(rng, 2) * 5000, "max_tokens": 4}, 400),
}  # fmt: skip
LEAVING = 0.1  # of streams


@dataclass(slots=True)
class Soak:
    answered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REQUESTS, 0))
    left: int = 0
    problems: list[str] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)  # {"seconds": ..., "server": {kind: bytes}, ...}


async def send(client: httpx.AsyncClient, model: str, rng: random.Random, soak: Soak) -> None:
    name = rng.choice(list(REQUESTS))
    route, body, expected = REQUESTS[name]
    leaves = expected == 200 and rng.random() < LEAVING
    async with client.stream("POST", route, json={"model": model, **body(rng)}) as answer:
        if answer.status_code != expected:
            soak.problems.append(f"{name}: {answer.status_code} {(await answer.aread())[:300]!r}")
            return
        last = b""
        async for piece in answer.aiter_raw():
            if leaves:
                soak.left += 1
                return
            last = piece
        if b'"error":{' in last.replace(b" ", b"") and expected == 200:
            soak.problems.append(f"{name}: {last[:300]!r}")
    soak.answered[name] += 1


async def serve_users(
    url: str, process: Running, soak: Soak, *, model: str, users: int, seconds: float, seed: int
) -> None:
    began = time.monotonic()
    end = began + seconds

    async def user(number: int, client: httpx.AsyncClient) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            try:
                await send(client, model, rng, soak)
            except httpx.HTTPError as problem:
                soak.problems.append(f"{type(problem).__name__}: {problem}")
            await asyncio.sleep(rng.expovariate(2.0))

    async def watch() -> None:
        while (now := time.monotonic()) < end:
            soak.memory.append({"seconds": round(now - began), **memory_of(process)})
            if len(soak.memory) % 30 == 1:
                progress(line_of(soak))
            await asyncio.sleep(EVERY)

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(watch(), *(user(number, client) for number in range(users)))


def memory_of(process: Running) -> dict[str, dict[str, int]]:
    """Of the server, of its engine and of the process that compiles grammars: bytes by kind."""
    found = {}
    for one in process.tree():
        try:
            words = one.cmdline()
            lines = [line.split() for line in Path(f"/proc/{one.pid}/status").read_text().splitlines()]
        except (psutil.Error, OSError):
            continue  # it has ended meanwhile
        if not words:
            continue  # it has ended, and was not waited for yet
        name = next((name for name, module in MODULES.items() if module in words), "server")
        found[name] = {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0][:-1] in KINDS}
    return found


def line_of(soak: Soak) -> str:
    last = soak.memory[-1]
    told = [
        f"{name} {' + '.join(f'{last[name].get(kind, 0) / 2**20:.1f}' for kind in KINDS)} MiB"
        for name in PROCESSES
        if name in last
    ]
    counts = f"{sum(soak.answered.values())} answered, {soak.left} left, {len(soak.problems)} problems"
    return f"{last['seconds']:>6} s  {'; '.join(told)}; {counts}"


def growth(soak: Soak, name: str) -> float:
    """MiB an hour after the first third: the slope of a line through the anonymous memory."""
    later = soak.memory[len(soak.memory) // 3 :]
    hours = np.array([sample["seconds"] / 3600 for sample in later])
    used = np.array([sample.get(name, {}).get("RssAnon", 0) / 2**20 for sample in later])
    return float(np.polyfit(hours, used, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="all that follows: of the server")
    args = parser.parse_args()
    interruptible()
    soak = Soak()
    print("memory: anonymous + file + shared")
    with own_server(args.model, "--kv-cache-memory-bytes", CACHE, *args.flags) as (url, process):
        asyncio.run(
            serve_users(url, process, soak, model=args.model, users=args.users, seconds=args.seconds, seed=args.seed)
        )
        time.sleep(3)
        found = metrics(url)
        log = process.said()
    print(line_of(soak))
    rates = {name: growth(soak, name) for name in PROCESSES}
    print(*(f"{name}: {rate:+.1f} MiB an hour after the first third" for name, rate in rates.items()), sep="\n")
    held = sum(found[f"quire_num_requests_{state}"] for state in ("running", "waiting"))
    print(f"{held:.0f} requests are still held", *soak.problems[:20], sep="\n  ")
    print(
        json.dumps({"benchmark": "soak", "machine": describe(), "flags": args.flags, "growth": rates, **asdict(soak)})
    )
    if soak.problems or held or max(rates.values()) > GROWTH:
        print(log)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
