"""Users of a server, each of whom sends the next request when the last has ended, and what they saw.

    python -m benchmarks.load http://127.0.0.1:8000 --users 8 --requests 24 --prompt-tokens 128 --output-tokens 64

Talks OpenAI's /v1/completions, streaming, with prompts of token ids, by the client of `quire bench serve`. That command
has more figures and other loads; here any failure ends it, and every answer must say how many tokens it has."""

import argparse
import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

import uvloop

from quire.cli.bench.serve.generator import LoadRun, generate_load
from quire.cli.bench.serve.http_client import HttpClient, LoadFailed, Piece
from quire.cli.bench.serve.stream import StreamedAnswer, error_message, events_of
from quire.planning.percentiles import percentile

__all__ = ["Answer", "Ask", "Load", "LoadFailed", "events_of", "run_load", "streamed"]


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    num_output: int  # tokens drawn, whatever they are

    def body(self) -> bytes:
        fields = {
            "prompt": self.prompt,
            "max_tokens": self.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream. Times are time.perf_counter()."""

    stream: StreamedAnswer
    num_prompt: int  # tokens, as the server counts them
    num_output: int

    @property
    def came(self) -> list[float]:
        """When each chunk with text did."""
        return self.stream.moments


@dataclass(frozen=True, slots=True)
class Load:
    answers: list[Answer]
    seconds: float  # from the first request to the end of the last answer

    @property
    def rate(self) -> float:
        """Output tokens a second, over all users."""
        return sum(answer.num_output for answer in self.answers) / self.seconds

    @property
    def pieces_per_token(self) -> float:
        """1 where every token came by itself; below, gaps are longer than the time between tokens."""
        return sum(len(answer.came) for answer in self.answers) / sum(answer.num_output for answer in self.answers)

    def ttft(self, share: float) -> float:
        """A percentile; `share` is in percent."""
        return percentile([answer.stream.ttft for answer in self.answers], share)

    def gap(self, share: float) -> float:
        return percentile([gap for answer in self.answers for gap in answer.stream.gaps], share)


def run_load(url: str, asks: Iterable[Ask], users: int) -> Load:
    run = uvloop.run(_load(url, [ask.body() for ask in asks], users))
    answers = []
    for outcome in run.outcomes:
        stream = outcome.answer
        if stream is None:
            raise LoadFailed(outcome.failure)
        if not stream.text or stream.num_prompt is None or stream.num_output is None:
            raise LoadFailed("the stream had no text, or no usage at its end")
        answers.append(Answer(stream, stream.num_prompt, stream.num_output))
    return Load(answers, run.seconds)


async def _load(url: str, bodies: list[bytes], users: int) -> LoadRun:
    """The first failure stops all users."""
    client, stop = HttpClient(url), asyncio.Event()
    try:
        return await generate_load(
            client,
            "/v1/completions",
            bodies,
            [0.0] * len(bodies),
            max_concurrency=users,
            stop=stop,
            on_ended=lambda outcome: stop.set() if outcome.failure else None,
        )
    finally:
        await client.close()


async def streamed(url: str, path: str, body: bytes) -> list[Piece]:
    """What is answered on a connection of its own: pieces, each with the moment it came."""
    client = HttpClient(url)
    try:
        reply = await client.post(path, body)
    finally:
        await client.close()
    if reply.status != 200:
        raise LoadFailed(f"status {reply.status}: {error_message(reply.body)}")
    return reply.pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=30_000, help="prompts are random ids from 100 to this")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    ids = range(100, args.vocab_size)
    asks = [Ask(rng.choices(ids, k=args.prompt_tokens), args.output_tokens) for _ in range(args.requests)]
    load = run_load(args.url, asks, args.users)
    print(
        f"{load.rate:.1f} output tokens/s; "
        f"first token p50 {load.ttft(50) * 1e3:.0f} ms, p99 {load.ttft(99) * 1e3:.0f} ms; "
        f"between tokens p50 {load.gap(50) * 1e3:.1f} ms, p99 {load.gap(99) * 1e3:.1f} ms; "
        f"{load.pieces_per_token:.2f} pieces a token"
    )


if __name__ == "__main__":
    main()
