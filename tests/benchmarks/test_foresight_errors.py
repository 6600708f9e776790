"""Errors of predictions: what the machine's speed does to them, and how they are printed."""

from dataclasses import replace

import pytest
from benchmarks.foresight_record import (
    AIMS,
    Latencies,
    RecordedRun,
    capacity,
    mean_costs,
    mean_times,
    simulated_latencies,
)
from benchmarks.foresight_table import line_of, markdown_of, summary_of
from benchmarks.step_log import ObservedTimes

from quire.planning.calibration import Calibration
from quire.planning.fitted_times import Curve, FittedTimes
from quire.planning.fleet import Fleet, SimulatedEngine
from quire.planning.replica import Replica
from quire.planning.simulator import simulate
from quire.planning.step_fit import FitQuality
from quire.planning.step_log import LoggedStep
from quire.planning.step_times import ServingCosts, StepWork
from quire.planning.workload import Arrival, WorkloadSpec, generate

CURVE = Curve((0.0, 1000.0), (0.01, 1.01))
TIMES = FittedTimes(CURVE, CURVE, Curve((0.0, 1.0), (0.0, 0.0)), 0.0, 0.0, 0.0)
SPEC = WorkloadSpec(rate=4, num_requests=60, prompt=60, output=30, spread=0.5)
ENGINE = SimulatedEngine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=128)


class SlowerLater:
    """Steps that take twice as long from the fifth second on, written down as a logged engine does."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.steps: list[LoggedStep] = []

    def seconds(self, work: StepWork) -> float:
        assert self.replica is not None
        now = self.replica.clock
        seconds = TIMES.seconds(work) * (2 if now > 5 else 1)
        if not self.steps or self.steps[-1].began < now:
            copy = StepWork(work.num_tokens, work.num_rows, work.num_read, work.num_pairs, work.num_chunks)
            self.steps.append(LoggedStep(copy, now, seconds))
        return seconds


def serve(times: SlowerLater | ObservedTimes, arrivals: list[Arrival]) -> Latencies:
    times.replica = ENGINE.new_replica(0, times)
    return simulated_latencies(simulate(arrivals, [times.replica]))


def test_with_the_speed_of_each_moment_nothing_is_left_of_the_error_that_the_machine_made() -> None:
    machine = SlowerLater()
    real = serve(machine, generate(SPEC))
    run = RecordedRun("slower later", SPEC, ENGINE, [arrival.time for arrival in generate(SPEC)], real)
    blind = run.errors(simulated_latencies(run.simulate(TIMES, ServingCosts())).figures())
    seeing = run.errors(serve(ObservedTimes(TIMES, machine.steps, 0.0), run.arrivals()).figures())
    assert blind["TPOT p50"] < -0.2 and blind["end to end p50"] < -0.2
    assert all(abs(seeing[name]) < 0.03 for name in AIMS), seeing


def test_two_calibrations_are_averaged() -> None:
    both = [
        Calibration({}, TIMES.scaled(factor), ServingCosts(step=0.001 * factor), FitQuality(0, 0, 10))
        for factor in (1, 3)
    ]
    work = StepWork(10, 10, 100, 100)
    assert mean_times(both).seconds(work) == pytest.approx(2 * TIMES.seconds(work))
    assert mean_costs(both).step == pytest.approx(0.002)


def test_tables_have_a_row_for_each_workload_and_count_what_is_within_the_aims() -> None:
    errors = dict.fromkeys(AIMS, 0.025)
    row = {
        "workload": "chat", "requests": 7, "seconds": 25.0, "real": dict.fromkeys(AIMS, 1.0), "drift": 0.1,
        "errors": errors, "observed": dict.fromkeys(AIMS, 0.0), "uncalibrated": dict.fromkeys(AIMS, 0.2),
        "load": 0.5, "busy": 0.62, "steps_error": -0.05, "decode_error": 0.02, "steps": (10, 11),
        "step_seconds": 0.02, "preemptions": 0,
    }  # fmt: skip
    full = {**row, "workload": "full", "load": 0.9}
    text = markdown_of([full, row], {"cpus": 2, "cpu": "x", "commit": "abc"})
    assert "| chat | 50 % | 62 % | +10.0 % | -5.0 % | +2.5 %" in text
    assert "| within the aim |  |  |  |  | 0 of 1 | 1 of 1 |" in text, "throughput may be 2 % off, and TPOT 3 %"
    assert text.index("| chat |") < text.index("*close to capacity*") < text.index("| full | 90 %")
    assert text.count("| chat |") == text.count("| full |") == 2 and "tokens/s 0, TPOT p50 0" in text
    assert "drift +10.0%" in line_of(row) and summary_of([row]).count("1/1") == 6 + 7


def test_the_capacity_is_the_rate_at_which_an_engine_just_keeps_up() -> None:
    fleet = Fleet(ENGINE, TIMES)
    most = capacity(SPEC, fleet)

    def wait(share: float) -> float:
        return fleet.serve(generate(replace(SPEC, rate=share * most, num_requests=300))).requests[-1].ttft

    assert wait(0.8) < 5 < wait(1.3)
