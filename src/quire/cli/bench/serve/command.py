"""`quire bench serve`: a load for any server with OpenAI's API, with the flags of `vllm bench serve`."""

import argparse
import asyncio
import math
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from quire.cli.bench.resources import Resources
from quire.cli.bench.serve.arrivals import arrival_times
from quire.cli.bench.serve.datasets import LoadRequest, read_requests
from quire.cli.bench.serve.flags import DatasetFlags, LoadFlags, ResultFlags, ServerFlags
from quire.cli.bench.serve.generator import LoadRun, Refused, generate_load
from quire.cli.bench.serve.http_client import HttpClient
from quire.cli.bench.serve.measures import Measured, details, figures_of, measured
from quire.cli.bench.serve.prompt_tokens import PromptTokens, find_tokenizer
from quire.cli.bench.serve.refused_flags import add_refused_flags
from quire.cli.bench.serve.report import as_json, result_path, table
from quire.cli.bench.serve.server_memory import ServerMemory
from quire.cli.bench.serve.target import Body, assign_adapters, connect, find_model, refused, takes_ids
from quire.cli.bench.setup import progress
from quire.cli.flags import add_flags, read_flags
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser

EXAMPLES = """\
  quire bench serve --num-prompts 100 --request-rate 4                  random prompts for http://127.0.0.1:8000
  quire bench serve --base-url http://10.0.0.5:8000 --max-concurrency 16 --random-input-len 512 --random-output-len 64
  quire bench serve --backend openai-chat --dataset-name sharegpt --dataset-path ShareGPT.json --tokenizer ./model
  quire bench serve --dataset-name shared-prefix --goodput ttft:500 tpot:40 --save-result
  quire bench serve --dataset-name trace --dataset-path trace.jsonl --json
  quire bench serve --dataset-name burstgpt --dataset-path BurstGPT_1.csv --request-rate 2 --num-prompts 200
  quire bench serve --lora-modules sql poems --request-rate 2 --append-result --result-filename runs.jsonl
"""
ALL_FAILED = 1
MAX_OPEN_FILES = 65_536
ALWAYS_SAVED = ("latencies", "queue_times")  # vLLM's file has them without --save-detailed
# vLLM's flags that change nothing here -> how many values they take.
NO_EFFECT = {"--trust-remote-code": 0, "--skip-tokenizer-init": 0, "--skip-chat-template": 0, "--tokenizer-mode": 1}
NO_EFFECT |= {"--no-stream": 0, "--self-timed": 0}


@dataclass(frozen=True, slots=True)
class ServeBench:
    """The command line."""

    server: ServerFlags
    dataset: DatasetFlags
    load: LoadFlags
    result: ResultFlags


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """A load that was served, and what was measured of its requests."""

    model: str
    run: LoadRun
    requests: list[Measured]
    spent: dict[str, Any]
    notes: list[str]


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench serve",
        "Send requests to a server and report what its users see. Ctrl-C ends it with the answers that are there.",
        EXAMPLES,
    )
    add_flags(parser, ServerFlags, "server")
    add_flags(parser, DatasetFlags, "dataset")
    add_flags(parser, LoadFlags, "load")
    add_flags(parser, ResultFlags, "result")
    add_refused_flags(parser)
    for flag, count in NO_EFFECT.items():
        settings: dict[str, Any] = {"action": "store_true"} if count == 0 else {}
        parser.add_argument(flag, default=argparse.SUPPRESS, help="has no effect", **settings)
    arguments = parser.parse(argv)
    for flag in NO_EFFECT:
        if hasattr(arguments, flag[2:].replace("-", "_")):
            print(f"warning: {flag} has no effect here", file=sys.stderr)
    server, dataset = read_flags(ServerFlags, arguments), read_flags(DatasetFlags, arguments)
    return _run(ServeBench(server, dataset, read_flags(LoadFlags, arguments), read_flags(ResultFlags, arguments)))


def _run(bench: ServeBench) -> int:
    before = signal.getsignal(signal.SIGINT)
    allow_open_files(MAX_OPEN_FILES)
    try:
        return _measure_and_tell(bench, datetime.now())
    finally:
        signal.signal(signal.SIGINT, before)


def _measure_and_tell(bench: ServeBench, now: datetime) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            path, load = runner.run(_measure(bench, now))
        except Refused as refusal:
            raise refused(refusal) from None
    figures = _figures(bench, load, now)
    each = details(load.run, load.requests)
    kept = each if bench.result.save_detailed else {key: each[key] for key in ALWAYS_SAVED}
    if bench.result.json:
        print(as_json(figures | (each if bench.result.save_detailed else {})))
    else:
        print("\n".join(table(figures, bench.load, bench.result)))
    if path is not None:
        with path.open("a" if bench.result.append_result else "w", encoding="utf-8") as file:
            file.write(as_json(figures | kept) + "\n")
        print(f"{'added' if bench.result.append_result else 'written'} to {path}", file=sys.stderr)
    if load.run.interrupted:
        return INTERRUPTED
    return 0 if load.requests else ALL_FAILED


