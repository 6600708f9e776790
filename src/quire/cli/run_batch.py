"""`quire run-batch`: requests from a file, answers to a file."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.cli.flags import add_flags, read_flags
from quire.cli.parser import Parser, UsageError
from quire.engine.options import EngineOptions
from quire.server.batch.requests import BadBatch, BatchRequests
from quire.server.batch.results import BatchResult, BatchResults

EXAMPLES = """\
  quire run-batch requests.jsonl answers.jsonl
  quire run-batch requests.jsonl answers.jsonl -m ./model.gguf --max-num-seqs 64

a line of requests.jsonl:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}}
"""

INTERRUPTED = 130
KEPT_WAITING = 2  # for each sequence that is computed: so many requests are under way

_NOT_HERE = ("model", "max_queued_requests")


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "run-batch INPUT OUTPUT",
        "Answer the requests of a file in OpenAI's batch format. Results are appended to OUTPUT as they finish, in any "
        "order; run again after Ctrl-C or a crash, it goes on where it was.",
        EXAMPLES,
    )
    parser.add_argument("input", metavar="INPUT", type=Path, help="a request a line, as JSON")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="where results go, or already are")
    parser.add_argument(
        "-m", "--model", default=argparse.SUPPRESS, help="path, repository or short name (default: smollm2)"
    )
    add_flags(parser, EngineOptions, "engine", skip=_NOT_HERE)
    arguments = parser.parse(argv)
    options = read_flags(EngineOptions, arguments)
    if arguments.output.exists() and arguments.output.samefile(arguments.input):
        raise UsageError("INPUT and OUTPUT are the same file", "choose another OUTPUT")
    requests = BatchRequests(arguments.input)
    with BatchResults(arguments.output) as results:
        if strange := results.done - requests.ids:
            raise BadBatch(
                f"{arguments.output} has a result for `{min(strange)}`, which is not in {arguments.input}",
                "results are appended to this file: choose another, or remove it",
            )
        return asyncio.run(_run(requests, results, options))


async def _run(requests: BatchRequests, results: BatchResults, options: EngineOptions) -> int:
    from tqdm import tqdm

    from quire.client.engine_client import EngineClient
    from quire.client.one_model import OneModel
    from quire.server.batch.run import run_batch

    todo = (line for line in requests if line.custom_id not in results.done)
    before, total = len(results.done), len(requests.ids)
    told = {"answered": 0, "failed": 0}
    started = time.monotonic()
    with tqdm(total=total, initial=before, unit="request", disable=None, file=sys.stderr) as bar:

        def tell(result: BatchResult) -> None:
            results.add(result)
            good = result.response is not None and result.response.status_code == 200
            told["answered" if good else "failed"] += 1
            bar.update()

        async def work() -> None:
            if before < total:  # else there is nothing to load a model for
                async with EngineClient(options) as client:
                    await run_batch(OneModel(client, client.adapters), todo, options.max_num_seqs * KEPT_WAITING, tell)

        working = asyncio.ensure_future(work())
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, working.cancel)
        try:
            await working
            status = 0
        except asyncio.CancelledError:
            status = INTERRUPTED
    seconds = time.monotonic() - started
    rate = f", {sum(told.values()) / seconds:.1f} requests/s" if any(told.values()) else ""
    earlier = f", {before} from before" if before else ""
    print(f"{told['answered']} answered, {told['failed']} failed{earlier}{rate}", file=sys.stderr)
    if status:
        left = total - before - sum(told.values())
        print(f"interrupted: the same command goes on with the {left} that are left", file=sys.stderr)
    return status
