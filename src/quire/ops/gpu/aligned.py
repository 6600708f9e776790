"""Int32 arrays that travel to the device in one copy: they stand behind each other in a flat one, each aligned."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from quire.ops.opset import Int32

ALIGNMENT = 16  # int32: a kernel is compiled again for arrays that begin elsewhere, and for tables of other widths


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def empty(shapes: Sequence[tuple[int, ...]], pinned: bool = False) -> Tensor:
    """A flat array that has room for arrays of these shapes."""
    length = sum(round_up(prod(shape)) for shape in shapes)
    return torch.empty(length, dtype=torch.int32, pin_memory=pinned)


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The arrays of these shapes that a flat one holds."""
    parts = flat.split([round_up(prod(shape)) for shape in shapes])
    return [part[: prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def pack(arrays: Sequence[Int32], pinned: bool = False) -> Tensor:
    flat, first = empty([array.shape for array in arrays], pinned), 0
    target = flat.numpy()
    for array in arrays:
        target[first : first + array.size] = array.ravel()
        first += round_up(array.size)
    return flat


def to_device(arrays: Sequence[Int32], device: torch.device) -> list[Tensor]:
    """Each in its own shape."""
    flat = pack(arrays, pinned=device.type == "cuda")
    return views(flat.to(device, non_blocking=True), [array.shape for array in arrays])


class StagedArrays:
    """Arrays on the device, where a graph reads them, and two sets of them in pinned memory, used in turn: while one is
    being copied, the next step is written into the other."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, pad: Callable[[list[Int32]], None]
    ) -> None:
        """`pad` writes what stands in the arrays until a step is sent, where that is not zero."""
        pinned = device.type == "cuda"
        self._hosts = [empty(shapes, pinned).zero_() for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self._arrays = [[view.numpy() for view in views(host, shapes)] for host in self._hosts]
        for arrays in self._arrays:
            pad(arrays)
        self._device = self._hosts[0].to(device)
        self.on_device = views(self._device, shapes)

    def next_host(self) -> list[Int32]:
        """The set to write before `send`. It holds what was written there two steps ago."""
        for pair in (self._hosts, self._arrays, self._sent):
            pair.reverse()
        if self._sent:
            self._sent[0].synchronize()  # its last use is two steps ago: there is nothing to wait for
        return self._arrays[0]

    def send(self) -> None:
        self._device.copy_(self._hosts[0], non_blocking=True)
        if self._sent:
            self._sent[0].record()
