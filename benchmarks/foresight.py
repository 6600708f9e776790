"""Predictions beside real runs: workloads are served here by `quire serve`, and simulated.

    python -m benchmarks.foresight --markdown table.md                all workloads of the CPU: 12 minutes
    python -m benchmarks.foresight --device gpu                       those of a GPU: 10 minutes
    python -m benchmarks.foresight --workload busy --seconds 20
    python -m benchmarks.foresight --list
    python -m benchmarks.foresight --record benchmarks/results/2026-11-17-machine-foresight.json
    python -m benchmarks.foresight --workload busy conversations --record tests/planning/data/foresight-cpu.json
    python -m benchmarks.foresight --replay tests/planning/data/foresight-cpu.json

On a machine that has nothing else to do. The speed of a rented machine changes within minutes, so that the model is
calibrated right before and right after each workload, and predictions are the mean of both; how far these two are apart
is the drift. The engine writes down what its steps took, so that every workload is also simulated with the speed that
the machine had at each moment: what is then left of an error is not the machine's. The load of a workload is a share of
what the simulation says can be served."""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.foresight_cases import CPU, GPU, Case
from benchmarks.foresight_client import Client
from benchmarks.foresight_record import Record, RecordedRun, at_once, mean_costs, mean_times, simulated_latencies
from benchmarks.foresight_table import header, line_of, markdown_of, replay_lines, summary_of
from benchmarks.machine import describe as describe_machine
from benchmarks.machine import note_others
from benchmarks.processes import interruptible
from benchmarks.step_log import LoggedStep, ObservedTimes, read_steps
from quire.cli.calibrate import calibrate, describe, kept_calibration, running_server
from quire.cli.simulate import own_gpu
from quire.engine.options import EngineOptions
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model
from quire.planning.fleet import EngineFlags, Fleet, SimulatedEngine, plan_engine
from quire.planning.hardware import find_hardware
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import SHAPES
from quire.planning.simulator import simulate
from quire.planning.step_times import default_costs, roofline_times
from quire.planning.summary import summarize
from quire.planning.this_machine import this_machine
from quire.planning.workload import WorkloadSpec, generate
from quire.weights.checkpoint import open_checkpoint
from quire.weights.huggingface import read_config

CACHE_BYTES = {"cpu": 1 << 30, "gpu": 16 << 30}
VOCAB_SIZE = 49152  # of the default model, whose tokenizer all have
NUM_AT_ONCE = 120  # requests that tell what can be served
STEPS_SECONDS = {"cpu": 8.0, "gpu": 14.0}  # of the steps that are timed in one calibration


@dataclass(frozen=True, slots=True)
class Served:
    """A workload that was served."""

    run: RecordedRun
    begin: float  # its second 0, as time.perf_counter()
    steps: list[LoggedStep]


