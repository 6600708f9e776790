"""Files of an output whose bytes come a piece at a time, from several threads."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quire.quantize import output
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU, Item
from quire.quantize.gptq import GPTQOptions
from quire.quantize.output import OutputError, PartialOutput
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun
from quire.quantize.safetensors_files import planned, safetensors_layouts
from quire.quantize.writeback import Writeback

SIZES = {"a": 95, "b": 40, "c": 7, "d": 0}
DATA = {name: np.random.default_rng(3).integers(0, 256, size, np.uint8) for name, size in SIZES.items()}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CHUNK_BYTES", 10)
    monkeypatch.setattr(output, "WRITEBACK_BYTES", 6)


def output_in(folder: Path) -> PartialOutput:
    layouts, index = safetensors_layouts([planned(name, "U8", size) for name, size in SIZES.items()], 100)
    assert len(layouts) == 2
    return PartialOutput(folder / "out", layouts, index)


def pieces_of(name: str, size: int) -> Callable[[], Iterator[tuple[str, int, bytes]]]:
    data = DATA[name].tobytes()
    return lambda: ((name, first, data[first : first + size]) for first in range(0, max(len(data), 1), size))


def test_tensors_that_are_written_in_pieces_and_chunks_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(Writeback, "begin", lambda self, file, offset, count: begun.append((offset, count)))
    written = output_in(tmp_path)
    assert written.begin({}) == set()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: written.write(pieces_of(name, 35)), SIZES))
    written.close()
    again = output_in(tmp_path)
    assert again.begin({}) == SIZES.keys()  # by the checksums of what is in the files
    again.finish()
    layouts, _ = safetensors_layouts([planned(name, "U8", size) for name, size in SIZES.items()], 100)
    for layout in layouts:
        data = (tmp_path / "out" / layout.name).read_bytes()
        assert len(data) == layout.size and data.startswith(layout.header)
        for name, (offset, size) in layout.places.items():
            assert data[offset : offset + size] == DATA[name].tobytes(), name
    assert sorted(count for _, count in begun) == [7] + 11 * [10]  # chunks of fewer than 6 bytes are left to fsync


@pytest.mark.skipif(Writeback()._start is None, reason="this system has no sync_file_range")
def test_the_system_is_asked_to_write_each_range_and_then_the_thread_ends(tmp_path: Path) -> None:
    writeback, asked, gate = Writeback(), [], threading.Event()
    start = writeback._start

    def asking(*range_of: int) -> None:
        gate.wait(10)
        asked.append((range_of[1:], start(*range_of)))

    writeback._start = asking
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(100))
        file.flush()
        writeback.begin(file.fileno(), 0, 60)
        writeback.begin(file.fileno(), 60, 40)
        gate.set()
        while len(asked) < 2:
            threading.Event().wait(0.01)
        writeback.close()
    assert asked == [((0, 60, 2), 0), ((60, 40, 2), 0)]
    assert not any(thread.name.startswith("writeback") for thread in threading.enumerate())


def test_a_disk_that_fails_at_the_end_leaves_the_output_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = output_in(tmp_path)
    written.begin({})
    for name in SIZES:
        written.write(pieces_of(name, 100))

    def failing(file: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        written.finish()
    written.close()
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").is_dir()


class Noting(CPU):
    """Notes the sizes of tasks in the order in which they begin."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def each(self, work: Callable[[Item], Item], items: Sequence[Item]) -> Iterator[Item]:
        self.sizes += [item.num_weights for item in items]  # type: ignore[attr-defined]
        return super().each(work, items)


def test_the_largest_tensors_begin_first(plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.quantize.run.LARGE_SHARE", 1 / 12)
    noting, chosen = Noting(), CalibrationOptions(measured_tokens=0)
    run = QuantizeRun(plain_llama, tmp_path / "out", QuantizeOptions("FP8_DYNAMIC"), device=noting)
    quantize(run, chosen, None, GPTQOptions(), lambda *_: None)
    limit = sum(noting.sizes) / 12
    large = [size >= limit for size in noting.sizes]
    assert large == sorted(large, reverse=True) and 0 < sum(large) < len(large)
