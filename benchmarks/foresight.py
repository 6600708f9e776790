"""Predictions beside real runs: workloads are served here by `quire serve`, and simulated.

    python -m benchmarks.foresight                                    all workloads of the CPU: 18 minutes
    python -m benchmarks.foresight --device gpu                       those of a GPU: 10 minutes
    python -m benchmarks.foresight --workload busy --seconds 20
    python -m benchmarks.foresight --list
    python -m benchmarks.foresight --record benchmarks/results/2026-11-17-machine-foresight.json
    python -m benchmarks.foresight --workload busy conversations --record tests/planning/data/foresight-cpu.json
    python -m benchmarks.foresight --replay tests/planning/data/foresight-cpu.json

On a machine that has nothing else to do. The model is calibrated before each workload, as `quire simulate --calibrate`
does, since the speed of a rented machine changes within minutes; `--kept` uses the calibration of an earlier run. The
load of a workload is a share of what the simulation says can be served."""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.foresight_client import Client, step_seconds
from benchmarks.foresight_record import AIMS, Record, RecordedRun, at_once, simulated_latencies
from benchmarks.machine import describe as describe_machine
from benchmarks.machine import note_others
from benchmarks.processes import interruptible
from quire.cli.calibrate import calibrate, describe, kept_calibration, running_server
from quire.cli.simulate import own_gpu
from quire.engine.options import EngineOptions
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model
from quire.planning.calibration import Calibration
from quire.planning.fleet import EngineFlags, Fleet, SimulatedEngine, plan_engine
from quire.planning.hardware import find_hardware
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import SHAPES
from quire.planning.step_times import default_costs, roofline_times
from quire.planning.summary import summarize
from quire.planning.this_machine import this_machine
from quire.planning.workload import WorkloadSpec, generate
from quire.weights.checkpoint import open_checkpoint
from quire.weights.huggingface import read_config

CACHE_BYTES = {"cpu": 1 << 30, "gpu": 16 << 30}
VOCAB_SIZE = 49152  # of the default model, whose tokenizer all have
NUM_AT_ONCE = 120  # requests that tell what can be served
WITHOUT_CALIBRATION = 0.15  # what a prediction from rates may be off by


@dataclass(frozen=True, slots=True)
class Case:
    """`load`: requests a second as a share of what can be served; 0: all at once."""

    name: str
    load: float
    spec: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "smollm2"


_CHAT = {"prompt": 128, "output": 64, "spread": 0.5}
CPU = (
    Case("light", 0.3, _CHAT),
    Case("half", 0.5, _CHAT),
    Case("busy", 0.8, _CHAT),
    Case("full", 0.95, _CHAT),
    Case("bursts", 0.6, {"prompt": 96, "output": 48, "spread": 0.3, "burst": 8}),
    Case("shared prefixes", 0.7, {"prompt": 32, "output": 48, "spread": 0.5, "shared_prefix": 512, "num_prefixes": 4}),
    Case("conversations", 0.5, {"prompt": 48, "output": 48, "spread": 0.5, "turns": 4, "think_seconds": 2.0}),
    Case("long prompts", 0.6, {"prompt": 1500, "output": 32, "spread": 0.3}),
    Case("short", 0.8, {"prompt": 16, "output": 16, "spread": 0.5}),
    Case("spread", 0.7, {"prompt": 256, "output": 96, "spread": 1.0}),
    Case("at once", 0.0, {"prompt": 128, "output": 64, "spread": 0.3}),
    Case("small cache", 0.95, {"prompt": 96, "output": 128, "spread": 0.3},
         {"kv_cache_memory_bytes": 30 << 20, "max_model_len": 512}),
    Case("priorities", 0.9, {**_CHAT, "priorities": 3}, {"scheduling_policy": "priority"}),
    Case("no prefix cache", 0.7, {"prompt": 32, "output": 48, "spread": 0.5, "shared_prefix": 256},
         {"enable_prefix_caching": False}),
)  # fmt: skip
_LONG_CHAT = {"prompt": 1024, "output": 256, "spread": 0.5}
GPU = (
    Case("8b light", 0.3, _LONG_CHAT, model="8b"),
    Case("8b busy", 0.8, _LONG_CHAT, model="8b"),
    Case("8b shared prefixes", 0.6, {"prompt": 128, "output": 128, "spread": 0.5, "shared_prefix": 2048,
         "num_prefixes": 8}, model="8b"),
    Case("8b at once", 0.0, _LONG_CHAT, model="8b"),
    Case("135m busy", 0.25, {"prompt": 256, "output": 128, "spread": 0.5}),
    Case("135m conversations", 0.15, {"prompt": 128, "output": 96, "spread": 0.5, "turns": 4, "think_seconds": 1.0}),
)  # fmt: skip


