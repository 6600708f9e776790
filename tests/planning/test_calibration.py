"""What is measured of a model is kept by model, machine and options, and found again."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quire.cli.calibrate import as_flags
from quire.cli.flags import read_flags
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.planning.calibrate import (
    ROUNDS,
    FirstToken,
    Round,
    arrival_seconds,
    gapless,
    mean_steps,
    of_known_times,
    rounds_that_fit,
    serving_costs,
    undisturbed,
    without_arrivals,
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
from quire.planning.step_log import LoggedStep, read_steps
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


def test_a_step_of_a_gpu_that_samples_nothing_is_left_out_with_the_one_that_has_its_time() -> None:
    steps = [logged(0.0, 1), logged(0.01, 0, num_chunks=1), logged(0.02, 2), logged(0.03, 3)]
    assert of_known_times(steps) == [steps[0], steps[3]]


def test_steps_tell_what_a_request_takes_that_comes_while_they_run() -> None:
    """On a CPU requests are taken when the step has ended in which they were read; on a GPU while one runs."""
    usual = TIMES.seconds(work := StepWork(1, 1, 100, 100))
    arrival = usual / 20
    news = (0, 0, 2, 0, 4, 0)
    for on_gpu, came in ((False, (0, 2, 0, 4, 0, 0)), (True, news)):
        alone = [LoggedStep(work, float(number), usual, num_new=num) for number, num in enumerate(news)]
        steps = [replace(step, seconds=usual + num * arrival) for step, num in zip(alone, came, strict=True)]
        assert undisturbed(steps, on_gpu) == [step for step, num in zip(alone, came, strict=True) if not num]
        assert arrival_seconds(steps, TIMES, on_gpu) == pytest.approx(arrival)
    less = without_arrivals(steps, arrival)
    assert [step.num_new for step in less] == [0, 0, 2, 0, 0], "four requests took too much of a step"
    assert [step.seconds for step in less] == pytest.approx([usual] * 5)
    assert arrival_seconds(steps[:2], TIMES, on_gpu=True) == 0.0


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


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = [logged(1.5, 3), replace(logged(2.5, 4, goes_on=False, num_chunks=1), num_new=2)]
    (tmp_path / "steps").write_bytes(b"".join(step.packed() for step in steps) + b"cut off")
    assert read_steps(tmp_path / "steps") == steps and read_steps(tmp_path / "steps", 2.0) == steps[1:]


def test_options_become_the_flags_of_a_server() -> None:
    options = EngineOptions(threads=1, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 20, device="cpu")
    assert read_flags(EngineOptions, make_parser().parse(as_flags(options))) == options
