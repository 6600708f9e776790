"""How much of the engine's speed is left over HTTP, and what a token costs the server process.

    python -m benchmarks.served                                        a model that is computed in no time
    python -m benchmarks.served --step-ms 0.7                          an engine that only waits, as for a GPU
    python -m benchmarks.served --shape 135m --device cuda            random weights, on a GPU
    python -m benchmarks.served --shape llama-8b --device cuda --users 32 256 --gpu-memory-utilization 0.4
    python -m benchmarks.served --model smollm2 --users 8 --json served.json
    python -m benchmarks.served --other ../before/src                  beside another tree, in turns

Users send prompts of ids and read a stream each, an event a token; offline, the same prompts are one call of
`LLM.generate`. Both engines stay loaded and take turns, round after round. `share` is tokens/s over HTTP by tokens/s
offline. CPU time is what the kernel counted for a process, user and system: it holds on a machine that others use."""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.crowd import metrics
from benchmarks.machine import describe, note_others
from benchmarks.own_server import own_server
from benchmarks.processes import Running, interruptible, running
from benchmarks.workers import Worker
from quire.hub import resolve_model
from quire.planning.percentiles import percentile

NUM_PROMPT = 16  # tokens
FIRST_ID = 300  # smaller ones are special tokens and single bytes
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        **_LLAMA, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
    }  # fmt: skip


