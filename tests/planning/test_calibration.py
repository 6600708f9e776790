"""What is measured of a model is kept by model, machine and options, and found again."""

import json
from dataclasses import asdict, astuple, replace
from math import exp
from pathlib import Path
from random import Random

import pytest

from quire.cli.calibrate import as_flags
from quire.cli.flags import read_flags
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.planning.calibrate import (
    ROUNDS,
    FirstToken,
    Ramp,
    Round,
    ServedRound,
    arrival_seconds,
    device_steps,
    gapless,
    loop_costs,
    mean_steps,
    ramp_that_fits,
    rounds_that_fit,
    server_costs,
    serving_costs,
    undisturbed,
    with_recent,
)
from quire.planning.calibration import (
    OPTIONS,
    Calibration,
    calibration_key,
    find,
    fingerprint,
    keep,
    machine_name,
)
from quire.planning.fitted_times import Curve, FittedTimes
from quire.planning.step_fit import FitQuality, MeasuredStep, fit
from quire.planning.step_log import LoggedStep, Told, read_steps, read_told
from quire.planning.step_times import ServingCosts, StepWork

TIMES = FittedTimes(
    Curve((0.0, 256.0), (0.004, 0.1)), Curve((0.0, 512.0), (0.005, 0.3)), Curve((0.0, 1.0), (1e-8, 1e-8)),
    1e-8, 1e-9, 1e-5,
)  # fmt: skip


def calibration_of(path: Path, **options: object) -> Calibration:
    key = calibration_key(path, {**asdict(EngineOptions()), **options})
    return Calibration(key, TIMES, ServingCosts(0.001, 0.0001, 0.004), FitQuality(0.01, 0.05, 60))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_a_calibration_is_found_again_for_the_same_model_and_options(tmp_path: Path, model: Path) -> None:
    kept = calibration_of(model)
    keep(tmp_path / "kept", kept)
    assert find(tmp_path / "kept", kept.about) == kept
    assert find(tmp_path / "kept", calibration_of(model, threads=1).about) is None
    model.write_bytes(b"other weights")
    assert find(tmp_path / "kept", calibration_of(model).about) is None


def test_a_calibration_is_fitted_again_to_the_steps_that_were_kept_with_it(tmp_path: Path, model: Path) -> None:
    steps = (MeasuredStep(StepWork(1, 1, 20, 20), 0.01, 9), MeasuredStep(StepWork(8, 8, 160, 160), 0.02, 5))
    keep(tmp_path, kept := replace(calibration_of(model), steps=steps))
    again = find(tmp_path, kept.about)
    assert again == kept and again.refitted().times == fit(steps) != TIMES
    assert calibration_of(model).refitted().times == TIMES


def test_an_earlier_file_has_no_time_of_a_request_that_comes_while_a_step_runs(tmp_path: Path, model: Path) -> None:
    path = keep(tmp_path, kept := calibration_of(model))
    values = json.loads(path.read_text())
    del values["costs"]["arrival"]
    path.write_text(json.dumps(values))
    found = find(tmp_path, kept.about)
    assert found is not None and found.costs.arrival == kept.costs.request / 2


def test_a_file_that_cannot_be_read_is_measured_again(tmp_path: Path, model: Path) -> None:
    kept = calibration_of(model)
    path = keep(tmp_path, kept)
    for text in ("", "[]", '{"version": 0}', path.read_text().replace('"version": 1', '"version": 2')):
        path.write_text(text)
        assert find(tmp_path, kept.about) is None


def test_the_key_has_options_of_the_engine() -> None:
    assert set(OPTIONS) <= set(EngineOptions.__dataclass_fields__)
    assert "CPU" in machine_name()


def test_a_directory_has_the_fingerprint_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert fingerprint(tmp_path) != before


def logged(begin: float, num_rows: int, goes_on: bool = True, num_chunks: int = 0) -> LoggedStep:
    return LoggedStep(StepWork(num_rows, num_rows, 100, 100, num_chunks), begin, 0.01, goes_on)


