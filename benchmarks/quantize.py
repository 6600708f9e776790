"""`quire quantize` beside llama.cpp, llm-compressor, GPTQModel and AutoRound: seconds, memory, bytes, and what is lost.

    python -m benchmarks.quantize [MODEL] --peers llama.cpp llm-compressor gptqmodel --tokens 16384 --json result.json
    python -m benchmarks.quantize --quick                            all cases on the first layers, in 15 minutes

All start from the same fp16 weights (of a quantized model: its dequantized ones, which are then the original), and
calibrate with the same tokens. Outputs are read by Quire's reader, and their next-token distributions compared with the
original's on text that none has seen. A peer that is not installed is left out, and said so. The result is written
after each row."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

from benchmarks.cut_model import cut_to_layers
from benchmarks.machine import describe, note_others
from benchmarks.processes import ROOT, progress, wait_with_peak
from quire.core.errors import QuireError
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.ops.opset import Keep
from quire.quantize import quality
from quire.quantize.calibration import default_text, sequences
from quire.quantize.command import cut_to
from quire.quantize.eager_model import linear_layers
from quire.weights.checkpoint import open_checkpoint

LENGTH = 512
TOKENS, MEASURED_TOKENS = 16384, 2048
QUICK_LAYERS, QUICK_TOKENS, QUICK_MEASURED_TOKENS = 4, 2048, 1024
IN_ORDER = ("--act-order", "inputs", "--damping", "0.01")  # the order and damping of the paper
LIMIT, QUICK_LIMIT = 3600.0, 300.0  # seconds for a row


@dataclass(frozen=True, slots=True)
class Tool:
    """Who quantizes, how it is started, and whether it reads a GGUF file or a folder."""

    name: str
    command: Sequence[str]
    gguf: bool = False


@dataclass(frozen=True, slots=True)
class Quantized:
    """A row of the result."""

    case: str
    tool: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    nbytes: int
    quality: dict[str, Any]


def cases(importance: Path, group_size: int) -> dict[str, dict[str, list[str]]]:
    """Case -> tool -> its arguments, with {source}, {out} and {ids} to be filled in. `group_size`: of W4A16."""
    group = ["--group-size", str(group_size)]
    quire = ["{source}", "{out}", "--report-tokens", "0", "-q", "--method"]
    calibrated = ["--calibrate", "{text}", "--calibration-tokens", "{tokens}"]
    return {
        "Q4_K_M": {"quire": [*quire, "Q4_K_M"], "llama.cpp": ["{source}", "{out}", "Q4_K_M"]},
        "Q4_K_M, importance": {
            "quire": [*quire, "Q4_K_M", "--imatrix", str(importance)],
            "llama.cpp": ["--imatrix", str(importance), "{source}", "{out}", "Q4_K_M"],
        },
        "Q8_0": {"quire": [*quire, "Q8_0"], "llama.cpp": ["{source}", "{out}", "Q8_0"]},
        "IQ4_XS, importance": {
            "quire": [*quire, "IQ4_XS", "--imatrix", str(importance)],
            "llama.cpp": ["--imatrix", str(importance), "{source}", "{out}", "IQ4_XS"],
        },
        "FP8_DYNAMIC": {"quire": [*quire, "FP8_DYNAMIC"], "llm-compressor": ["{source}", "{out}", "FP8_DYNAMIC"]},
        "W4A16, nearest": {
            "quire": [*quire, "W4A16", *group, *calibrated],
            "llm-compressor": ["{source}", "{out}", "W4A16", *group],
        },
        "W4A16, GPTQ": {
            "quire": [*quire, "W4A16", "--algorithm", "gptq", *group, *calibrated],
            "llm-compressor": ["{source}", "{out}", "W4A16", "--gptq", "{ids}", *group],
            "gptqmodel": ["{source}", "{out}", "{ids}", *group],
            "autoround": ["{source}", "{out}", "{ids}", *group],
        },
        "W4A16, GPTQ in order": {
            "quire": [*quire, "W4A16", "--algorithm", "gptq", *IN_ORDER, *group, *calibrated],
        },
    }


class Bench:
    """`folder`: where sources and outputs are. `limit`: seconds that a tool may take for a row."""

    def __init__(self, model: Path, folder: Path, num_tokens: int, measured: int, limit: float) -> None:
        self.folder, self.num_tokens, self.limit = folder, num_tokens, limit
        self.text = folder / "text.txt"
        self.text.write_text(default_text(), encoding="utf-8")
        used, held_out = sequences(model, default_text(), LENGTH, num_tokens)
        self.ids = folder / "ids.json"
        self.ids.write_text(json.dumps(used))
        self.measured = cut_to(held_out, measured)
        self.gguf, self.directory = folder / "source.gguf", folder / "source"
        for source in (self.gguf, self.directory):
            progress(f"making {source.name}: the weights in fp16")
            self._quire(str(model), str(source), "--method", "F16", "--report-tokens", "0", "-q")
        self.importance = folder / "importance.gguf"
        progress("importance of inputs, for all")
        flags = ["--method", "Q8_0", "--report-tokens", "0", "-q", "--calibrate", str(self.text)]
        flags += ["--save-imatrix", str(self.importance), "--calibration-tokens", str(num_tokens)]
        self._quire(str(self.gguf), str(folder / "with-importance.gguf"), *flags)
        self.original = quality.last_states(open_checkpoint(self.directory), self.measured)

    def _quire(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "quire.cli.main", "quantize", *arguments], check=True, cwd=ROOT)

    def run(self, case: str, tool: Tool, arguments: Sequence[str], to_gguf: bool) -> Quantized | str:
        """The row, or why there is none."""
        out = self.folder / f"out{'.gguf' if to_gguf else ''}"
        source = self.gguf if to_gguf else self.directory
        values = {"source": source, "out": out, "ids": self.ids, "text": self.text, "tokens": self.num_tokens}
        command = [*tool.command, *(argument.format_map(values) for argument in arguments)]
        note_others(f"{case}: {tool.name}")
        started = time.perf_counter()
        with (self.folder / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=peer_environment(), stdout=log, stderr=subprocess.STDOUT
            )
            with ended_after(process, self.limit):
                used, peak = wait_with_peak(process)
            seconds = time.perf_counter() - started
            log.seek(0)
            said = log.read()
        if seconds >= self.limit:
            subprocess.run(["rm", "-rf", str(out)], check=True)
            return f"was ended after {seconds:.0f} s"
        if process.returncode or not out.exists():
            return f"ended with status {process.returncode}: {said[-600:]}"
        try:
            states = quality.last_states(open_checkpoint(out), self.measured)
        except QuireError as error:
            return f"wrote what cannot be read: {error}"
        compared = quality.compare(self.original, states, self.measured)
        files = [out] if out.is_file() else [*out.glob("*.safetensors")]
        row = Quantized(
            case,
            tool.name,
            round(seconds, 2),
            round(used.ru_utime + used.ru_stime, 2),
            peak,
            sum(file.stat().st_size for file in files),
            compared.as_json(),
        )
        subprocess.run(["rm", "-rf", str(out)], check=True)
        return row


@contextmanager
def ended_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tools(arguments: argparse.Namespace) -> dict[str, Tool]:
    quire = Tool("quire", (sys.executable, "-m", "quire.cli.main", "quantize"))
    found = {"quire": quire}
    candidates = [
        (Tool("llama.cpp", (str(Path(arguments.llama_quantize).absolute()),), gguf=True), arguments.llama_quantize),
        (_worker("llm-compressor", arguments.llmcompressor_python), arguments.llmcompressor_python),
        (_worker("gptqmodel", arguments.gptqmodel_python), arguments.gptqmodel_python),
        (_worker("autoround", arguments.autoround_python), arguments.autoround_python),
    ]
    for tool, needed in candidates:
        if tool.name not in arguments.peers:
            continue
        if not Path(needed).exists():
            progress(f"{tool.name} is left out: there is no {needed}")
            continue
        found[tool.name] = tool
    return found


def peer_environment() -> dict[str, str]:
    """Of a process that starts elsewhere, where it may leave logs, and imports `benchmarks`."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


