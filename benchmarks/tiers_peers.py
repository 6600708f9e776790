"""A host tier beside its peers, on one GPU in one run: vLLM's own offloading, and LMCache behind vLLM.

    python -m benchmarks.tiers_peers [--engines quire vllm lmcache] [--vllm-python PATH] [--rounds 5]

The shape of Llama 3.1 8B with random weights in bf16. All engines are loaded at once and get the same prompts, in
turns: pools of the same size, as much host memory, as many tokens a step.

first token  of a long prompt, computed, and from the host after other prompts have evicted it from the pool
beyond       tokens per second of requests whose prefixes are three times the pool: the first round computes them,
             later ones find them on the host

Prints a table and ends in one line of JSON."""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engines import Command
from benchmarks.machine import describe, installed
from benchmarks.peers.tiers_worker import Limits, Part
from benchmarks.processes import EngineDied, interruptible, progress, running
from benchmarks.table import OURS, Section, render
from benchmarks.workers import Worker
from quire.planning.shapes import SHAPES

NAMES = (OURS, "vllm", "lmcache")
VOCAB = 32_768
POOL_TOKENS = 32_768
PREFIX, SUFFIX, NUM_OUTPUT = 4096, 32, 16  # tokens, of the requests beyond the pool
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 8192
LARGEST_BLOCK = 256  # LMCache's chunk


class Lost(Exception):
    """An engine ended while it was measured."""

    def __init__(self, engine: "Tiers", why: EngineDied) -> None:
        super().__init__(f"{engine.name} is left out: {why}")
        self.engine = engine


class Tiers:
    """An engine's worker."""

    def __init__(self, name: str, worker: Worker) -> None:
        self.name = name
        self._worker = worker

    def run(self, prompts: Sequence[Sequence[Part]], num_output: int) -> tuple[float, int]:
        """Seconds, and prompt tokens that were cached."""
        try:
            result = json.loads(self._worker.ask(json.dumps({"prompts": prompts, "num_output": num_output})))
        except EngineDied as error:
            raise Lost(self, error) from error
        return float(result["seconds"]), sum(result["cached"])


# ---- what is measured


def first_token(engines: Sequence[Tiers], seed: int, num_tokens: int, rounds: int) -> Section:
    """TTFT, as the time of a request for one token."""
    section = Section(f"first token after {num_tokens} tokens, ms")
    others = [[(seed + 500 + i, num_tokens)] for i in range(-(-POOL_TOKENS // num_tokens) + 1)]
    for engine in engines:
        for other in [others[0], *others]:  # compiles kernels, and the host has `others`
            engine.run([other], 1)
    for number in range(rounds):
        prompt = [[(seed + number, num_tokens + 1)]]
        for engine in _turns(engines, number):
            computed, cached = engine.run(prompt, 1)
            assert cached == 0, f"{engine.name} had {cached} tokens"
            for other in others:  # more than the pool holds
                engine.run([other], 1)
            fetched, cached = engine.run(prompt, 1)
            if cached < num_tokens - LARGEST_BLOCK:
                progress(f"{engine.name}: only {cached} tokens were cached")
            section.row("computed", less_is_better=True).add(engine.name, 1000 * computed)
            section.row("from the host", less_is_better=True).add(engine.name, 1000 * fetched)
            section.row("tokens from the host").add(engine.name, cached)
    return section


def beyond(engines: Sequence[Tiers], seed: int, rounds: int) -> Section:
    section = Section("prefixes of three pools, tokens/s")
    rng = random.Random(0)
    num_prefixes = 3 * POOL_TOKENS // PREFIX
    for engine in engines:
        engine.run([[(seed + 500 + i, SUFFIX)] for i in range(MAX_NUM_SEQS)], NUM_OUTPUT)  # compiles kernels
    for number in range(rounds + 1):
        order = rng.sample(range(num_prefixes), num_prefixes)
        prompts = [[(seed + i, PREFIX), (seed + 1000 * (number + 1) + i, SUFFIX)] for i in order]
        num_tokens = num_prefixes * (PREFIX + SUFFIX + NUM_OUTPUT)
        for engine in _turns(engines, number):
            seconds, cached = engine.run(prompts, NUM_OUTPUT)
            kind = "from the host" if number else "computed"
            section.row(kind).add(engine.name, num_tokens / seconds)
            if number:
                section.row("% of the prefixes cached").add(engine.name, 100 * cached / (num_prefixes * PREFIX))
    return section


def _turns(engines: Sequence[Tiers], number: int) -> Sequence[Tiers]:
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def measured(engines: list[Tiers], seed: int, measure: Callable[[int], Section]) -> Section:
    """A section, printed; when an engine ends, of the others and of other prompts."""
    while True:
        try:
            section = measure(seed)
        except Lost as lost:
            progress(str(lost))
            engines.remove(lost.engine)
            seed += 10_000
            continue
        print(render([section], [engine.name for engine in engines]), flush=True)
        return section


# ---- engines


def command(name: str, folder: str, limits: Limits, arguments: argparse.Namespace) -> Command:
    given = [folder, json.dumps(asdict(limits))]
    if name == OURS:
        return Command([sys.executable, "-m", "benchmarks.peers.quire_tiers", *given], {})
    words = [arguments.vllm_python, "-m", "benchmarks.peers.vllm_tiers", *given, *arguments.vllm_args]
    if name == "lmcache":
        words.append("--lmcache")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false"}
    return Command(words, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **quiet})


@contextmanager
def loaded(commands: dict[str, Command], logs: Path | None) -> Iterator[list[Tiers]]:
    """All engines, which load at once; one that does not start is left out, with its last words."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(running(each.words, each.environment, piped=True))
            for name, each in commands.items()
        }
        engines = []
        try:
            for name, process in started.items():
                try:
                    engines.append(Tiers(name, Worker(process)))
                    progress(f"{name} is loaded")
                except EngineDied as error:
                    progress(f"{name} is left out: {error}")
            yield engines
        finally:
            for name, process in started.items():
                if logs:
                    (logs / f"{name}.log").write_text(process.said(2000))


def main() -> None:
    interruptible()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="an interpreter that has vLLM")
    parser.add_argument(
        "--vllm-args", nargs="*", default=[], help="more for vLLM's worker, without dashes: eager, compile"
    )
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where to keep what the engines print")
    arguments = parser.parse_args()
    arguments.vllm_args = [f"--{word}" for word in arguments.vllm_args]
    limits = Limits(POOL_TOKENS, arguments.host_gib, arguments.tokens + 512, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        commands = {name: command(name, folder, limits, arguments) for name in arguments.engines}
        with loaded(commands, arguments.logs) as engines:
            sections = [
                measured(engines, 0, lambda seed: first_token(engines, seed, arguments.tokens, arguments.rounds)),
                measured(engines, 100_000, lambda seed: beyond(engines, seed, arguments.rounds)),
            ]
    result: dict[str, Any] = {
        "benchmark": "tiers_peers", "machine": describe(),
        "versions": installed(arguments.vllm_python, "vllm", "lmcache", "torch"),
        "limits": asdict(limits), "sections": [asdict(section) for section in sections],
    }  # fmt: skip
    print(json.dumps(result))


def write_model(folder: Path) -> None:
    """A configuration and, as Quire wants one, a tokenizer of bytes."""
    config = {**SHAPES["llama-3.1-8b"], "model_type": "llama", "vocab_size": VOCAB, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {chr(byte if 33 <= byte < 127 else 256 + byte): byte for byte in range(256)}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    main()
