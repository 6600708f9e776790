"""Predictions beside real runs: workloads are served here by `quire serve`, and simulated.

    python -m benchmarks.foresight --markdown table.md                all workloads of the CPU: 12 minutes
    python -m benchmarks.foresight --device gpu --limit 380           those of a GPU, as many as fit into the seconds
    python -m benchmarks.foresight --workload busy --seconds 20
    python -m benchmarks.foresight --list
    python -m benchmarks.foresight --record benchmarks/results/2026-11-17-machine-foresight.json
    python -m benchmarks.foresight --workload busy conversations --record tests/planning/data/foresight-cpu.json
    python -m benchmarks.foresight --replay tests/planning/data/foresight-cpu.json

On a machine that has nothing else to do. The speed of a rented CPU changes within minutes, so that the model is
calibrated right before and right after each workload, and predictions are the mean of both; how far these two are apart
is the drift. On a GPU a model that is not small is calibrated once. The engine writes down what its steps took, so that
every workload is also simulated with the speed that the machine had at each moment: what is then left of an error is
not the machine's. The load of a workload is a share of what the simulation says can be served; how long the engine was
busy stands beside it. Files are written after each workload, so that whatever ends a run loses nothing."""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.foresight_cases import CPU, GPU, Case
from benchmarks.foresight_client import Client
from benchmarks.foresight_record import Record, RecordedRun, capacity, mean_costs, mean_times, simulated_latencies
from benchmarks.foresight_table import header, line_of, markdown_of, replay_lines, summary_of
from benchmarks.machine import describe as describe_machine
from benchmarks.machine import note_others
from benchmarks.processes import interruptible
from benchmarks.step_log import ObservedTimes, WithLoop
from quire.cli.calibrate import LoggedServer, calibrate, describe, kept_calibration, logged_server
from quire.cli.simulate import own_gpu
from quire.engine.options import EngineOptions
from quire.hub import DEFAULT_MODEL, cache_dir, resolve_model
from quire.planning.calibrate import gapless, mean_steps, with_recent
from quire.planning.fleet import EngineFlags, Fleet, SimulatedEngine, plan_engine
from quire.planning.hardware import find_hardware
from quire.planning.packed_bytes import GpuFormat, NativeFormat
from quire.planning.planned_model import PlannedModel, plan_model
from quire.planning.shape_checkpoint import shape_checkpoint
from quire.planning.shapes import SHAPES
from quire.planning.simulator import simulate
from quire.planning.step_log import LoggedStep, read_steps
from quire.planning.step_times import ServingCosts, StepTimes, default_costs, roofline_times
from quire.planning.summary import summarize
from quire.planning.this_machine import this_machine
from quire.planning.workload import WorkloadSpec, generate
from quire.weights.checkpoint import open_checkpoint
from quire.weights.huggingface import read_config

CACHE_BYTES = {"cpu": 1 << 30, "gpu": 16 << 30}
VOCAB_SIZE = 49152  # of the default model, whose tokenizer all have
SECONDS = {"cpu": 25.0, "gpu": 15.0}  # that requests come, of each workload
CALIBRATION_SECONDS = {"cpu": 12.0, "gpu": 18.0}
LIMIT = {"cpu": 3600.0, "gpu": 370.0}  # seconds of all