class Foresight:
    """Serves cases and simulates them, on one device."""

    def __init__(self, device: str, gpu: str | None, seconds: float, steps_seconds: float, kept: bool) -> None:
        self.device, self._seconds, self._steps_seconds, self._kept = device, seconds, steps_seconds, kept
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
        """One server is calibrated with throughout; cases with options of their own have another beside it."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            usual = stack.enter_context(_logged_server(options, folder / "usual"))
            before = self._calibrate(options, usual)
            for case in cases:
                changed = replace(options, **case.options)
                engine, log = self._engine(changed, model), folder / ("usual" if not case.options else case.name)
                known = self.record.calibrations[before]
                fleet = Fleet(engine, known.times, known.costs)
                with _logged_server(changed, log) if case.options else nullcontext(usual) as url:
                    served = self._serve_case(case, url, fleet, log)
                after = self._calibrate(options, usual)
                self._report(served, model, (before, after))
                before = after

    def _calibrate(self, options: EngineOptions, url: str) -> str:
        """-> its name in the record."""
        calibration = kept_calibration(options) if self._kept else None
        if calibration is None:
            if self.device == "cpu":
                self.measure()
            calibration = calibrate(options, self._steps_seconds, url)
        print(describe(calibration), flush=True)
        name = str(len(self.record.calibrations) + 1)
        self.record.calibrations[name] = calibration
        return name

    def _engine(self, options: EngineOptions, model: PlannedModel) -> SimulatedEngine:
        flags = EngineFlags(
            max_model_len=options.max_model_len, kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            enable_prefix_caching=options.enable_prefix_caching, scheduling_policy=options.scheduling_policy,
        )  # fmt: skip
        return plan_engine(model, self.hardware, flags)

    def _serve_case(self, case: Case, url: str, fleet: Fleet, log: Path) -> Served:
        note_others(case.name)
        seed = len(self.rows) + 1
        spec = self._spec(case, seed, fleet)
        begin, sent, real = Client(url, VOCAB_SIZE, seed).run(generate(spec))
        return Served(RecordedRun(case.name, spec, fleet.engine, sent, real), begin, read_steps(log, begin))

    def _report(self, served: Served, model: PlannedModel, names: tuple[str, ...]) -> None:
        """`names`: of the calibrations before and after."""
        run, steps = served.run, served.steps
        calibrations = [self.record.calibrations[name] for name in names]
        times, costs = mean_times(calibrations), mean_costs(calibrations)
        simulation = run.simulate(times, costs)
        by_rates = roofline_times(model, "auto", self.hardware, eight_bit=self.device != "gpu")
        uncalibrated = run.simulate(by_rates, default_costs(self.hardware))
        observed = ObservedTimes(times, steps, served.begin)
        observed.replica = run.engine.new_replica(0, observed, costs)
        as_it_was = simulate(run.arrivals(), [observed.replica])
        summary, real_seconds = summarize(simulation), sum(step.seconds for step in steps)
        said = [sum(each.times.seconds(step.work) for step in steps) for each in calibrations]
        errors = {
            name: run.errors(simulated_latencies(each).figures())
            for name, each in (("errors", simulation), ("observed", as_it_was), ("uncalibrated", uncalibrated))
        }
        row = {
            "workload": run.workload,
            "requests": len(run.real.ttft),
            "seconds": run.real.seconds,
            "real": run.real.figures(),
            **errors,
            "drift": said[1] / said[0] - 1,  # of the machine, from before to after
            "steps_error": sum(said) / len(said) / real_seconds - 1,  # of the sum of its step times
            "steps": (len(steps), summary.num_steps),
            "step_seconds": real_seconds / len(steps),
            "preemptions": summary.preemptions,
        }
        self.rows.append(row)
        self.record.runs.append((names, run, errors["errors"]))
        print(line_of(row), flush=True)

    def _spec(self, case: Case, seed: int, fleet: Fleet) -> WorkloadSpec:
        """As many requests as take about the seconds that are asked for."""
        spec = WorkloadSpec(**case.spec, seed=seed)
        served = summarize(fleet.serve(generate(at_once(spec, NUM_AT_ONCE)))).requests_per_second
        rate = case.load * served
        return replace(spec, rate=rate or math.inf, num_requests=max(8, round((rate or served) * self._seconds)))


def _logged_server(options: EngineOptions, log: Path) -> AbstractContextManager[str]:
    return running_server(options, ("benchmarks.step_log", "serve", str(log)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--hardware", metavar="NAME", help="the data sheet of the GPU (default: by its name)")
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="some of them, with - for spaces (default: all)")
    parser.add_argument("--seconds", type=float, default=25.0, help="that requests come, of each workload")
    parser.add_argument("--steps-seconds", type=float, metavar="S", help="of steps, in a calibration (8; GPU: 14)")
    parser.add_argument("--kept", action="store_true", help="use the calibration of an earlier run")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what a gate needs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables, as docs/planning.md has them")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="simulate the runs of a record again")
    parser.add_argument("--list", action="store_true", help="the workloads")
    args = parser.parse_args()
    cases = {case.name.replace(" ", "-"): case for case in (GPU if args.device == "gpu" else CPU)}
    if args.list:
        print("\n".join(cases))
        return
    if args.replay:
        print(replay_lines(Record.read(args.replay)))
        return
    if unknown := [name for name in args.workload or () if name not in cases]:
        sys.exit(f"no workload is called `{unknown[0]}`: choose from {', '.join(cases)}")
    interruptible()
    steps_seconds = args.steps_seconds or STEPS_SECONDS[args.device]
    foresight = Foresight(args.device, args.hardware, args.seconds, steps_seconds, args.kept)
    print(header())
    try:
        foresight.run([cases[name] for name in args.workload or cases])
    finally:
        if foresight.rows:
            print(summary_of(foresight.rows))
            if args.record:
                foresight.record.write(args.record)
            if args.markdown:
                args.markdown.write_text(markdown_of(foresight.rows, foresight.record.machine))
            print(json.dumps({"benchmark": "foresight", "machine": foresight.record.machine, "runs": foresight.rows}))


if __name__ == "__main__":
    main()
