"""`quire run-batch`: requests from a file, answers to a file."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.cli.flags import add_flags, add_model_flag, read_flags
from quire.cli.main import INTERRUPTED
from quire.cli.parser import Parser, UsageError
from quire.cli.peer_flags import add_peer_flags
from quire.engine.options import SERVING, EngineOptions
from quire.server.batch.requests import BadBatch, BatchRequests
from quire.server.batch.results import BatchResult, BatchResults

EXAMPLES = """\
  quire run-batch requests.jsonl answers.jsonl
  quire run-batch requests.jsonl answers.jsonl -m ./model.gguf --max-num-seqs 64

a line of requests.jsonl:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}}
"""

REQUESTS_PER_SEQUENCE = 2  # requests in flight for each sequence of a batch, so that the queue is never empty

_SERVING_ONLY = ("model", *SERVING)


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "run-batch INPUT OUTPUT",
        "Answer the requests of a file in OpenAI's batch format. Results are appended to OUTPUT as they finish, in any "
        "order; run it again after Ctrl-C or a crash, and it resumes.",
        EXAMPLES,
    )
    parser.add_argument("paths", nargs="*", metavar="INPUT OUTPUT", help="a request a line; results, maybe to resume")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="the same as INPUT")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="the same as OUTPUT")
    add_model_flag(parser)
    add_flags(parser, EngineOptions, "engine", skip=_SERVING_ONLY)
    add_peer_flags(parser)
    arguments = parser.parse(argv)
    options = read_flags(EngineOptions, arguments)
    source, target = _paths(arguments)
    if target.exists() and target.samefile(source):
        raise UsageError("INPUT and OUTPUT are the same file", "choose another OUTPUT")
    requests = BatchRequests(source)
    with BatchResults(target) as results:
        if unknown := results.done - requests.keys:
            raise BadBatch(
                f"{target} has a result for `{min(unknown)[0]}`, which is not in {source}",
                "results are appended to this file: choose another, or remove it",
            )
        return asyncio.run(_run(requests, results, options))


def _paths(arguments: argparse.Namespace) -> tuple[Path, Path]:
    flags = [path for path in (arguments.input_file, arguments.output_file) if path is not None]
    given = flags or arguments.paths
    if len(given) != 2 or (flags and arguments.paths):
        raise UsageError("run-batch takes one INPUT and one OUTPUT", "for example `quire run-batch in.jsonl out.jsonl`")
    return Path(given[0]), Path(given[1])


async def _run(requests: BatchRequests, results: BatchResults, options: EngineOptions) -> int:
    from tqdm import tqdm

    from quire.client.engine_group import new_service
    from quire.client.one_model import OneModel
    from quire.server.batch.run import run_batch

    todo = (request for request in requests if request.key not in results.done)
    before, total = len(results.done), len(requests.keys)
    counts = {"answered": 0, "failed": 0}
    started = time.monotonic()
    with tqdm(total=total, initial=before, unit="request", disable=None, file=sys.stderr) as bar:

        def on_result(result: BatchResult) -> None:
            results.add(result)
            good = result.response is not None and result.response.status_code == 200
            counts["answered" if good else "failed"] += 1
            bar.update()

        async def work() -> None:
            if before < total:  # otherwise no model is loaded
                async with new_service(options) as client:
                    await run_batch(
                        OneModel(client, client.adapters), todo, options.max_num_seqs * REQUESTS_PER_SEQUENCE, on_result
                    )

        working = asyncio.ensure_future(work())
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, working.cancel)
        try:
            await working
            status = 0
        except asyncio.CancelledError:
            status = INTERRUPTED
    seconds = time.monotonic() - started
    rate = f", {sum(counts.values()) / seconds:.1f} requests/s" if any(counts.values()) else ""
    earlier = f", {before} from before" if before else ""
    print(f"{counts['answered']} answered, {counts['failed']} failed{earlier}{rate}", file=sys.stderr)
    if status:
        left = total - before - sum(counts.values())
        print(f"interrupted: the same command goes on with the {left} that are left", file=sys.stderr)
    return status