@dataclass(frozen=True, slots=True)
class Served:
    """A workload that was served."""

    run: RecordedRun
    begin: float  # its second 0, as time.perf_counter()
    steps: list[LoggedStep]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: that requests come of each workload, of a calibration, and when all must end (time.monotonic())."""

    workload: float
    calibration: float
    end: float

    @property
    def suffice(self) -> bool:
        """For another workload and the end of its answers."""
        return time.monotonic() + 1.4 * self.workload < self.end


@dataclass(frozen=True, slots=True)
class Files:
    record: Path | None
    markdown: Path | None

    def write(self, record: Record, rows: list[dict[str, Any]]) -> None:
        if self.record:
            record.write(self.record)
        if self.markdown:
            self.markdown.write_text(markdown_of(rows, record.machine))


class Foresight:
    """Serves cases and simulates them, on one device."""

    def __init__(
        self, device: str, gpu: str | None, times: "Times", kept: bool, files: "Files", default: Path | None = None
    ) -> None:
        """`default`: the files of the default model, or its config.json and tokenizer; None: as they are found."""
        self.device, self._times, self._kept, self._files, self._default = device, times, kept, files, default
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
        default = self._default or resolve_model(DEFAULT_MODEL).path
        if name != "8b" and not _has_weights(default):
            dummy = replace(options, model=str(default), load_format="dummy", tokenizer=str(default))
            yield dummy, plan_model(name, shape_checkpoint(read_config(default), None), packing)
            return
        if name != "8b":
            found = replace(options, model=str(default)) if self._default else options
            yield found, plan_model(name, open_checkpoint(default), packing)
            return
        with tempfile.TemporaryDirectory() as folder:
            config = {**SHAPES["llama-3.1-8b"], "vocab_size": VOCAB_SIZE}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            dummy = replace(options, model=folder, load_format="dummy", tokenizer=str(default))
            yield dummy, plan_model(name, shape_checkpoint(read_config(Path(folder)), None), packing)

    def run(self, cases: list[Case]) -> None:
        for name in dict.fromkeys(case.model for case in cases):
            if self._times.suffice:
                with self.model(name) as (options, model):
                    self._serve_cases([case for case in cases if case.model == name], options, model)

    def _serve_cases(self, cases: list[Case], options: EngineOptions, model: PlannedModel) -> None:
        """One server is calibrated with throughout; cases with options of their own have another beside it."""
        with logged_server(options) as usual:
            before = self._calibrate(options, usual)
            for case in cases:
                if not self._times.suffice:
                    print(f"{case.name}: there is no time left for it", flush=True)
                    continue
                changed = replace(options, **case.options)
                known = self.record.calibrations[before]
                fleet = Fleet(self._engine(changed, model), known.times, known.costs)
                with logged_server(changed) if case.options else nullcontext(usual) as server:
                    served = self._serve_case(case, server, fleet)
                after = before if self._is_steady(case) else self._calibrate(options, usual)
                self._report(served, model, (before, after))
                before = after

    def _is_steady(self, case: Case) -> bool:
        """Whether steps take what they took when they were calibrated. Those of a small model on a GPU are as fast as
        its engine's loop, and that as the CPU."""
        return self.device == "gpu" and case.model == "8b"

    def _calibrate(self, options: EngineOptions, server: LoggedServer) -> str:
        """-> its name in the record."""
        calibration = kept_calibration(options) if self._kept else None
        if calibration is None:
            if self.device == "cpu":
                self.measure()
            calibration = calibrate(options, self._times.calibration, server)
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

    def _serve_case(self, case: Case, server: LoggedServer, fleet: Fleet) -> Served:
        note_others(case.name)
        seed = len(self.rows) + 1
        spec = self._spec(case, seed, fleet)
        begin, sent, real = Client(server.url, VOCAB_SIZE, seed).run(generate(spec))
        steps = read_steps(server.log, begin)
        if self.device == "gpu":
            steps = with_recent(gapless(steps))
        busy = sum(step.seconds for step in steps) / real.seconds
        alike = mean_steps(steps, self.device == "gpu")
        run = RecordedRun(case.name, spec, fleet.engine, sent, real, case.load, busy, tuple(alike))
        return Served(run, begin, steps)

    def _report(self, served: Served, model: PlannedModel, names: tuple[str, ...]) -> None:
        """`names`: of the calibrations before and after."""
        run, steps = served.run, served.steps
        calibrations = [self.record.calibrations[name] for name in names]
        times, costs = mean_times(calibrations), mean_costs(calibrations)
        simulation = run.simulate(times, costs)
        by_rates = roofline_times(model, "auto", self.hardware, eight_bit=self.device != "gpu")
        uncalibrated = run.simulate(by_rates, default_costs(self.hardware))
        whole, beside = self._whole_steps(times, costs)
        observed = ObservedTimes(whole, steps, served.begin)
        observed.replica = run.engine.new_replica(0, observed, beside)
        as_it_was = simulate(run.arrivals(), [observed.replica])
        summary, real_seconds = summarize(simulation), sum(step.seconds for step in steps)
        wholes = [self._whole_steps(each.times, each.costs)[0] for each in calibrations]
        said = [sum(each.seconds(step.work) for step in steps) for each in wholes]
        decodes = [step for step in steps if not step.work.num_chunks]
        errors = {
            name: run.errors(simulated_latencies(each).figures())
            for name, each in (("errors", simulation), ("observed", as_it_was), ("uncalibrated", uncalibrated))
        }
        row = {
            "workload": run.workload,
            "load": run.load,
            "busy": run.busy,
            "requests": len(run.real.ttft),
            "seconds": run.real.seconds,
            "real": run.real.figures(),
            **errors,
            "drift": said[1] / said[0] - 1,  # of the machine, from before to after
            "steps_error": sum(said) / len(said) / real_seconds - 1,  # of the sum of its step times
            "decode_error": _sum_error(whole, decodes),  # of those without prompts
            "steps": (len(steps), summary.num_steps),
            "step_seconds": real_seconds / len(steps),
            "preemptions": summary.preemptions,
        }
        self.rows.append(row)
        self.record.runs.append((names, run, errors["errors"]))
        self._files.write(self.record, self.rows)
        print(line_of(row), flush=True)

    def _whole_steps(self, times: StepTimes, costs: ServingCosts) -> tuple[StepTimes, ServingCosts]:
        """Steps as they were measured, with what a GPU waits for the engine's loop, and costs without that."""
        if self.device == "cpu":
            return times, costs
        return WithLoop(times, costs), replace(costs, step=0.0, row=0.0, prompts=0.0, arrival=0.0)

    def _spec(self, case: Case, seed: int, fleet: Fleet) -> WorkloadSpec:
        """As many requests as take about the seconds that are asked for."""
        spec = WorkloadSpec(**case.spec, seed=seed)
        served = capacity(spec, fleet)
        rate = case.load * served
        num_requests = max(12, round((rate or served) * self._times.workload))
        return replace(spec, rate=rate or math.inf, num_requests=num_requests)


