"""KV blocks as files: what was written comes back bit for bit, or not at all."""

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.core.block_keys import child_key, root_key, state_key, tenant_digest
from quire.core.plan import Fetch, StepPlan
from quire.runtime import disk_space, disk_tier
from quire.runtime.disk_tier import DiskTier
from quire.runtime.kv_files import HEADER_BYTES, BlockFormat, block_path, describe, is_whole
from trials import LENGTH

FORMAT = BlockFormat("f00d", "float16", 16, "native", 1000)
NUM_HOST = 8
TIMEOUT = 60.0


def keys(count: int, tenant: str = "") -> list[bytes]:
    chain = [root_key(tenant, "", "")]
    for token in range(count):
        chain.append(child_key(chain[-1], (token,) * 16))
    return chain[1:]


class Driven:
    """A disk tier with host blocks of random bytes."""

    def __init__(self, root: Path, format: BlockFormat = FORMAT, max_bytes: int = 10**9) -> None:
        self.host = np.random.default_rng(0).integers(0, 256, (NUM_HOST, format.nbytes), dtype=np.uint8)
        self.folder = str(root / format.fingerprint)
        self.tier = DiskTier(root, format, max_bytes, lambda block: [self.host[block][:300], self.host[block][300:]])
        self.fetch_ids = itertools.count()

    def done(self, count: int) -> list[tuple[int, int] | int]:
        ended: list[tuple[int, int] | int] = []
        end = time.monotonic() + TIMEOUT
        while len(ended) < count and time.monotonic() < end:
            self.tier.wait(0.1)
            ended += self.tier.take_done()
        assert len(ended) == count
        return ended

    def save(self, *blocks: tuple[int, bytes]) -> None:
        self.tier.begin(StepPlan(0, [], saves=list(blocks)), lambda: None)
        assert self.done(len(blocks)) == [host for host, _ in blocks]

    def fetch(self, *blocks: tuple[bytes, int]) -> int:
        """How many leading blocks come."""
        fetch = Fetch(next(self.fetch_ids), list(blocks))
        self.tier.begin(StepPlan(0, [], fetches=[fetch]), lambda: None)
        [ended] = self.done(1)
        assert isinstance(ended, tuple) and ended[0] == fetch.id
        return ended[1]

    def path(self, key: bytes) -> Path:
        return Path(block_path(self.folder, key))


@contextmanager
def driven(root: Path, format: BlockFormat = FORMAT, max_bytes: int = 10**9) -> Iterator[Driven]:
    one = Driven(root, format, max_bytes)
    try:
        yield one
    finally:
        one.tier.stop()


def test_blocks_come_back_bit_for_bit_also_to_another_engine(tmp_path: Path) -> None:
    first, second, third = keys(3)
    with driven(tmp_path) as one, driven(tmp_path) as other:
        one.save((0, first), (1, second))
        assert other.tier.find([first, second, third]) == [first, second]
        other.host[:] = 0
        assert other.fetch((first, 5), (second, 2), (third, 3)) == 2
        assert (other.host[[5, 2]] == one.host[[0, 1]]).all() and not other.host[[0, 1, 4, 6, 7]].any()
        assert (one.tier.stats().written_bytes, other.tier.stats().read_bytes) == (2000, 2000)
        one.save((3, first))  # it is there already
        assert one.tier.stats().written_bytes == 2000
        assert describe(one.path(first))["block_size"] == 16 and is_whole(one.path(first))


def test_a_missing_block_ends_a_fetch_before_it(tmp_path: Path) -> None:
    chain = keys(4)
    with driven(tmp_path) as one:
        one.save(*enumerate(chain))
        one.path(chain[1]).unlink()
        assert one.tier.find(chain) == chain[:1]
        assert one.fetch(*((key, 4 + i) for i, key in enumerate(chain))) == 1


