"""A model is calibrated through its server, and its real runs are compared with simulated ones."""

import time
from pathlib import Path

import pytest
from benchmarks.foresight_client import Client
from benchmarks.foresight_record import AIMS, Record, RecordedRun, mean_costs, mean_times, simulated_latencies

from quire.cli.calibrate import calibrate, kept_calibration, logged_server
from quire.cli.main import main
from quire.engine.options import EngineOptions
from quire.planning.fleet import SimulatedEngine
from quire.planning.step_log import read_steps, read_told
from quire.planning.workload import WorkloadSpec, generate


@pytest.fixture
def options(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineOptions:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    return EngineOptions(model=str(tiny_model), threads=1, device="cpu")


def test_a_calibration_is_used_from_then_on(options: EngineOptions, capsys: pytest.CaptureFixture[str]) -> None:
    calibration = calibrate(options, max_seconds=1.0)
    assert calibration.costs.request > 0 and calibration.quality.num_steps >= 40
    assert kept_calibration(options) == calibration
    command = ["simulate", options.model, "--threads", "1", "--device", "cpu", "--num-requests", "5", "--prompt", "20"]
    assert main([*command, "--output", "10"]) == 0
    assert f"fitted to {calibration.quality.num_steps} measured steps" in capsys.readouterr().err


def test_a_workload_is_served_as_it_is_simulated(options: EngineOptions, tmp_path: Path) -> None:
    spec = WorkloadSpec(rate=20, num_requests=12, prompt=20, output=20, turns=2, think_seconds=0.05, shared_prefix=32)
    with logged_server(options) as server:
        before = calibrate(options, 1.0, server)
        begin, sent, real = Client(server.url, 250, seed=1).run(generate(spec))
        steps, told = read_steps(server.log, begin), read_told(server.log, begin)
        served = time.perf_counter()
        after = calibrate(options, 1.0, server)
        again = [step.work for step in read_steps(server.log, served)]
    assert (64, 64 * 65 // 2) in {(work.num_tokens, work.num_pairs) for work in again}, "prompts came from the cache"
    assert real.num_output == [20] * 12 and len(sent) == 6 and sent[0] == 0 and sent == sorted(sent)
    assert all(0 < ttft <= latency < real.seconds for ttft, latency in zip(real.ttft, real.latency, strict=True))
    assert len(steps) >= 20 and 0 < sum(step.seconds for step in steps) < real.seconds
    assert sum(step.work.num_rows for step in steps) == 12 * 20, "every token is sampled in some step"
    assert sum(each.num_tokens for each in told) == 12 * 20 and sum(each.num_messages for each in told) == len(steps)
    assert all(0 < each.num_writes <= each.num_tokens and 0 < each.seconds < 1 for each in told if each.num_tokens)
    assert max(step.began + step.seconds for step in steps) < begin + real.seconds
    first = steps[0].work
    assert (first.num_tokens, first.num_read, first.num_pairs, first.num_chunks) == (52, 52, 52 * 53 // 2, 1)
    run, both = RecordedRun("turns", spec, SimulatedEngine(num_blocks=1000), sent, real), (before, after)
    simulation = run.simulate(mean_times(both), mean_costs(both))
    errors = run.errors(simulated_latencies(simulation).figures())
    assert set(errors) == set(AIMS)
    record = Record({}, {"before": before, "after": after}, [(("before", "after"), run, errors)])
    record.write(tmp_path / "record.json")
    ((_, kept, now),) = Record.read(tmp_path / "record.json").replay()
    assert now == pytest.approx(kept, rel=0.1, abs=0.01)  # a record is rounded
