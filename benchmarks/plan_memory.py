"""What `quire plan` says an engine takes, beside what the system says it took: one process a combination.

    python -m benchmarks.plan_memory --device cpu                  every combination: some minutes
    python -m benchmarks.plan_memory --device gpu --seconds 330    as many as fit in that time
    python -m benchmarks.plan_memory --device cpu --only moe       those with that in their name
    python -m benchmarks.plan_memory --replay FILE                 today's plans beside the peaks of a kept run

Each process starts an engine and lets every user fill its context, with prompts in the largest chunks. On a CPU the
peak is VmHWM, all that was resident: RssAnon, and the pages of mapped files, which are libraries and embedding tables.
The system may drop the latter, so they stand apart. With draft tokens the peak varies from run to run: an engine takes
as many as pay by the time of its steps. On a GPU it is the most that torch reserved, and what the device
holds for the process beside that: its context, kernels and graphs."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.hollow_files import write_llama_gguf, write_lora_adapter
from benchmarks.plan_memory_cases import CPU_CASES, GPU_CASES, MODELS, MemoryCase
from quire.core.errors import QuireError
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.planning.memory import EngineLimits, Load, MemoryPlan, plan_memory
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.planned_model import plan_model
from quire.planning.this_machine import engine_process_bytes
from quire.weights.checkpoint import open_checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint

MIB = 1 << 20


@dataclass(slots=True)
class Row:
    """Bytes."""

    case: MemoryCase
    predicted: MemoryPlan
    measured: dict[str, Any]

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the peak; below 0: it was too low."""
        return self.predicted.total / float(self.measured["peak"]) - 1

    def line(self) -> str:
        parts = "  ".join(f"{name} {size / MIB:.0f}" for name, size in asdict(self.predicted).items() if size)
        peak = self.measured["peak"]
        return (
            f"{self.case.name:<44}{self.predicted.total / MIB:>10,.1f}{peak / MIB:>10,.1f}{self.error:>8.2%}   {parts}"
        )

    def as_json(self) -> dict[str, Any]:
        predicted = {**asdict(self.predicted), "total": self.predicted.total}
        return {"case": asdict(self.case), "predicted": predicted, "measured": self.measured, "error": self.error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="combinations with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no combination after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the rows there, too")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="measure nothing: plan what this run measured")
    args = parser.parse_args()
    if args.replay:
        replay(args.replay, args.json)
        return
    cases = [case for case in (GPU_CASES if args.device == "gpu" else CPU_CASES) if args.only in case.name]
    rows: list[Row] = []
    end = time.monotonic() + args.seconds
    print(f"{'MiB':<44}{'planned':>10}{'peak':>10}{'error':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if time.monotonic() > end:
                print(f"{len(cases) - len(rows)} combinations are left out: the time is up", file=sys.stderr)
                break
            try:
                rows.append(measure(case, Path(folder), args.device))
            except (subprocess.SubprocessError, QuireError, OSError) as failure:
                said = str(getattr(failure, "stderr", "") or failure)
                print(f"{case.name}: {said.strip()[-600:]}", file=sys.stderr)
                continue
            print(rows[-1].line(), flush=True)
            if args.json:
                args.json.write_text(result_of(args.device, rows))
    if rows:
        print(errors_of(rows))
        print(result_of(args.device, rows))


def errors_of(rows: list[Row]) -> str:
    errors = [row.error for row in rows]
    return f"{len(errors)} combinations: error {min(errors):.2%} to {max(errors):.2%}"


def replay(kept: Path, target: Path | None) -> None:
    """Plan the combinations of a run again, and hold the plans against the peaks of then."""
    run = json.loads(kept.read_text())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run["rows"]:
            case, measured = MemoryCase(**row["case"]), row["measured"]
            rows.append(Row(case, predict(case, model_path(case, Path(folder)), run["device"], measured), measured))
            print(rows[-1].line(), flush=True)
    print(errors_of(rows))
    if target:
        run["rows"] = [row.as_json() for row in rows]
        target.write_text(json.dumps(run))


def result_of(device: str, rows: list[Row]) -> str:
    """One line of JSON."""
    machine = {"architecture": platform.machine(), "system": platform.release(), "python": platform.python_version()}
    return json.dumps({"machine": machine, "device": device, "rows": [row.as_json() for row in rows]})


def measure(case: MemoryCase, folder: Path, device: str) -> Row:
    path = model_path(case, folder)
    adapter = folder / f"lora-{case.model}-{case.rank}"
    if case.num_loras:
        write_lora_adapter(adapter, MODELS[case.model], case.rank)
    given = json.dumps({"case": asdict(case), "path": str(path), "adapter": str(adapter), "device": device})
    command = [sys.executable, "-m", "benchmarks.plan_memory_engine", given]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    measured = json.loads(said.splitlines()[-1])
    return Row(case, predict(case, path, device, measured), measured)


def model_path(case: MemoryCase, folder: Path) -> Path:
    """Of a checkpoint that is written for the benchmark, unless it is the default model."""
    if case.model == "default":
        return Path(resolve_model(DEFAULT_MODEL, progress=False).path)
    config = MODELS[case.model]
    if case.format is not None:
        return write_llama_gguf(folder / f"{case.model}-{case.format}.gguf", config, case.format)
    directory = folder / case.model
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def predict(case: MemoryCase, path: Path, device: str, measured: dict[str, Any]) -> MemoryPlan:
    on_gpu = device == "gpu"
    checkpoint = DummyCheckpoint(path) if case.is_dummy else open_checkpoint(path)
    model = plan_model(case.model, checkpoint, GpuFormat() if on_gpu else NativeFormat(), case.quantization)
    load = Load(users=case.users, context=case.context)
    limits = EngineLimits(
        max_num_batched_tokens=case.max_num_batched_tokens, num_loras=case.num_loras, lora_rank=case.rank,
        num_drafts=case.num_drafts, threads=measured["threads"],
    )  # fmt: skip
    kv = model.kv_spec("bfloat16" if on_gpu and case.kv_cache_dtype == "auto" else case.kv_cache_dtype)
    noise = ["numpy.random"] if case.is_dummy else []  # random weights need it
    process = None if on_gpu else engine_process_bytes(*noise)
    return plan_memory(model, kv, load, limits=limits, on_gpu=on_gpu, process=process)


if __name__ == "__main__":
    main()
