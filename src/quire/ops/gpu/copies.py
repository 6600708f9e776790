"""Where weights are that the device has no room for, and how they are copied to it beside its computing."""

import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import BadRequest, DoesNotFit
from quire.ops.gpu.pinned import pinned

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target on the device, source), bytes


class HostStore:
    """Bytes in pinned memory, as many as may be there, and the others in a file without a name."""

    def __init__(self, device: torch.device | str, max_bytes: int, folder: Path | None = None) -> None:
        """`folder`: where the file is; None: there is none."""
        self._has_cuda = torch.device(device).type == "cuda"
        self._left, self._folder = max_bytes, folder
        self._file: Any = None
        self.num_bytes = self.disk_bytes = 0

    @property
    def on_disk(self) -> bool:
        return self.disk_bytes > 0

    def keep(self, data: Tensor) -> Tensor:
        """-> a copy of the bytes, not on the device"""
        self.num_bytes += len(data)
        if len(data) <= self._left:
            self._left -= len(data)
            kept = pinned(len(data), self, "offload_weights") if self._has_cuda else torch.empty_like(data)
            return kept.copy_(data)
        if self._folder is None:
            raise DoesNotFit(
                f"host memory has no room for {self.num_bytes / 2**30:.1f} GiB of offloaded weights",
                "ask for less offload_weights, or name a folder with offload_folder: the others are kept there",
            )
        self.disk_bytes += len(data)
        return self._write(data.cpu())

    def _write(self, data: Tensor) -> Tensor:
        try:
            if self._file is None:
                assert self._folder is not None
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (closed with the store)
                weakref.finalize(self, self._file.close)
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(data.numpy().data)
            self._file.flush()
        except OSError as error:
            raise BadRequest(
                f"offload_folder is {self._folder}, and weights cannot be written there: {error.strerror}",
                "name another folder, on a disk with room",
                param="offload_folder",
            ) from error
        mapped = torch.from_file(
            f"/proc/self/fd/{self._file.fileno()}", shared=True, size=offset + len(data), dtype=torch.uint8
        )
        return mapped[offset:]


class DirectCopies:
    """In a stream of their own. They are captured with the ops around them. Without CUDA they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, pairs: Pairs) -> "torch.cuda.Event | None":
        if self._beside is None:
            _copy(pairs)
            return None
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            _copy(pairs)
            copied = torch.cuda.Event()
            copied.record()
        return copied

    def wait(self, copied: "torch.cuda.Event | None") -> None:
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)


class ThreadCopies:
    """A thread reads what is on disk into pinned memory, and copies from there. Steps cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "offloaded weights")
        self._staging: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]  # the last copy from each of two stagings

    def begin(self, pairs: Pairs) -> "Future[torch.cuda.Event | None]":
        launched = None
        if self._beside is not None:
            launched = torch.cuda.Event()
            launched.record()
        return self._thread.submit(self._copy, pairs, launched)

    def wait(self, copied: "Future[torch.cuda.Event | None]") -> None:
        event = copied.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _copy(self, pairs: Pairs, launched: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        if self._beside is None or launched is None:
            _copy(pairs)
            return None
        with torch.inference_mode(), torch.cuda.stream(self._beside):
            self._beside.wait_event(launched)
            for target, source in pairs:
                _copy([(target, source if source.is_pinned() else self._stage(source))])
                self._sent[0] = self._record()
            return self._record()

    def _stage(self, source: Tensor) -> Tensor:
        """The bytes in pinned memory, which the copy before the last has left."""
        self._staging.reverse()
        self._sent.reverse()
        if self._sent[0] is not None:
            self._sent[0].synchronize()
        if len(self._staging) < 2:
            self._staging.insert(0, torch.empty(0, dtype=torch.uint8))
        if len(self._staging[0]) < len(source):
            self._staging[0] = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        return self._staging[0][: len(source)].copy_(source)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


def _copy(pairs: Pairs) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
