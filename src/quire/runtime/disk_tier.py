"""KV blocks, and states after them, on disk: files that engines share, read and written by threads outside of steps.

The directory is its own index: a block is there if its file is. So a restarted engine and the one beside it find what
another has written, and a file is trusted only after it has been read and its header and checksum compared."""

import errno
import itertools
import logging
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from quire.core.block_keys import ABOUT_FILE, TENANT_BYTES, BlockKey, page_key, state_key
from quire.core.plan import Fetch, StepPlan
from quire.core.records import TierStats
from quire.runtime.disk_space import DiskSpace
from quire.runtime.kv_files import BlockFormat, Buffers, block_path, read_block, write_about, write_block

log = logging.getLogger("quire.engine")

FIRST_BYTES_PER_SECOND = 500e6  # of reading, until it is measured
EMA_WEIGHT = 0.3  # of one fetch in the moving average of seconds a block
FIRST_WRITE_SECONDS = 0.0004  # of a CPU, for one block, until it is measured
WRITE_EMA_WEIGHT = 0.05  # of one block in their moving average
COPY_AND_WRITE = 1.5  # times the time of writing: a block is copied before that, while no thread computes
FORGET_SECONDS = 30.0  # a slow disk is tried again after about this
FIND_SECONDS = 0.02  # a lookup that takes longer is given up, and the next comes later
FIND_SHARE = 0.02  # of the engine's time that slow lookups may take
NUM_READERS = 2  # threads that read one fetch: while a sequence waits for it, CPUs are idle
PREFETCHED_FILES = 16  # opened by each before they are read
RETRY_SECONDS = 10.0  # after the disk has failed
WRITER_NICENESS = 5  # threads that compute go first
STOP_SECONDS = 2.0  # seconds that the last writes have

Wait = Callable[[], None]  # returns when the swaps of a plan are done
_Saves = tuple[Wait, list[tuple[int, BlockKey]]]