SHAPES = {
    "tiny": _shape(32, 64, 1, 2, 1, 2048),
    "135m": _shape(576, 1536, 30, 9, 3, 49152),
    "llama-8b": _shape(4096, 14336, 32, 32, 8, 49152),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One load, over HTTP and offline. Microseconds are CPU time by token; gaps are milliseconds."""

    tree: str
    users: int
    offline: float  # tokens/s
    served: float
    server_us: float
    engine_us: float
    client_us: float
    steps: float  # of the engine, by tokens of a request: above 1, requests began at different times
    step_ms: float  # as the engine measures them
    chunks: float  # by token: 1 where every token came by itself
    gap_p50: float
    gap_p99: float
    gap_longest: float

    @property
    def share(self) -> float:
        return self.served / self.offline


class Server:
    def __init__(self, tree: str, url: str, process: Running) -> None:
        self.tree, self.url = tree, url
        http, *children = process.tree()
        [engine] = [child for child in children if any("engine" in word for word in child.cmdline())]
        self._processes = http, engine

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the server process, and of the engine process."""
        server, engine = (_seconds(process) for process in self._processes)
        return server, engine

    def steps(self) -> tuple[float, float]:
        """How many the engine made so far, and their seconds."""
        found = metrics(self.url)
        return found["quire_step_tokens_count"], found["quire_step_seconds_sum"]


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    path: str
    num_output: int
    vocab_size: int

    def prompts(self, users: int, seed: str) -> list[list[int]]:
        rng = random.Random(seed)
        return [rng.choices(range(FIRST_ID, self.vocab_size), k=NUM_PROMPT) for _ in range(users)]

    def body(self, prompt: Sequence[int]) -> str:
        fields: dict[str, Any] = {"prompt": prompt}
        if self.path == CHAT:
            fields = {"messages": [{"role": "user", "content": " ".join(map(str, prompt[:4]))}]}
        usage = {"include_usage": True}
        sampling = {"temperature": 1.0, "seed": 1, "max_tokens": self.num_output, "ignore_eos": True}
        return json.dumps({**fields, **sampling, "stream": True, "stream_options": usage})


class Offline:
    """The engine without a server: a process with `LLM`, or an engine whose steps take a given time."""

    def __init__(self, worker: Worker | None, step_seconds: float) -> None:
        self._worker, self._step_seconds = worker, step_seconds

    def seconds(self, spec: LoadSpec, users: int, waves: int) -> float:
        if self._worker is None:
            return waves * spec.num_output * self._step_seconds
        lines = (
            {"prompts": spec.prompts(users, f"{users} {wave}"), "num_output": spec.num_output} for wave in range(waves)
        )
        return sum(float(self._worker.ask(json.dumps(line))) for line in lines)


def measure(server: Server, offline: Offline, clients: list[Worker], spec: LoadSpec, users: int, waves: int) -> Figures:
    seconds = offline.seconds(spec, users, waves)
    num_tokens = users * waves * spec.num_output
    steps, before = server.steps(), server.cpu_seconds()
    parts = ask_all(clients, server.url, spec, users, waves)
    after = server.cpu_seconds()
    num_steps, step_seconds = (now - at for at, now in zip(steps, server.steps(), strict=True))
    assert sum(part["tokens"] for part in parts) == num_tokens, "not all tokens came"
    gaps = [1e3 * gap for part in parts for gap in part["gaps"]]
    cpu = [used - at for at, used in zip(before, after, strict=True)] + [sum(part["cpu"] for part in parts)]
    server_us, engine_us, client_us = (1e6 * used / num_tokens for used in cpu)
    return Figures(
        server.tree,
        users,
        offline=num_tokens / seconds,
        served=num_tokens / (max(part["end"] for part in parts) - min(part["begin"] for part in parts)),
        server_us=server_us,
        engine_us=engine_us,
        client_us=client_us,
        steps=num_steps / (waves * spec.num_output),
        step_ms=1e3 * step_seconds / num_steps,
        chunks=sum(part["chunks"] for part in parts) / num_tokens,
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
        gap_longest=max(gaps),
    )


def ask_all(clients: list[Worker], url: str, spec: LoadSpec, users: int, waves: int) -> list[dict[str, Any]]:
    """The users divided among the client processes, which run at the same time."""
    bodies = [spec.body(prompt) for wave in range(waves) for prompt in spec.prompts(users, f"{users} {wave}")]
    asked = []
    for number, client in enumerate(clients):
        own = bodies[number :: len(clients)]
        num_users = len(range(number, users, len(clients)))
        if num_users:
            client.tell(json.dumps({"url": url, "path": spec.path, "users": num_users, "bodies": own}))
            asked.append(client)
    return [json.loads(client.read()) for client in asked]


def table(rounds: list[Figures]) -> str:
    """Medians over the rounds."""
    lines = [
        f"{'tree':<8}{'users':>6}{'offline':>10}{'served':>10}{'share':>8}{'server us':>11}{'engine us':>11}"
        f"{'client us':>11}{'steps':>7}{'ms':>8}{'chunks':>8}{'gap p50':>9}{'p99':>8}{'longest':>9}"
    ]
    for tree, users in dict.fromkeys((one.tree, one.users) for one in rounds):
        of = [one for one in rounds if (one.tree, one.users) == (tree, users)]

        def median(name: str, of: list[Figures] = of) -> float:
            return statistics.median(getattr(one, name) for one in of)

        lines.append(
            f"{tree:<8}{users:>6}{median('offline'):>10.0f}{median('served'):>10.0f}{median('share'):>8.0%}"
            f"{median('server_us'):>11.1f}{median('engine_us'):>11.1f}{median('client_us'):>11.1f}"
            f"{median('steps'):>7.2f}{median('step_ms'):>8.3f}{median('chunks'):>8.2f}{median('gap_p50'):>9.2f}{median('gap_p99'):>8.2f}{median('gap_longest'):>9.1f}"
        )
    return "\n".join(lines)


@contextmanager
def checkpoint(shape: str) -> Iterator[Path]:
    """A folder with a config.json: weights are made when it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        yield Path(folder)


@contextmanager
def in_tree(source: str | None) -> Iterator[None]:
    """Processes that are started meanwhile import quire from there."""
    before = os.environ.get("PYTHONPATH")
    if source is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(Path(source).resolve()), before) if part)
    try:
        yield
    finally:
        if source is not None:
            os.environ.pop("PYTHONPATH")
            os.environ.update({} if before is None else {"PYTHONPATH": before})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of random weights (default: tiny)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="an engine that computes nothing, and takes so long")
    parser.add_argument("--model", help="a real one, in place of random weights")
    parser.add_argument("--tokenizer", default="smollm2", help="of random weights (default: smollm2)")
    parser.add_argument("--device", help="as for `quire serve`")
    parser.add_argument("--quantization", help="as for `quire serve`")
    parser.add_argument("--gpu-memory-utilization", type=float, help="of each of the two engines")
    parser.add_argument("--threads", type=int, help="of each engine, on a CPU")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, default=2, help="requests of each user in a round (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="processes of users")
    parser.add_argument("--route", choices=(COMPLETIONS, CHAT), default=COMPLETIONS)
    parser.add_argument("--other", metavar="SRC", help="serve with the quire of that source folder, too, in turns")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def engine_options(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"max_num_seqs": max(args.users), "max_model_len": 4096}
    if args.model is None:
        options |= {"load_format": "dummy", "tokenizer": str(resolve_model(args.tokenizer).path)}
    for name in ("device", "quantization", "gpu_memory_utilization", "threads"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    return {"model": args.model or str(path), **options}


def main() -> None:
    args = arguments()
    interruptible()
    rounds: list[Figures] = []
    with ExitStack() as stack:
        options = engine_options(args, stack.enter_context(checkpoint(args.shape)))
        flags = [
            word for name, value in options.items() if name != "model"
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]  # fmt: skip
        servers = []
        program = (
            ("benchmarks.paced_engine", "serve", str(args.step_ms)) if args.step_ms else ("quire.cli.main", "serve")
        )
        for tree, source in (("this", None), *([("other", args.other)] if args.other else [])):
            with in_tree(source):
                servers.append(
                    Server(tree, *stack.enter_context(own_server(options["model"], *flags, program=program)))
                )
        offline = Offline(None, args.step_ms / 1e3)
        if not args.step_ms:
            command = [sys.executable, "-m", "benchmarks.served_offline", json.dumps(options)]
            offline = Offline(Worker(stack.enter_context(running(command, piped=True))), 0.0)
        words = [sys.executable, "-m", "benchmarks.served_load"]
        clients = [Worker(stack.enter_context(running(words, piped=True))) for _ in range(args.clients)]
        spec = LoadSpec(args.route, args.output_tokens, SHAPES[args.shape]["vocab_size"])
        for users in args.users:  # warm, and on a GPU captured
            for server in servers:
                measure(server, offline, clients, LoadSpec(args.route, 4, spec.vocab_size), users, 1)
        for number in range(args.rounds):
            note_others(f"round {number + 1} of {args.rounds}")
            for users in args.users:
                for server in servers:
                    rounds.append(measure(server, offline, clients, spec, users, args.waves))
    print(table(rounds))
    result = {"benchmark": "served", "machine": describe(), "options": options, "rounds": [asdict(o) for o in rounds]}
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
