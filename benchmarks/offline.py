"""The servers' workloads without a server: `LLM.generate`, with as many sequences at once as there are users.

    echo 0 1 | python -m benchmarks.offline MODEL.gguf --threads 2

A line of stdin is the number of a workload and a seed; its answer is a line with tokens/s, after an empty one when the
model is loaded. `benchmarks.serving` asks for it between the workloads of the server, with the same prompts."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engines import SERVED_LENGTH, SERVED_SEQS, Engines
from benchmarks.peers.worker import claim_stdout
from benchmarks.processes import running
from benchmarks.workers import Worker
from benchmarks.workloads import WARM_UP, WORKLOADS, Workload, read_prose
from quire import LLM, SamplingParams


class Offline:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def rate(self, workload: Workload, seed: int) -> float:
        """Tokens a second."""
        return float(self._worker.ask(f"{WORKLOADS.index(workload)} {seed}"))


@contextmanager
def offline(engines: Engines, path: Path) -> Iterator[Offline]:
    """Quire without a server, loaded and waiting, until the block ends."""
    words = [sys.executable, "-m", "benchmarks.offline", path, "--threads", str(engines.threads)]
    with running(words, piped=True) as engine:
        yield Offline(Worker(engine))


def rate(llm: LLM, workload: Workload, prose: list[int], seed: int) -> float:
    prompts = [{"prompt_token_ids": ask.prompt} for ask in workload.asks(prose, seed)]
    params = SamplingParams(temperature=0, max_tokens=workload.num_output, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    answers = claim_stdout()
    prose = read_prose(args.model)
    llm = LLM(args.model, threads=args.threads, max_num_seqs=SERVED_SEQS, max_model_len=SERVED_LENGTH)
    rate(llm, WARM_UP, prose, seed=-1)
    os.write(answers, b"\n")
    for line in sys.stdin:
        number, seed = map(int, line.split())
        os.write(answers, f"{rate(llm, WORKLOADS[number], prose, seed)}\n".encode())


if __name__ == "__main__":
    main()