@pytest.mark.trial
def test_damaged_files_are_never_served(tmp_path: Path) -> None:
    """Cut, lengthened, with a bit flipped or a byte range from elsewhere, each at a random place."""
    rng, [key] = random.Random(7), keys(1)
    with driven(tmp_path) as one:
        one.save((0, key))
        content = one.path(key).read_bytes()
        for number in range(30 if LENGTH == 1 else 1000):
            damaged, place = bytearray(content), rng.randrange(len(content))
            match number % 4:
                case 0 | 1:
                    damaged[place] ^= 1 << rng.randrange(8)
                case 2:
                    del damaged[place:]
                case 3:
                    damaged += bytes(rng.randrange(1, 50))
            one.path(key).write_bytes(damaged)
            assert not is_whole(one.path(key))
            assert one.fetch((key, 1)) == 0, f"{number} is served"
            assert not one.path(key).exists(), "it is kept"
        assert one.tier.stats().errors == number + 1
        one.path(key).write_bytes(content)
        assert one.fetch((key, 1)) == 1 and (one.host[1] == one.host[0]).all()


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"block_size": 8}, {"layout": "torch"}])
def test_a_block_of_another_format_or_key_is_not_served(tmp_path: Path, change: dict) -> None:
    first, second = keys(2)
    with driven(tmp_path) as one, driven(tmp_path, replace(FORMAT, **change)) as other:
        one.save((0, first))
        one.path(second).parent.mkdir(exist_ok=True)
        one.path(second).write_bytes(one.path(first).read_bytes())
        assert one.fetch((second, 1)) == 0 and other.fetch((first, 1)) == 0


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    chain = keys(16)
    size = FORMAT.nbytes + HEADER_BYTES
    with driven(tmp_path, max_bytes=8 * size) as one:
        for i, key in enumerate(chain[:8]):
            one.save((0, key))
            os.utime(one.path(key), ns=(i, i))  # long ago, one after the other
        assert one.fetch((chain[0], 1)) == 1  # now it is the most recently used one
        one.save((0, chain[8]))
        assert not one.path(chain[1]).exists() and one.path(chain[0]).exists() and one.path(chain[8]).exists()
        for key in chain:
            one.save((0, key))
        files = list(tmp_path.rglob("*.kv"))
        assert len(files) <= 8 and one.tier.stats().stored_bytes == 1000 * len(files)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_removed_is_older_than_what_stays(tmp_path: Path, seed: int) -> None:
    """Whether files were used within one minute or over days, and also those of other models."""
    rng = random.Random(seed)
    moments: dict[Path, int] = {}
    for number in range(60):
        path = tmp_path / rng.choice(["f00d", "beef"]) / "0" / "00" / f"{number}.kv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(HEADER_BYTES + rng.randrange(1, 3000)))
        moments[path] = 10**18 + rng.randrange(10 ** rng.choice([10, 12, 14]))
        os.utime(path, ns=(moments[path], moments[path]))
    sizes = {path: path.stat().st_size for path in moments}
    limit = int(sum(sizes.values()) * rng.choice([0.1, 0.5, 0.9, 1.0]))
    space = disk_space.DiskSpace(tmp_path, str(tmp_path / "f00d"), limit)
    space.sweep()
    kept = [path for path in moments if path.exists()]
    removed = [path for path in moments if not path.exists()]
    assert bool(removed) == (sum(sizes.values()) > limit)
    assert max(map(moments.get, removed), default=0) <= min(map(moments.get, kept), default=10**19)
    num_bytes = sum(sizes[path] for path in kept)
    newest = max(removed, key=moments.get, default=None)
    assert not removed or num_bytes <= limit * disk_space.KEPT < num_bytes + sizes[newest], "too many, or too few"
    assert space.own_bytes == sum(sizes[path] - HEADER_BYTES for path in kept if "f00d" in str(path))


def test_what_is_used_in_the_pool_is_not_the_oldest_on_disk(tmp_path: Path) -> None:
    chain = keys(3)
    with driven(tmp_path, replace(FORMAT, state_nbytes=500)) as one:
        one.save(*enumerate(chain))
        state = Path(block_path(one.folder, state_key(chain[2])))
        state.write_bytes(b"a state")
        for path in (*map(one.path, chain), state):
            os.utime(path, (1, 1))
        one.tier.touch([chain[0], keys(9)[8], chain[2]])  # one is gone
        one.save((0, keys(4)[3]))  # written after they are touched
        moments = [one.path(key).stat().st_mtime_ns for key in chain]
        assert moments[0] >= moments[2] > moments[1] == 10**9, "the beginning is to go last"
        assert state.stat().st_mtime_ns >= moments[2]


def test_a_tenant_is_forgotten_alone(tmp_path: Path) -> None:
    [mine], [theirs] = keys(1, "me"), keys(1, "them")
    with driven(tmp_path) as one:
        one.save((0, mine), (1, theirs))
        one.tier.clear(tenant_digest("me"))
        assert one.tier.find([mine]) == [], "it is found after it was forgotten"
        one.save((0, theirs))  # written after it is cleared
        assert not one.path(mine).exists() and one.path(theirs).exists()
        one.save((0, mine))
        assert one.tier.find([mine]) == [mine]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_left_alone_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first, second, third = keys(3)
    with driven(tmp_path) as one:
        one.save((0, first))
        writev = os.writev
        monkeypatch.setattr(os, "writev", lambda file, parts: (_ for _ in ()).throw(OSError(number, "no")))
        one.save((1, second), (2, third))  # all are reported, so that their host blocks are free again
        assert one.tier.stats().errors == 1, "it is tried for every block"
        assert one.tier.stats().skipped_blocks == 1
        monkeypatch.setattr(os, "writev", writev)
        one.tier._retry_at = 0.0
        one.save((1, second))
        assert one.tier.find([first, second]) == [first, second] or number == errno.ENOSPC
        assert not list(Path(one.folder, "tmp").iterdir())


def test_a_write_that_ends_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [key] = keys(1)
    with driven(tmp_path) as one:
        monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, bytes(parts[0])))
        one.save((0, key))
        assert one.tier.stats().errors == 1 and not list(tmp_path.rglob("*.kv"))
    assert "No space left on device: 512 of 1512 bytes were written. Prompts are computed instead" in caplog.text