def test_what_serving_adds_to_steps_is_what_passes_between_them() -> None:
    steps, now = [], 0.0
    for num_rows in (1, 1, 1, 8, 8, 8, 32, 32, 32):
        steps.append(logged(now, num_rows))
        now = steps[-1].ended + 0.0005 + 0.0001 * num_rows
    steps.append(logged(now, 32, goes_on=False))
    steps.append(logged(now + 0.05, 1))  # the engine was idle until then
    first = FirstToken(sent=now + 0.05 - 0.002, seen=now + 0.05 + 0.01 + 0.001)
    costs = serving_costs(steps, [first, FirstToken(-2.0, -1.0)])
    assert (costs.step, costs.row, costs.request) == pytest.approx((0.0005, 0.0001, 0.003), rel=1e-3)
    assert serving_costs([], []) == ServingCosts()


def test_a_step_of_a_gpu_lasts_from_the_end_of_the_one_before() -> None:
    steps = [logged(0.0, 1), logged(0.012, 1), logged(0.022, 1, goes_on=False), logged(0.05, 1)]
    assert [step.seconds for step in gapless(steps)] == pytest.approx([0.01, 0.012, 0.01, 0.01])


def test_a_gpu_s_steps_take_what_the_device_worked_on_them() -> None:
    """A loop that takes longer tells nothing of the device, nor does a step whose end nobody waited for."""
    steps = [replace(logged(0.01 * n, 4), on_device=seconds) for n, seconds in enumerate((0.004, 0.006, 0.0))]
    ((work, seconds, count),) = map(astuple, device_steps([*steps, logged(0.03, 64)], graphs=True))
    assert (work[0], seconds, count) == (4, pytest.approx(0.005), 2)


def test_a_turn_of_a_gpu_s_loop_is_divided_among_what_it_does() -> None:
    rng = Random(0)
    steps = [
        LoggedStep(StepWork(8, rng.randint(1, 64), num_chunks=rng.randint(0, 1)), 0.0, 0.0, True, *news, 0.0)
        for news in ([rng.randint(0, 2) for _ in range(3)] for _ in range(200))
    ]
    timed = [steps[0]]
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        requests = 0.0001 * step.num_new + 0.0002 * after.num_admitted + 0.0003 * before.num_ended
        loop = 0.0005 + 1e-5 * step.work.num_rows + 0.0004 * (after.work.num_chunks > 0) + requests
        timed.append(replace(step, seconds=loop + 0.002, waited=0.002))
    costs = loop_costs(timed)
    assert (costs.step, costs.row, costs.prompts) == pytest.approx((0.0005, 1e-5, 0.0004), rel=0.05)
    assert costs.arrival == pytest.approx(0.0006, rel=0.05)
    assert loop_costs([]) == ServingCosts()


def test_what_a_server_takes_is_told_by_its_messages_and_its_cpu() -> None:
    """Streams of messages that were there together are written once."""
    served, told = [], []
    for number in range(20):
        began, num_requests, num_prompt = 0.5 * number, 1 + number % 3, 64 + 500 * (number % 7)
        own = []
        for each in range(5 + 3 * (number % 4)):
            num_messages, num_streams = 1 + each % 3, 4 << number % 5
            num_tokens = num_messages * num_streams
            seconds = 5e-5 * num_messages + 4e-6 * num_tokens + 9e-6 * num_streams
            own.append(Told(began + 0.01 * each, seconds, num_messages, num_tokens, num_streams))
        rest = 0.001 * num_requests + 1e-6 * num_prompt + 1e-5 * sum(one.num_messages for one in own)
        cpu_seconds = rest + sum(one.seconds for one in own)
        served.append(ServedRound(began, began + 0.4, cpu_seconds, num_requests, num_prompt, 9))
        told += own
    costs = server_costs(told, served)
    assert (costs.message, costs.stream, costs.write) == pytest.approx((6e-5, 4e-6, 9e-6), rel=1e-3)
    assert (costs.taken, costs.prompt_token) == pytest.approx((0.001, 1e-6), rel=1e-3)
    unknown = [replace(each, cpu_seconds=0.0) for each in served]
    assert server_costs(told, unknown) == server_costs([], served) == ServingCosts()


def test_a_step_tells_what_was_computed_just_before_it() -> None:
    steps = [replace(logged(0.01 * number, 500), seconds=0.01) for number in range(60)]
    recent = [step.work.recent for step in with_recent([*steps, logged(0.7, 1), logged(9.0, 1)])]
    assert recent[0] == 0 and recent[:60] == sorted(recent[:60])
    assert recent[59] == pytest.approx(50_000, rel=0.01)
    assert recent[60] == pytest.approx(50_000 * exp(-1), rel=0.01) and recent[61] == 0


