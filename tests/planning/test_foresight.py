"""Predictions of recorded runs do not get worse.

A record is made by `python -m benchmarks.foresight --workload busy conversations --record
tests/planning/data/foresight-cpu.json` on an idle machine. One that has the steps of its calibrations, as
foresight-cpu-fit.json and foresight-gpu.json (an H200, three workloads), is fitted again as well."""

from pathlib import Path

import pytest
from benchmarks.foresight_record import AIMS, Record

DATA = Path(__file__).parent / "data"
RECORDS = sorted(DATA.glob("foresight-*.json"))
MAX_WORSE = 0.05  # of what was measured


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_runs_are_predicted_as_well_as_ever(path: Path) -> None:
    worse = [
        f"{workload}: {name} is {now[name]:+.1%} off, and was {kept[name]:+.1%} off"
        for workload, kept, now in Record.read(path).replay()
        for name in AIMS
        if abs(now[name]) > abs(kept[name]) + MAX_WORSE
    ]
    assert not worse, "\n".join(worse)


def test_there_are_records_and_they_are_small() -> None:
    assert RECORDS
    assert all(path.stat().st_size < 200_000 for path in RECORDS)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record.read(RECORDS[0])
    record.write(tmp_path / "again.json")
    assert Record.read(tmp_path / "again.json") == record