def _has_weights(path: Path) -> bool:
    return path.is_file() or any(path.glob("*.safetensors"))


def _sum_error(times: StepTimes, steps: Sequence[LoggedStep]) -> float:
    """Of the sum of what they took, as a share."""
    real = sum(step.seconds for step in steps)
    return sum(times.seconds(step.work) for step in steps) / real - 1 if real else 0.0


def _end_after(seconds: float) -> None:
    """As SIGTERM does, whatever the program does then."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--hardware", metavar="NAME", help="the data sheet of the GPU (default: by its name)")
    parser.add_argument("--workload", nargs="+", metavar="NAME", help="some of them, with - for spaces (default: all)")
    parser.add_argument("--seconds", type=float, help="that requests come, of each workload (25; GPU: 15)")
    parser.add_argument("--calibration-seconds", type=float, metavar="S", help="of each calibration (12; GPU: 18)")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds of all, which ends it (3600; GPU: 370)")
    parser.add_argument("--default-model", type=Path, metavar="PATH", help="its files, with weights or without")
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
    limit, device = args.limit or LIMIT[args.device], args.device
    _end_after(limit)
    times = Times(
        args.seconds or SECONDS[device], args.calibration_seconds or CALIBRATION_SECONDS[device],
        time.monotonic() + limit,
    )  # fmt: skip
    files = Files(args.record, args.markdown)
    foresight = Foresight(device, args.hardware, times, args.kept, files, args.default_model)
    print(header())
    try:
        foresight.run([cases[name] for name in args.workload or cases])
    finally:
        if foresight.rows:
            print(summary_of(foresight.rows))
            print(json.dumps({"benchmark": "foresight", "machine": foresight.record.machine, "runs": foresight.rows}))


if __name__ == "__main__":
    main()