class DiskTier:
    """Implements `BlockStore`. Host blocks are read and written where they lie: `buffers` gives their memory."""

    def __init__(
        self,
        root: Path,
        format: BlockFormat,
        max_bytes: int,
        buffers: Callable[[int], Buffers],
        shares_cpu: bool = False,
        model: str = "",
    ) -> None:
        """`shares_cpu`: the CPUs that write also compute the steps. `model`: whose blocks these are, for people."""
        self._format, self._buffers, self._shares_cpu, self._model = format, buffers, shares_cpu, model
        self._write_seconds = FIRST_WRITE_SECONDS  # of a CPU, for one block
        self._folder = str(root / format.fingerprint)
        self._root, self._max_bytes = root, max_bytes
        self._space = DiskSpace(root, self._folder, max_bytes)
        self._temporary = (f"{self._folder}/tmp/{os.getpid()}-{n}" for n in itertools.count())
        self._clearing: dict[bytes, int] = {}  # tenants whose files are not removed yet, or cannot be
        self._fetches: SimpleQueue[Fetch | None] = SimpleQueue()
        self._writes: SimpleQueue[tuple[Wait, list[tuple[int, BlockKey]]] | list[BlockKey] | bytes | None] = (
            SimpleQueue()
        )
        self._done: deque[tuple[Fetch, int] | int] = deque()  # (fetch, blocks read), or a host block that was written
        self._has_done = threading.Event()
        self._stats = TierStats()
        self._first_seconds = format.nbytes / FIRST_BYTES_PER_SECOND  # for one block
        self._seconds, self._measured = self._first_seconds, 0.0
        self._queued: dict[int, tuple[int, float]] = {}  # fetch -> its blocks, and when it began
        self._find_at = 0.0  # time.perf_counter() before which nothing is looked up
        self._retry_at = 0.0  # time.monotonic() before which nothing is written
        self._warned: set[tuple[str, int | None]] = set()
        self._stopping = False
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read_all, "kv-read"), (self._write_all, "kv-write"))
        ]
        for thread in self._threads:
            thread.start()

    # ---- asked by the scheduler

    def find(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        begin, num_blocked = time.perf_counter(), _num_blocked()
        found: list[BlockKey] = []
        if begin < self._find_at:
            return found
        for key in keys:
            if key[:TENANT_BYTES] in self._clearing or not os.path.exists(block_path(self._folder, key)):  # noqa: PTH110
                break
            found.append(key)
            if time.perf_counter() > begin + FIND_SECONDS:
                break
        seconds = time.perf_counter() - begin
        if seconds > FIND_SECONDS and _num_blocked() > num_blocked:  # else other processes had the CPU
            self._find_at = begin + seconds / FIND_SHARE
        return found

    def read_seconds(self, num_blocks: int) -> float:
        now = time.monotonic()
        queued = list(self._queued.values())
        waited = now - min((began for _, began in queued), default=now)
        forgotten = min((now - self._measured) / FORGET_SECONDS, 1.0)
        each = self._seconds + (self._first_seconds - self._seconds) * forgotten
        return max(each * (num_blocks + sum(blocks for blocks, _ in queued)), waited)

    def save_seconds(self) -> float:
        return COPY_AND_WRITE * self._write_seconds if self._shares_cpu else 0.0

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._writes.put([*reversed(keys)])  # a prefix outlives its suffix

    def clear(self, tenant: bytes) -> None:
        self._clearing[tenant] = self._clearing.get(tenant, 0) + 1
        self._writes.put(tenant)

    def stats(self) -> TierStats:
        self._stats.stored_bytes = self._space.own_bytes
        return self._stats

    # ---- told by the executor and the engine

    def begin(self, plan: StepPlan, wait: Wait) -> None:
        """Begin the saves and fetches of a plan. `wait` returns when its swaps are done."""
        for fetch in plan.fetches:
            self._queued[fetch.id] = len(fetch.blocks), time.monotonic()
            self._fetches.put(fetch)
        if plan.saves:
            self._writes.put((wait, plan.saves))

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def take_done(self) -> Iterable[tuple[int, int] | int]:
        """What has ended since: (fetch, blocks read), or a host block that is not needed any more."""
        self._has_done.clear()
        while self._done:
            done = self._done.popleft()
            if isinstance(done, int):
                yield done
            else:
                fetch, num_blocks = done
                del self._queued[fetch.id]
                yield fetch.id, num_blocks

    def wait(self, seconds: float) -> None:
        """Until `take_done` has something, or `seconds` have passed."""
        self._has_done.wait(seconds)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Write what is queued, for so long."""
        if self._stopping:
            return
        self._writes.put(None)
        self._fetches.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        self._stopping = True

    # ---- reading

    def _read_all(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            begin, num_blocks = time.perf_counter(), 0
            try:
                num_blocks = self._read(fetch)
            except OSError as error:
                self._stats.errors += 1
                self._find_at = time.perf_counter() + RETRY_SECONDS
                self._warn("read", error)
            except Exception:
                log.exception("a fetch from %s failed", self._folder)
            num_bytes = sum(self._format.payload_bytes(key) for key, _ in fetch.blocks[:num_blocks])
            if num_blocks:
                self._measure((time.perf_counter() - begin) * self._format.nbytes / num_bytes if num_bytes else 0.0)
            self._stats.read_bytes += num_bytes
            self._finish((fetch, num_blocks))

    def _measure(self, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) * (EMA_WEIGHT if self._measured else 1.0)
        self._measured = time.monotonic()

    def _read(self, fetch: Fetch) -> int:
        """-> how many of the first blocks were read, all of them whole."""
        shares = self._readers.map(self._read_share, (fetch.blocks[i::NUM_READERS] for i in range(NUM_READERS)))
        are_whole = itertools.chain.from_iterable(itertools.zip_longest(*shares, fillvalue=False))
        return sum(1 for _ in itertools.takewhile(bool, are_whole))

    def _read_share(self, blocks: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """-> whether each was read whole, up to one whose file is gone. Those behind a damaged one are looked at, too:
        a damaged file that stays would keep its block from being written again."""
        opened: deque[int] = deque()
        paths = [block_path(self._folder, key) for key, _ in blocks]
        are_whole: list[bool] = []
        try:
            for number, (key, host) in enumerate(blocks):
                opened.extend(map(self._open, paths[number + len(opened) : number + PREFETCHED_FILES]))
                file = opened.popleft()
                if file < 0:
                    break
                try:
                    are_whole.append(read_block(file, self._format.header(key), self._buffers(host)))
                finally:
                    os.close(file)
                if are_whole[-1]:
                    self._space.touch(paths[number])
                else:
                    self._discard(paths[number], self._format.payload_bytes(key))
            return are_whole
        finally:
            for file in opened:
                if file >= 0:
                    os.close(file)

    def _open(self, path: str) -> int:
        """A file that the system begins to read; -1: it is gone, or belongs to another user."""
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        except OSError as error:
            self._stats.errors += 1
            self._warn("read", error)
            return -1
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _discard(self, path: str, nbytes: int) -> None:
        """Remove a file that is not what its name says."""
        self._stats.errors += 1
        log.warning("%s is damaged, or of another format: it is removed, and computed again", path)
        self._space.remove(path, nbytes)

    # ---- writing

    def _write_all(self) -> None:
        if sys.platform == "linux":  # there, each thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        write_about(self._folder, self._model, self._format)
        self._space.sweep()
        self._check_room()
        while (task := self._writes.get()) is not None:
            if isinstance(task, bytes):
                if self._space.clear(task, next(self._temporary)):
                    self._clearing[task] -= 1
                    if not self._clearing[task]:
                        del self._clearing[task]
                continue
            if isinstance(task, list):
                for key in task:
                    self._touch(key)
                continue
            wait, saves = task
            wait()
            for host, key in saves:
                try:
                    if not self._stopping:
                        self._write(host, key)
                except Exception:
                    log.exception("a block could not be written to %s", self._folder)
                self._finish(host)

    def _touch(self, key: BlockKey) -> None:
        keys = [key]
        if self._format.state_nbytes:
            keys.append(state_key(key))
        if self._format.page_nbytes:
            keys.append(page_key(key))
        for each in keys:
            self._space.touch(block_path(self._folder, each))

    def _check_room(self) -> None:
        if (room := self._space.max_bytes) < self._max_bytes:
            log.warning(
                "kv_disk_size is %.3g GiB, and the disk of %s has room for %.3g: other programs will find it full",
                self._max_bytes / 2**30,
                self._root,
                room / 2**30,
            )

    def _write(self, host: int, key: BlockKey) -> None:
        if time.monotonic() < self._retry_at:
            self._stats.skipped_blocks += 1
            return
        begin, path = time.thread_time(), block_path(self._folder, key)
        if self._space.touch(path):
            return
        try:
            nbytes = self._format.payload_bytes(key)
            self._space.make_room(nbytes)
            if not os.path.exists(f"{self._folder}/{ABOUT_FILE}"):  # noqa: PTH110 (`quire cache clear` has removed it)
                write_about(self._folder, self._model, self._format)
            write_block(path, next(self._temporary), self._format.header(key), self._buffers(host))
        except OSError as error:
            self._stats.errors += 1
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._space.shrink()
            self._warn("written", error)
            return
        if nbytes == self._format.nbytes:
            self._write_seconds += (time.thread_time() - begin - self._write_seconds) * WRITE_EMA_WEIGHT
        self._space.added(nbytes)
        self._stats.written_bytes += nbytes

    def _warn(self, what: str, error: OSError) -> None:
        if (what, error.errno) not in self._warned:
            self._warned.add((what, error.errno))
            log.warning("KV blocks in %s cannot be %s: %s. Prompts are computed instead", self._folder, what, error)

    def _finish(self, done: tuple[Fetch, int] | int) -> None:
        self._done.append(done)
        self._has_done.set()


def _num_blocked() -> int:
    """How often this thread has waited for something, such as a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0