class Foresight:
    """Serves cases and simulates them, on one device."""

    def __init__(self, device: str, gpu: str | None, seconds: float, kept: bool) -> None:
        self.device, self._seconds, self._kept = device, seconds, kept
        if device == "gpu":
            self.hardware = find_hardware(gpu) if gpu else own_gpu()
        else:
            self.measure()
        self.record = Record(describe_machine(), {}, [])
        self.rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        """The rates of this CPU, as they are now."""
        self.hardware = this_machine(cache_dir() / "machine.json", measure_again=not self._kept)

    @contextmanager
    def model(self, name: str) -> Iterator[tuple[EngineOptions, PlannedModel]]:
        """Its options for serving, and the same model for planning."""
        packing = GpuFormat() if self.device == "gpu" else NativeFormat()
        options = EngineOptions(
            device="cuda" if self.device == "gpu" else "cpu", kv_cache_memory_bytes=CACHE_BYTES[self.device]
        )
        default = resolve_model(DEFAULT_MODEL).path
        if name != "8b":
            yield options, plan_model(name, open_checkpoint(default), packing)
            return
        with tempfile.TemporaryDirectory() as folder:
            config = {**SHAPES["llama-3.1-8b"], "vocab_size": VOCAB_SIZE}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            dummy = replace(options, model=folder, load_format="dummy", tokenizer=str(default))
            yield dummy, plan_model(name, shape_checkpoint(read_config(Path(folder)), None), packing)

    def run(self, cases: list[Case]) -> None:
        for name in dict.fromkeys(case.model for case in cases):
            with self.model(name) as (options, model):
                self._serve_cases([case for case in cases if case.model == name], options, model)

    def _serve_cases(self, cases: list[Case], options: EngineOptions, model: PlannedModel) -> None:
        for given in dict.fromkeys(json.dumps(case.options) for case in cases):
            changed = replace(options, **json.loads(given))
            with running_server(changed) as url:
                for case in [case for case in cases if json.dumps(case.options) == given]:
                    calibration = (kept_calibration(options) if self._kept else None) or calibrate(options)
                    self.record.calibrations[case.name] = calibration
                    print(f"{case.name}: {describe(calibration)}", flush=True)
                    if self.device == "cpu":
                        self.measure()
                    note_others(case.name)
                    self._serve_case(case, url, self._engine(changed, model), model, calibration)

    def _engine(self, options: EngineOptions, model: PlannedModel) -> SimulatedEngine:
        flags = EngineFlags(
            max_model_len=options.max_model_len, kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            enable_prefix_caching=options.enable_prefix_caching, scheduling_policy=options.scheduling_policy,
        )  # fmt: skip
        return plan_engine(model, self.hardware, flags)

    def _serve_case(
        self, case: Case, url: str, engine: SimulatedEngine, model: PlannedModel, calibration: Calibration
    ) -> None:
        seed = len(self.rows) + 1
        spec = self._spec(case, seed, Fleet(engine, calibration.times, calibration.costs))
        before = step_seconds(url)
        sent, real = Client(url, VOCAB_SIZE, seed).run(generate(spec))
        after = step_seconds(url)
        run = RecordedRun(case.name, spec, engine, sent, real)
        simulation = run.simulate(calibration.times, calibration.costs)
        predicted = simulated_latencies(simulation).figures()
        by_rates = roofline_times(model, "auto", self.hardware, eight_bit=self.device != "gpu")
        uncalibrated = simulated_latencies(run.simulate(by_rates, default_costs(self.hardware))).figures()
        summary = summarize(simulation)
        row = {
            "workload": case.name,
            "requests": len(real.ttft),
            "seconds": real.seconds,
            "real": real.figures(),
            "errors": run.errors(predicted),
            "uncalibrated": run.errors(uncalibrated),
            "steps": (after[0] - before[0], summary.num_steps),
            "step_seconds": (
                (after[1] - before[1]) / max(1, after[0] - before[0]),
                summary.utilization * summary.seconds / max(1, summary.num_steps),
            ),
            "preemptions": summary.preemptions,
        }
        self.rows.append(row)
        self.record.runs.append((case.name, run, run.errors(predicted)))
        print(line_of(row), flush=True)

    def _spec(self, case: Case, seed: int, fleet: Fleet) -> WorkloadSpec:
        """As many requests as take about the seconds that are asked for."""
        spec = WorkloadSpec(**case.spec, seed=seed)
        served = summarize(fleet.serve(generate(at_once(spec, NUM_AT_ONCE)))).requests_per_second
        rate = case.load * served
        return replace(spec, rate=rate or math.inf, num_requests=max(8, round((rate or served) * self._seconds)))