def fitting_group(model: Path) -> int:
    """The largest size of groups, 128 at most, that divides the inputs of all linear layers."""
    uses = linear_layers(open_checkpoint(model)).values()
    return gcd(128, *(use.shape[1] for use in uses if use.keep is Keep.NOTHING))


def _worker(name: str, python: str) -> Tool:
    module = f"benchmarks.peers.{name.replace('-', '')}_quantize"
    return Tool(name, (str(Path(python).absolute()), "-m", module))


def line(row: Quantized) -> str:
    kl, top = row.quality["kl"], row.quality["same_top"]
    cells = (
        f"{row.case:<20} {row.tool:<15}",
        f"{row.seconds:>8.1f} s {row.cpu_seconds:>8.1f} s CPU {row.peak_bytes / 1e9:>6.2f} GB",
        f"{row.nbytes / 1e6:>8.1f} MB",
        f"  KL {kl['value']:.5f} ± {kl['error']:.5f}   same top {100 * top['value']:.1f} %",
    )
    return " ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--peers", nargs="*", default=["llama.cpp", "llm-compressor", "gptqmodel", "autoround"])
    parser.add_argument("--llama-quantize", default=".venv-llama/bin/llama-quantize")
    parser.add_argument("--llmcompressor-python", default=".venv-llmcompressor/bin/python")
    parser.add_argument("--gptqmodel-python", default=".venv-gptqmodel/bin/python")
    parser.add_argument("--autoround-python", default=".venv-auto-round/bin/python")
    parser.add_argument("--group-size", type=int, help="of W4A16 (default: the largest up to 128 that fits all layers)")
    parser.add_argument("--tokens", type=int, help=f"to calibrate with (default: {TOKENS})")
    parser.add_argument("--measured-tokens", type=int, help=f"(default: {MEASURED_TOKENS})")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model, the first alone")
    parser.add_argument("--cases", nargs="*", help="some of the table; default: all")
    quick = f"--layers {QUICK_LAYERS} --tokens {QUICK_TOKENS} --measured-tokens {QUICK_MEASURED_TOKENS} "
    quick += f"--limit {QUICK_LIMIT:.0f}"
    parser.add_argument("--quick", action="store_true", help=f"the same as {quick}")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"for a row (default: {LIMIT:.0f})")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench-quantize.json"), help="keep the result there (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers = arguments.layers or QUICK_LAYERS
    arguments.tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    arguments.limit = arguments.limit or (QUICK_LIMIT if arguments.quick else LIMIT)
    measured = QUICK_MEASURED_TOKENS if arguments.quick else MEASURED_TOKENS
    arguments.measured_tokens = arguments.measured_tokens or measured
    model = resolve_model(arguments.model).path
    found = tools(arguments)
    rows: list[Quantized] = []
    failures: dict[str, str] = {}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quire-bench-quantize-") as folder:
        if arguments.layers:
            model = cut_to_layers(model, Path(folder) / f"{model.stem}-{arguments.layers}-layers", arguments.layers)
        arguments.group_size = arguments.group_size or fitting_group(model)
        print(setting(model, arguments), flush=True)
        bench = Bench(model, Path(folder), arguments.tokens, arguments.measured_tokens, arguments.limit)
        for case, by_tool in cases(bench.importance, arguments.group_size).items():
            if arguments.cases and case not in arguments.cases:
                continue
            for name, given in by_tool.items():
                if name not in found:
                    continue
                row = bench.run(case, found[name], given, to_gguf="llama.cpp" in by_tool)
                if isinstance(row, str):
                    failures[f"{case}: {name}"] = row
                    progress(f"{case}: {name} {row}")
                else:
                    rows.append(row)
                    print(line(row), flush=True)
                result = _result(model, arguments, rows, failures)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(_result(model, arguments, rows, failures)))
    return 1 if failures else 0


def setting(model: Path, arguments: argparse.Namespace) -> str:
    layers = f"the first {arguments.layers} layers of " if arguments.layers else ""
    return (
        f"{layers}{model.name}, {arguments.tokens} tokens to calibrate with, {arguments.measured_tokens} measured, "
        f"W4A16 in groups of {arguments.group_size}"
    )


def _result(
    model: Path, arguments: argparse.Namespace, rows: Sequence[Quantized], failures: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "benchmark": "quantize",
        "model": model.name,
        "layers": arguments.layers,
        "machine": describe(),
        "calibration_tokens": arguments.tokens,
        "measured_tokens": arguments.measured_tokens,
        "group_size": arguments.group_size,
        "rows": [asdict(row) for row in rows],
        "failures": dict(failures),
    }


if __name__ == "__main__":
    sys.exit(main())
