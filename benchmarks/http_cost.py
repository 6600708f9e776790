"""What HTTP, templates, tokenizing and streaming cost beside the model: CPU time of the server's two processes.

    python -m benchmarks.http_cost                               the default model, 32 streams, three rounds
    python -m benchmarks.http_cost --streams 8 --output-tokens 64 --rounds 1
    python -m benchmarks.http_cost --profile                     and where the server process spent it (needs py-spy)

Chats with texts for prompts, streamed, an event a token. CPU time is what the kernel counted for each process between
the first request and the last answer. Neighbours on the machine stretch the clock, and make the engine's threads wait
for each other, which counts as the engine's time: hence microseconds a token beside the share, and `--threads 1`."""

import argparse
import asyncio
import json
import pydoc_data.topics
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.load import events_of, streamed
from benchmarks.machine import describe, note_others
from benchmarks.own_server import own_server
from benchmarks.processes import Running, interruptible

AIM = 0.15  # of all CPU time: what the server process may cost

# Where the innermost frame of a sample that matches lies, so is it counted. Innermost first.
PARTS = {
    "tokens to text, text to tokens": r"quire/text/|tokenizers",
    "what dialects say (chunks, JSON)": r"quire/server/(dialects|fold|body|replies)",
    "messages of the engine (socket, msgpack)": r"quire/engine/(messages|child|channel)",
    "requests under way": r"quire/engine/",
    "metrics, logs": r"quire/server/(metrics|histogram|recent|logs|exposition)",
    "routes, streams": r"quire/server/|starlette",
    "sockets (uvicorn, uvloop)": r"uvicorn|uvloop|httptools|asyncio",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one round."""

    server: float
    engine: float
    num_tokens: int
    seconds: float  # by the clock

    @property
    def share(self) -> float:
        return self.server / (self.server + self.engine)


def measure(url: str, running: Running, bodies: list[bytes]) -> Cost:
    http, *children = running.tree()
    [engine] = [child for child in children if "quire.engine.process" in child.cmdline()]
    before, begin = (_seconds(http), _seconds(engine)), time.perf_counter()
    num_tokens = sum(asyncio.run(_chats(url, bodies)))
    seconds = time.perf_counter() - begin
    return Cost(_seconds(http) - before[0], _seconds(engine) - before[1], num_tokens, seconds)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _chats(url: str, bodies: list[bytes]) -> list[int]:
    return await asyncio.gather(*(_chat(url, body) for body in bodies))


async def _chat(url: str, body: bytes) -> int:
    """Tokens drawn."""
    *_, (_, last) = events_of(await streamed(url, "/v1/chat/completions", body))
    return int(last["usage"]["completion_tokens"])


def bodies(num_streams: int, num_output: int, seed: int) -> list[bytes]:
    """A passage of some 500 letters each, and other passages with every seed."""
    rng = random.Random(seed)
    text = "\n".join(pydoc_data.topics.topics.values())
    found = []
    for _ in range(num_streams):
        begin = rng.randrange(len(text) - 500)
        fields = {
            "messages": [{"role": "user", "content": text[begin : begin + 500]}],
            "max_tokens": num_output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found.append(json.dumps(fields).encode())
    return found


@contextmanager
def profiled(pid: int) -> Iterator[Counter[str]]:
    """Samples of the process while the block runs, by part; filled in when it ends."""
    parts: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        words = ["py-spy", "record", "--format", "raw", "--rate", "500", "--gil", "--output", file.name]
        spy = subprocess.Popen([*words, "--pid", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield parts
        finally:
            spy.send_signal(2)
            spy.wait()
        for line in Path(file.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            parts[_part(stack.split(";"))] += int(count)


def _part(frames: list[str]) -> str:
    for frame in reversed(frames):
        for name, pattern in PARTS.items():
            if re.search(pattern, frame):
                return name
    return "other"


def table(costs: list[Cost]) -> str:
    lines = []
    for name, figures, form in (
        ("server process, us a token", [cost.server / cost.num_tokens * 1e6 for cost in costs], ".0f"),
        ("engine process, us a token", [cost.engine / cost.num_tokens * 1e6 for cost in costs], ".0f"),
        ("server process, of both", [cost.share for cost in costs], ".1%"),
        ("tokens/s", [cost.num_tokens / cost.seconds for cost in costs], ".0f"),
    ):
        spread = f"{min(figures):{form}} - {max(figures):{form}}"
        lines.append(f"  {name:<28}{statistics.median(figures):>8{form}}   ({spread})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the engine; with 1 none waits for another")
    parser.add_argument("--profile", action="store_true", help="sample the server process, in a round of its own")
    args = parser.parse_args()
    interruptible()
    costs, parts = [], Counter[str]()
    with own_server(args.model, *(["--threads", str(args.threads)] if args.threads else [])) as (url, process):
        asyncio.run(_chats(url, bodies(args.streams, 4, seed=-1)))  # warm
        for seed in range(args.rounds):
            note_others(f"round {seed + 1} of {args.rounds}")
            costs.append(measure(url, process, bodies(args.streams, args.output_tokens, seed)))
        print(f"{args.model}, {args.streams} streams of {args.output_tokens} tokens; medians (lowest - highest)")
        print(table(costs), flush=True)
        if args.profile:
            with profiled(process.process.pid) as parts:
                asyncio.run(_chats(url, bodies(args.streams, args.output_tokens, seed=args.rounds)))
    for name, count in parts.most_common():
        print(f"  {name:<42}{count / parts.total():>6.1%}")
    result = {"benchmark": "http_cost", "machine": describe(), "rounds": [asdict(cost) for cost in costs]}
    print(json.dumps({**result, "profile": dict(parts)}))
    if statistics.median(cost.share for cost in costs) > AIM:
        raise SystemExit(f"more than {AIM:.0%} of the CPU time went into HTTP and text")


if __name__ == "__main__":
    main()