def _cells(errors: dict[str, float]) -> str:
    return " ".join(f"{errors[name]:>+8.1%}" for name in AIMS)


def line_of(row: dict[str, Any]) -> str:
    errors, rough = _cells(row["errors"]), _cells(row["uncalibrated"])
    (real_steps, steps), (real_mean, mean) = row["steps"], row["step_seconds"]
    return (
        f"{row['workload']:<20} {row['requests']:>5} {row['seconds']:>5.0f} s {errors}\n"
        f"{'  without calibration':<33} {rough}\n"
        f"  steps {real_steps} ({steps} simulated), mean {1e3 * real_mean:.2f} ms ({1e3 * mean:.2f}), "
        f"real TTFT p50 {1e3 * row['real']['TTFT p50']:.0f} ms, TPOT p50 {1e3 * row['real']['TPOT p50']:.1f} ms, "
        f"{row['real']['output tokens/s']:.0f} tokens/s"
    )


def summary_of(rows: list[dict[str, Any]]) -> str:
    lines = []
    for kind, allowed in (("errors", AIMS), ("uncalibrated", dict.fromkeys(AIMS, WITHOUT_CALIBRATION))):
        met = [sum(abs(row[kind][name]) <= aim for row in rows) for name, aim in allowed.items()]
        cells = (f"{count:>4}/{len(rows):<3}" for count in met)
        lines.append(f"{'within the aim' if kind == 'errors' else 'without: within 15 %':<33} {' '.join(cells)}")
    return "\n".join(lines)


def replay(path: Path) -> None:
    for workload, kept, now in Record.read(path).replay():
        print(f"{workload:<20} kept {_cells(kept)}\n{'':<20} now  {_cells(now)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--hardware", metavar="NAME", help="the data sheet of the GPU (default: by its name)")
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="some of them, with - for spaces (default: all)")
    parser.add_argument("--seconds", type=float, default=40.0, help="that requests come, of each workload")
    parser.add_argument("--kept", action="store_true", help="use the calibration of an earlier run")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what a gate needs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="simulate the runs of a record again")
    parser.add_argument("--list", action="store_true", help="the workloads")
    args = parser.parse_args()
    cases = {case.name.replace(" ", "-"): case for case in (GPU if args.device == "gpu" else CPU)}
    if args.list:
        print("\n".join(cases))
        return
    if args.replay:
        replay(args.replay)
        return
    if unknown := [name for name in args.workload or () if name not in cases]:
        sys.exit(f"no workload is called `{unknown[0]}`: choose from {', '.join(cases)}")
    interruptible()
    foresight = Foresight(args.device, args.hardware, args.seconds, args.kept)
    names = [name.replace("end to end", "E2E").replace("output ", "")[:8] for name in AIMS]
    print(f"{'':<34} {' '.join(f'{name:>8}' for name in names)}")
    try:
        foresight.run([cases[name] for name in args.workload or cases])
    finally:
        if foresight.rows:
            print(summary_of(foresight.rows))
            if args.record:
                foresight.record.write(args.record)
            print(json.dumps({"benchmark": "foresight", "machine": foresight.record.machine, "runs": foresight.rows}))


if __name__ == "__main__":
    main()