def test_steps_tell_what_a_request_takes_that_comes_while_they_run() -> None:
    """A CPU's engine takes it when the step has ended in which it was read."""
    usual = TIMES.seconds(work := StepWork(1, 1, 100, 100))
    arrival = usual / 20
    alone = [LoggedStep(work, float(number), usual, num_new=num) for number, num in enumerate((0, 0, 2, 0, 4, 0))]
    came = (0, 2, 0, 4, 0, 0)
    steps = [replace(step, seconds=usual + num * arrival) for step, num in zip(alone, came, strict=True)]
    assert undisturbed(steps) == [step for step, num in zip(alone, came, strict=True) if not num]
    assert arrival_seconds(steps, TIMES) == pytest.approx(arrival)
    assert arrival_seconds(steps[:1], TIMES) == 0.0


def test_steps_that_are_padded_to_one_graph_are_alike() -> None:
    assert [mean.count for mean in mean_steps([logged(0.0, 9), logged(0.0, 16), logged(0.0, 17)], graphs=True)] == [
        2,
        1,
    ]


def test_the_streams_of_a_round_end_one_after_the_other() -> None:
    assert Round(1, 16, 17).outputs() == [17]
    assert Round(5, 16, 20).outputs() == [10, 15, 20, 25, 30]


def test_steps_that_are_alike_are_one_with_their_mean() -> None:
    slow = [replace(logged(0.0, 4), seconds=seconds) for seconds in (0.010, 0.011, 0.012, 9.0)]
    means = mean_steps([*slow, logged(0.0, 4, num_chunks=1), logged(0.0, 8)])
    assert [mean.count for mean in means] == [4, 1, 1]
    assert means[0].work == slow[0].work
    assert means[0].seconds == pytest.approx((0.010 + 0.011 + 0.012 + 3 * 0.0115) / 4), "one was in the way of others"


def test_rounds_are_within_the_context_and_the_sequences() -> None:
    assert rounds_that_fit(8192, 256) == list(ROUNDS)
    small = rounds_that_fit(128, 16)
    assert small and all(each.prompt + each.output <= 128 and each.num_streams <= 16 for each in small)


@pytest.mark.parametrize("most", [64, 300, 131072])
def test_a_ramp_is_within_the_context_and_the_sequences(most: int) -> None:
    ramp, rng = ramp_that_fits(most, 16), Random(1)
    drawn = [ramp.draw(rng) for _ in range(500)]
    assert all(prefix + prompt + output <= most for prefix, prompt, output in drawn)
    assert all(prompt > 0 and output > 0 for _, prompt, output in drawn)
    prefixes = {prefix for prefix, _, _ in drawn}
    assert len(prefixes) > 50 if most > 2048 else prefixes == {0}
    begins = ramp.begins()
    assert len(begins) == 16 and begins[0] == 0 and begins == sorted(begins) and begins[-1] < 0.85
    assert Ramp(1, (1, 1), (1, 1)).begins() == [0]


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = [logged(1.5, 3), replace(logged(2.5, 4, goes_on=False, num_chunks=1), num_new=2, num_ended=1, waited=0.5)]
    (tmp_path / "steps").write_bytes(b"".join(step.packed() for step in steps) + b"cut off")
    assert read_steps(tmp_path / "steps") == steps and read_steps(tmp_path / "steps", 2.0) == steps[1:]


def test_what_a_server_did_is_read_as_it_was_written(tmp_path: Path) -> None:
    told = [Told(1.5, 0.001, 2, 10, 5), Told(2.5, 0.002, 1, 7, 7)]
    (tmp_path / "steps.server").write_bytes(b"".join(each.packed() for each in told) + b"cut off")
    assert read_told(tmp_path / "steps") == told and read_told(tmp_path / "steps", 2.0) == told[1:]


def test_options_become_the_flags_of_a_server() -> None:
    options = EngineOptions(threads=1, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 20, device="cpu")
    assert read_flags(EngineOptions, make_parser().parse(as_flags(options))) == options