def test_reading_that_fails_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [key] = keys(1)
    with driven(tmp_path) as one:
        one.save((0, key))

        def fails(*args: object) -> int:
            raise OSError(errno.EIO, "no")

        monkeypatch.setattr(os, "preadv", fails)
        assert one.fetch((key, 1)) == 0 and one.tier.stats().errors == 1
        assert one.tier.find([key]) == [], "every prompt waits for a disk that fails"
        monkeypatch.undo()
        one.tier._find_at = 0.0
        assert one.tier.find([key]) == [key] and one.fetch((key, 1)) == 1


def test_a_file_of_another_user_is_told_of_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [key] = keys(1)
    with driven(tmp_path) as one:
        one.save((0, key))

        def refused(path: str, flags: int, *mode: int) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", path)

        monkeypatch.setattr(os, "open", refused)
        assert one.fetch((key, 1)) == 0 == one.fetch((key, 2))
        monkeypatch.undo()
        assert one.tier.stats().errors == 2
        assert one.tier.find([key]) == [key], "other files can be read"
    assert [record.getMessage().count("Permission denied") for record in caplog.records] == [1], "it is told once"


def test_a_limit_that_the_disk_has_no_room_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with driven(tmp_path, max_bytes=2**60) as one:
        one.save((0, keys(1)[0]))
    assert "kv_disk_size is 1.07e+09 GiB, and the disk of" in caplog.text and "has room for" in caplog.text
    caplog.clear()
    with driven(tmp_path, max_bytes=2**20) as one:
        one.save((0, keys(1)[0]))
    assert caplog.text == ""


def test_a_slow_disk_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = keys(4)
    with driven(tmp_path) as one:
        one.save(*enumerate(chain))
        assert one.tier.read_seconds(4) < 0.001
        read_block, go = disk_tier.read_block, threading.Event()
        monkeypatch.setattr(disk_tier, "read_block", lambda *args: go.wait(TIMEOUT) and read_block(*args))
        fetch = Fetch(0, [(key, 4 + i) for i, key in enumerate(chain)])
        one.tier.begin(StepPlan(0, [], fetches=[fetch]), lambda: None)
        time.sleep(0.1)
        assert one.tier.read_seconds(1) >= 0.03, "what waits since then is not counted"
        go.set()
        assert one.done(1) == [(0, 4)]
        assert one.tier.read_seconds(4) >= 0.03
        one.tier._measured -= disk_tier.FORGET_SECONDS
        assert one.tier.read_seconds(4) < 0.001, "it is never tried again"


def test_slow_lookups_take_a_bounded_share_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with driven(tmp_path) as one:
        monkeypatch.setattr(
            os.path, "exists", lambda path: calls.append(path) or time.sleep(disk_tier.FIND_SECONDS) or True
        )
        assert len(one.tier.find(keys(8))) == 1
        assert one.tier.find(keys(8)) == [] and len(calls) == 1


def test_stale_temporary_files_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / FORMAT.fingerprint / "tmp"
    folder.mkdir(parents=True)
    (folder / "1-1").write_bytes(b"half")
    (folder / "1-2").write_bytes(b"half")
    os.utime(folder / "1-1", (1, time.time() - disk_space.STALE_SECONDS - 1))
    with driven(tmp_path) as one:
        one.save((0, keys(1)[0]))
        assert [file.name for file in folder.iterdir()] == ["1-2"]


def test_two_engines_write_and_read_one_directory_at_once(tmp_path: Path) -> None:
    chain = keys(40)
    with driven(tmp_path) as one, driven(tmp_path) as other:
        for step in range(0, 40, 4):
            for each in (one, other):
                each.tier.begin(StepPlan(0, [], saves=list(enumerate(chain[step : step + 4]))), lambda: None)
        one.done(40), other.done(40)
        assert other.tier.find(chain) == chain
        for step in range(0, 40, 4):
            assert other.fetch(*((key, 4 + i) for i, key in enumerate(chain[step : step + 4]))) == 4
            assert (other.host[4:] == one.host[:4]).all()


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from runtime.test_disk_tier import Driven, keys, FORMAT
from dataclasses import replace
one = Driven(Path(sys.argv[3]), replace(FORMAT, nbytes=300_000))
chain = keys(100_000)
print("ready", flush=True)
for number, key in enumerate(chain):
    one.save((number % 8, key))
"""


@pytest.mark.trial
def test_a_writer_that_is_killed_leaves_only_whole_blocks(tmp_path: Path) -> None:
    src = str(Path(disk_tier.__file__).parents[2])
    for round in range(1 if LENGTH == 1 else 20):
        root = tmp_path / str(round)
        command = [sys.executable, "-c", WRITER, src, str(Path(__file__).parents[1]), str(root)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        end = time.monotonic() + TIMEOUT
        while len(list(root.rglob("*.kv"))) < 3 + round and time.monotonic() < end:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        files = list(root.rglob("*.kv"))
        assert len(files) >= 3 and all(is_whole(file) for file in files)
