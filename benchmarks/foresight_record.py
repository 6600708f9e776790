"""A real run beside its simulation: what was measured, what is predicted, and the errors. Kept as JSON for a gate."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from quire.planning.calibration import Calibration, measured_steps
from quire.planning.fleet import Fleet, SimulatedEngine
from quire.planning.simulator import Simulation
from quire.planning.step_fit import MeasuredStep
from quire.planning.step_times import ServingCosts, StepTimes, StepWork
from quire.planning.summary import percentile
from quire.planning.workload import Arrival, WorkloadSpec, generate

NUM_AT_ONCE = 120  # requests that tell roughly what can be served
OVERLOAD = 1.5  # times that: all of what can be served is used
DIGITS = 5  # of seconds: a file stays small
# What a prediction may be off by, as a share of what was measured.
AIMS = {
    "output tokens/s": 0.02, "TPOT p50": 0.03, "TPOT p99": 0.10, "end to end p50": 0.04, "end to end p99": 0.10,
    "TTFT p50": 0.05, "TTFT p99": 0.10,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of every request, in seconds from when it was sent."""

    ttft: list[float]
    latency: list[float]
    num_output: list[int]
    seconds: float  # from the first request to the end of the last answer

    def figures(self) -> dict[str, float]:
        """By the names of AIMS."""
        pairs = zip(self.latency, self.ttft, self.num_output, strict=True)
        tpot = [(latency - ttft) / (count - 1) for latency, ttft, count in pairs if count > 1] or [0.0]
        spread = {"TTFT": self.ttft, "TPOT": tpot, "end to end": self.latency}
        return {"output tokens/s": sum(self.num_output) / self.seconds} | {
            f"{name} p{share}": percentile(values, share) for name, values in spread.items() for share in (50, 99)
        }


def simulated_latencies(simulation: Simulation) -> Latencies:
    requests = simulation.requests
    return Latencies(
        [r.ttft for r in requests], [r.latency for r in requests], [r.num_output for r in requests], simulation.seconds
    )


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One workload, as it was served."""

    workload: str
    spec: WorkloadSpec
    engine: SimulatedEngine
    sent: list[float]  # when the first turn of each conversation was, in the order of the workload
    real: Latencies
    load: float = 0.0  # requests a second, as a share of what can be served; 0: all at once, or not known
    busy: float = 0.0  # share of the time in which a step ran
    steps: tuple[MeasuredStep, ...] = ()  # that ran, those that are alike as one; earlier records have none

    def arrivals(self) -> list[Arrival]:
        """As they were sent."""
        arrivals = generate(self.spec)
        for arrival, sent in zip(arrivals, self.sent, strict=True):
            arrival.time = sent
        return sorted(arrivals, key=lambda arrival: arrival.time)

    def simulate(self, times: StepTimes, costs: ServingCosts) -> Simulation:
        return Fleet(self.engine, times, costs).serve(self.arrivals())

    def errors(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Relative: 0.05 is a prediction that is 5 % too high."""
        figures = self.real.figures()
        return {name: predicted[name] / value - 1 if value else 0.0 for name, value in figures.items()}

    def as_json(self) -> dict[str, Any]:
        spec = {**asdict(self.spec), "rate": self.spec.rate if math.isfinite(self.spec.rate) else None}
        real = {**asdict(self.real), "ttft": _rounded(self.real.ttft), "latency": _rounded(self.real.latency)}
        sent = _rounded(self.sent)
        shares = {"load": self.load, "busy": round(self.busy, DIGITS)}
        steps = [[*astuple(step.work), round(step.seconds, 7), step.count] for step in self.steps]
        return {
            "workload": self.workload, **shares, "spec": spec, "engine": asdict(self.engine), "sent": sent,
            "real": real, "steps": steps,
        }  # fmt: skip

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RecordedRun":
        spec = {**values["spec"], "rate": math.inf if values["spec"]["rate"] is None else values["spec"]["rate"]}
        return cls(
            values["workload"], WorkloadSpec(**spec), SimulatedEngine(**values["engine"]), values["sent"],
            Latencies(**values["real"]), values.get("load", 0.0), values.get("busy", 0.0),
            tuple(measured_steps(values.get("steps", ()))),
        )  # fmt: skip


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Of a machine whose speed changes: steps as they were timed before and after a run."""

    times: tuple[StepTimes, ...]

    def seconds(self, work: StepWork) -> float:
        return sum([each.seconds(work) for each in self.times]) / len(self.times)


def mean_times(calibrations: Sequence[Calibration]) -> MeanTimes:
    return MeanTimes(tuple(calibration.times for calibration in calibrations))


def mean_costs(calibrations: Sequence[Calibration]) -> ServingCosts:
    names = [spec.name for spec in fields(ServingCosts)]
    return ServingCosts(**{name: fmean(getattr(each.costs, name) for each in calibrations) for name in names})


@dataclass(frozen=True, slots=True)
class Record:
    """Runs on one machine, the calibrations they were predicted with, and the errors at the time."""

    machine: dict[str, Any]
    calibrations: dict[str, Calibration]  # by name
    runs: list[tuple[tuple[str, ...], RecordedRun, dict[str, float]]]  # its calibrations, the run, errors

    def replay(self) -> list[tuple[str, dict[str, float], dict[str, float]]]:
        """-> of each run: its workload, the errors that were kept, and those of a fit and a simulation now."""
        rows, refitted = [], {name: calibration.refitted() for name, calibration in self.calibrations.items()}
        for names, run, kept in self.runs:
            calibrations = [refitted[name] for name in names]
            simulation = run.simulate(mean_times(calibrations), mean_costs(calibrations))
            now = simulated_latencies(simulation).figures()
            rows.append((run.workload, kept, run.errors(now)))
        return rows

    def write(self, path: Path) -> None:
        runs = [{"calibrations": names, **run.as_json(), "errors": errors} for names, run, errors in self.runs]
        calibrations = {name: calibration.as_json() for name, calibration in self.calibrations.items()}
        head = {"benchmark": "foresight", "machine": self.machine, "calibrations": calibrations}
        lines = ",\n".join(json.dumps(run) for run in runs)
        path.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')

    @classmethod
    def read(cls, path: Path) -> "Record":
        values = json.loads(path.read_text())
        return cls(
            values["machine"],
            {name: Calibration.of(kept) for name, kept in values["calibrations"].items()},
            [(_names(run), RecordedRun.of(run), run["errors"]) for run in values["runs"]],
        )


def _names(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Earlier records have one calibration, by the name of the workload or of the model."""
    return tuple(run["calibrations"]) if "calibrations" in run else (run.get("calibration") or run["model"],)


def capacity(spec: WorkloadSpec, fleet: Fleet) -> float:
    """Requests a second that are served at most: of more than can be, how many end in the middle of the run."""
    together = replace(spec, rate=math.inf, think_seconds=0.0, num_requests=NUM_AT_ONCE, burst=1)
    roughly = NUM_AT_ONCE / fleet.serve(generate(together)).seconds
    too_many = replace(together, rate=OVERLOAD * roughly, num_requests=2 * NUM_AT_ONCE)
    ended = sorted(request.finished for request in fleet.serve(generate(too_many)).requests)
    quarter = len(ended) // 4
    return (len(ended) - 2 * quarter) / (ended[-quarter - 1] - ended[quarter - 1])