def allow_open_files(count: int) -> None:
    """A connection is an open file, and 1,024 of them are the usual limit that a process may raise itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _measure(bench: ServeBench, now: datetime) -> tuple[Path | None, ServedLoad]:
    client = connect(bench.server)
    try:
        model = await find_model(client, bench.server)
        path = result_path(bench.result, bench.load, bench.server.backend, model, now)
        body = Body(bench.server, bench.dataset, bench.load, model)
        tokens = PromptTokens(find_tokenizer(bench.server.tokenizer, bench.server.model or model))
        requests = read_requests(bench.dataset, bench.load, tokens)
        by_ids = await takes_ids(client, bench.server, body, tokens)
        prompts = [request.prompt(tokens, by_ids) for request in requests]
        adapters = assign_adapters(bench.server, len(requests), bench.dataset.seed)
        bodies = [
            body.encode(prompt, each.num_output, adapter)
            for prompt, each, adapter in zip(prompts, requests, adapters, strict=True)
        ]
        memory = ServerMemory(client)
        watching = asyncio.create_task(memory.watch())
        stop = _stopped_by_interrupts()
        try:
            await _warm_up(client, bench, bodies[0], stop)
            resources = Resources()
            run = await _load(client, bench, requests, bodies, stop)
        finally:
            watching.cancel()
    finally:
        await client.close()
    lengths = [_length(prompt, tokens) for prompt in prompts]
    answered = measured(run.outcomes, lengths, tokens.count)
    notes = _notes(answered, requests, tokens)
    return path, ServedLoad(model, run, answered, _spent(memory, resources), notes)


def _stopped_by_interrupts() -> asyncio.Event:
    """From here on Ctrl-C, once or several times, only sets the event: the report is not lost."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def note(signum: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    signal.signal(signal.SIGINT, note)
    return stop


async def _warm_up(client: HttpClient, bench: ServeBench, body: bytes, stop: asyncio.Event) -> None:
    count = bench.load.num_warmups
    if count:
        limit = bench.load.max_concurrency
        await generate_load(client, bench.server.path, [body] * count, [0.0] * count, max_concurrency=limit, stop=stop)


async def _load(
    client: HttpClient, bench: ServeBench, requests: list[LoadRequest], bodies: list[bytes], stop: asyncio.Event
) -> LoadRun:
    times = [request.time or 0.0 for request in requests]
    if requests[0].time is None:
        times = arrival_times(bench.load, len(requests), bench.dataset.seed)
    bar = nullcontext(lambda: None) if bench.result.disable_tqdm else progress(len(bodies), "request")
    with bar as one_more:
        limit = bench.load.max_concurrency
        return await generate_load(
            client,
            bench.server.path,
            bodies,
            times,
            max_concurrency=limit,
            stop=stop,
            on_ended=lambda outcome: one_more(),
            id_prefix=bench.server.request_id_prefix,
        )


def _length(prompt: str | list[int], tokens: PromptTokens) -> int:
    return len(prompt) if isinstance(prompt, list) else tokens.count(prompt) or 0


def _spent(memory: ServerMemory, resources: Resources) -> dict[str, Any]:
    """Energy is that of this machine, the load generator's included."""
    used, spent = memory.figures(), resources.figures()
    reasons = used["not_measured"] | spent["not_measured"]
    if not memory.is_local:
        keys = ("peak_gpu_used_bytes", "cpu_energy_joules", "gpu_energy_joules")
        spent |= dict.fromkeys(keys)
        reasons |= dict.fromkeys(keys, "the server is on another machine")
    return used | spent | {"not_measured": reasons}


def _notes(answered: list[Measured], requests: list[LoadRequest], tokens: PromptTokens) -> list[str]:
    """Remarks for the reader of the figures: how tokens were counted."""
    if not answered:
        return []
    notes = []
    if any(each.answer.num_output is None for each in answered):
        counted = "chunks" if tokens.tokenizer is None else "the tokens of their text"
        notes.append(f"the server sends no usage: outputs are counted as {counted}")
    made_up = [(each.num_prompt, numbers) for each in answered if (numbers := requests[each.index].numbers) is not None]
    more = sum(num_prompt - len(numbers) for num_prompt, numbers in made_up)
    if more:
        mean = more / len(made_up)
        notes.append(f"prompts have {mean:+.1f} tokens each beside those asked for, by the server's count")
    num_output = sum(each.num_output for each in answered)
    num_chunks = sum(len(each.answer.moments) for each in answered)
    if num_chunks < 0.95 * num_output:
        notes.append(f"{num_chunks / num_output:.2f} chunks a token: ITL is the time between chunks")
    if num_output < 0.99 * sum(requests[each.index].num_output for each in answered):
        notes.append("outputs are shorter than asked for: they ended by themselves (--ignore-eos lets none)")
    return notes


def _figures(bench: ServeBench, load: ServedLoad, now: datetime) -> dict[str, Any]:
    about: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench.server.backend,
        "backend": bench.server.backend,
        "label": bench.result.label or bench.server.backend,
        "model_id": load.model,
        "tokenizer_id": bench.server.tokenizer or bench.server.model or load.model,
        "num_prompts": bench.dataset.num_prompts,
        **bench.result.more,
        "request_rate": _finite(bench.load.request_rate),
        "burstiness": _finite(bench.load.burstiness),
        "max_concurrency": bench.load.max_concurrency,
    }
    if bench.load.ramp_up_strategy is not None:
        about |= {
            name: getattr(bench.load, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        }
    measures = figures_of(load.run, load.requests, bench.result.percentiles, bench.result.goals)
    return about | measures | load.spent | {"notes": load.notes}


def _finite(value: float) -> float | str:
    """JSON has no infinity; vLLM writes "inf"."""
    return value if math.isfinite(value) else "inf"
