"""What is measured of a model is kept by model, machine and options, and found again."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quire.cli.calibrate import as_flags
from quire.cli.flags import read_flags
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.planning.calibration import (
    OPTIONS,
    Burst,
    Calibration,
    as_served,
    calibration_key,
    find,
    fingerprint,
    fit_costs,
    keep,
    machine_name,
)
from quire.planning.fitted_times import Curve, FitQuality, FittedTimes
from quire.planning.step_times import ServingCosts, StepWork

TIMES = FittedTimes(Curve((0.0, 256.0), (0.004, 0.1)), Curve((0.0, 512.0), (0.005, 0.3)), 1e-8, 1e-9, 1e-5)


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


def seen(num_streams: int, step: float, row: float, request: float) -> Burst:
    """What clients would see of a burst."""
    read = num_streams * (16 + 16)
    tpot = TIMES.seconds(StepWork(num_streams, num_streams, read, read)) + step + row * num_streams
    ttft = TIMES.seconds(StepWork(16, 1, 16, 136, 1)) + request + row
    return Burst(num_streams, 16, 32, ttft, tpot)


def test_what_serving_adds_to_steps_is_found() -> None:
    costs = fit_costs([seen(count, 0.0005, 0.0001, 0.003) for count in (1, 8, 32)], TIMES, on_gpu=False)
    assert (costs.step, costs.row, costs.request) == pytest.approx((0.0005, 0.0001, 0.003), rel=1e-6)


def test_steps_that_seem_faster_with_a_server_cost_nothing() -> None:
    costs = fit_costs([seen(count, -0.002, 0.0, -0.1) for count in (1, 8, 32)], TIMES, on_gpu=False)
    assert (costs.step, costs.row, costs.request) == (0, 0, 0)


def test_steps_beside_a_server_have_its_times() -> None:
    work = StepWork(8, 8, 256, 256)
    slow = [replace(seen(count, 0, 0, 0), step=1.25 * TIMES.seconds(StepWork(count, count, 32 * count, 32 * count)))
            for count in (1, 8, 32)]  # fmt: skip
    short = Burst(1, 16, 2, 0.1, 0.1, step=1.0)  # of which nothing is learnt
    assert as_served(TIMES, [*slow, short]).seconds(work) == pytest.approx(1.25 * TIMES.seconds(work))
    assert as_served(TIMES, [short]) == TIMES


def test_on_a_gpu_the_loop_is_seen_where_it_is_slower_than_steps() -> None:
    def burst(count: int, tpot: float) -> Burst:
        return Burst(count, 16, 32, 0.1, tpot)

    device = TIMES.seconds(StepWork(8, 8, 256, 256))
    bursts = [burst(1, 0.02 + 0.0001), burst(32, 0.02 + 0.0032), burst(8, device)]
    costs = fit_costs(bursts, TIMES, on_gpu=True)
    assert (costs.step, costs.row) == pytest.approx((0.02, 0.0001), rel=1e-3)


def test_options_become_the_flags_of_a_server() -> None:
    options = EngineOptions(threads=1, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 20, device="cpu")
    assert read_flags(EngineOptions, make_parser().parse(as_flags(options))) == options
