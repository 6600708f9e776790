"""Weights of some layers in host memory or on disk, for models that are larger than the GPU's memory.

The device has two buffers, each as large as one layer. A stream of its own copies the weights of a layer into one of
them while layers before it compute; the stream of the step waits for a copy only where the layer begins. Weights have
fixed addresses in their buffer, so steps are captured in CUDA graphs, copies and all. What is on disk is read by a
thread, and steps are launched op by op."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.gpu.copies import DirectCopies, HostStore, ThreadCopies
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Keep, Program, ProgramSpec
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor

ALIGNMENT = 256  # bytes
NUM_BUFFERS = 2

Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedTensor:
    """`on_device` is a view of a buffer, once buffers are there."""

    on_device: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    stored: Tensor  # uint8, in host memory or a file

    def place(self, buffer: Tensor, offset: int) -> Tensor:
        """Let it lie there. -> its bytes"""
        target = buffer[offset : offset + len(self.stored)]
        self.on_device.data = torch.as_strided(target.view(self.on_device.dtype), self.size, self.stride)
        return target


class Copies(Protocol):
    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy (target, source) when all that was launched so far is done. -> what to wait for"""

    def wait(self, copied: Any) -> None:
        """Let all that is launched from now on wait for a copy."""


class LayerCopies:
    """The copies of one step. Offloaded layer j has buffer j % 2: it is free again behind layer j."""

    store: HostStore  # of the sources

    def __init__(self, layers: Sequence[int], pairs: Sequence[Sequence[tuple[Tensor, Tensor]]], copies: Copies) -> None:
        """`layers`: their numbers, ascending. `pairs`: of each, (target, source)."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._pairs, self._copies = pairs, copies
        self._copied: dict[int, Any] = {}

    def enter(self, layer: int) -> None:
        """The ops of the layers before this one are launched."""
        if layer == 0:
            self._copied.clear()
            for place in range(min(NUM_BUFFERS, len(self._pairs))):
                self._begin(place)
        if (before := self._places.get(layer - 1)) is not None:
            self._begin(before + NUM_BUFFERS)
        if layer in self._places:
            self._copies.wait(self._copied.pop(self._places[layer]))

    def _begin(self, place: int) -> None:
        if place < len(self._pairs):
            self._copied[place] = self._copies.begin(self._pairs[place])


class OffloadForward:
    """The ops of a forward pass, whose taps tell where layers begin."""

    def __init__(self, ops: Any, copies: LayerCopies) -> None:
        self._ops, self._copies = ops, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def tap(self, x: Any, index: int) -> None:
        self._copies.enter(index)
        self._ops.tap(x, index)


class OffloadOps:
    """A backend's op set in torch. Weights are numbered in the order in which they are packed."""

    def __init__(self, ops: Any, store: HostStore) -> None:
        self.backend, self._store = ops, store
        self._layer_of: dict[int, int] = {}  # of the weights that are offloaded
        self._offloaded: dict[int, list[OffloadedTensor]] = {}  # by layer
        self._num_weights = 0
        self._copies: LayerCopies | None = None

    def begin(self, layers: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The weights of a model come next. `layers`: (number, its weights) of those that are offloaded."""
        self._layer_of = {number: layer for layer, weights in layers for number in weights}
        self._offloaded = {layer: [] for layer, _ in layers}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    # -- when a model is loaded

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        packed: PackedWeight = self.backend.pack(parts, bias, keep)
        self._take(packed.packed)
        return packed

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        packed: PackedExperts = self.backend.pack_experts(experts, biases)
        self._take(packed.packed)
        return packed

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        packed: PackedHeads = self.backend.pack_heads(heads)
        self._take(packed.packed)
        return packed

    def table(self, tensor: StoredTensor) -> Any:
        self._num_weights += 1
        return self.backend.table(tensor)

    def _take(self, packed: Any) -> None:
        layer = self._layer_of.get(self._num_weights)
        self._num_weights += 1
        if layer is None:
            return
        for tensor in tensors_in(packed):
            size, stride = tuple(tensor.shape), tensor.stride()
            flat = torch.as_strided(tensor, (_span(size, stride),), (1,)).view(torch.uint8)
            self._offloaded[layer].append(OffloadedTensor(tensor, size, stride, self._store.keep(flat)))
            tensor.data = tensor.new_empty(1).expand(size)  # until there are buffers

    def place(self) -> int:
        """All weights are packed: allocate the buffers. -> bytes that the device does not have to hold"""
        layers = list(self._offloaded)
        ends = [sum(_aligned(len(one.stored)) for one in self._offloaded[layer]) for layer in layers]
        device = self._offloaded[layers[0]][0].on_device.device
        buffers = [torch.empty(max(ends), dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        pairs = [_placed(self._offloaded[layer], buffers[place % NUM_BUFFERS]) for place, layer in enumerate(layers)]
        new_copies = ThreadCopies if self._store.on_disk else DirectCopies
        self._copies = LayerCopies(layers, pairs, new_copies(device))
        self._copies.store = self._store  # the store unpins its memory when it is collected
        return sum(ends) - NUM_BUFFERS * max(ends)

    # -- forward passes

    def compile(self, forward: Forward, cache: KVCache, spec: ProgramSpec) -> Program:
        program: Program = self.backend.compile(self._copying(forward), cache, spec)
        return program

    def room(self, forward: Forward, spec: KVSpec, max_tokens: int, sources: bool = False) -> int:
        return int(self.backend.room(self._copying(forward), spec, max_tokens, sources))

    def _copying(self, forward: Forward) -> Forward:
        assert self._copies is not None, "there are no buffers"
        copies = self._copies
        return lambda ops, batch: forward(OffloadForward(ops, copies), batch)


def _placed(offloaded: Sequence[OffloadedTensor], buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
    pairs, offset = [], 0
    for one in offloaded:
        pairs.append((one.place(buffer, offset), one.stored))
        offset += _aligned(len(one.stored))
    return pairs


def tensors_in(packed: Any) -> Iterator[Tensor]:
    """The tensors of a weight as a backend keeps it: tensors, or dataclasses and lists of them."""
    if isinstance(packed, Tensor):
        yield packed
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from tensors_in(getattr(packed, field.name))
    elif isinstance(packed, list | tuple):
        for one in packed:
            yield from tensors_in(one)


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
