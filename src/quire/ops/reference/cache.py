"""The paged KV cache as torch tensors: the layout of its pages, and what is written to and read from them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.kv_spec import CompressedLayer, KVSpec, StateSpec
from quire.ops.reference.states import TorchCheckpoints, TorchStates

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
FP8_MAX = 448.0  # of e4m3
INT8_MAX = 127
MIN_ABS_MAX = 2.0**-100  # a vector whose numbers are all smaller is quantized to zeros


class TorchCache:
    """k and v [layers, blocks, block_size, kv_heads, head_dim] on the device, and a second pair on the host to swap to.

    In int8, k and v are quantized values, and each has scales [layers, blocks, block_size, kv_heads] beside it. In a
    latent cache, v is the first columns of k. The keys of indexers are [layers, blocks, block_size, columns], and the
    states of convolutions [layers, blocks, taps - 1, channels]. Window pages are the blocks of a second cache,
    `windowed`, that has the layers with a window. Of compressed attention, each part of each layer's entries is [1,
    blocks, entries, columns], and what each layer keeps of tokens [1, blocks, block_size, columns]."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self.spec = spec
        self.windowed: TorchCache | None = None
        if spec.windows:
            self.windowed = type(self)(_windowed(spec), spec.windows.num_pages, num_host_blocks, device)
            self.page_of = torch.zeros(num_blocks, dtype=torch.int32, device=device)  # stale: a block has no page
        self.slots = self._allocate_slots(spec.states, device) if spec.states else None
        self.checkpoints = self._allocate_checkpoints(spec.states, device) if spec.states else None
        self.host_slots = _host_slots(spec.states) if spec.states else None
        self.pages = self._allocate(num_blocks, device)
        self.host_pages = self._allocate_on_host(num_host_blocks)
        beside = self.pages[-1] if spec.conv or spec.index else torch.empty(0)
        self.kv_pages = self.pages[:-1] if spec.conv or spec.index else self.pages
        self.states, self.index_keys = (beside, torch.empty(0)) if spec.conv else (torch.empty(0), beside)
        self.k, self.v = _keys_and_values(spec, self.pages or (torch.empty(0, device=device),))

    def _allocate_slots(self, states: StateSpec, device: str) -> TorchStates:
        return TorchStates(states, device)

    def _allocate_checkpoints(self, states: StateSpec, device: str) -> TorchCheckpoints | None:
        return TorchCheckpoints(states, states.num_checkpoint_slots, device) if states.num_checkpoint_slots else None

    def _allocate(self, num_blocks: int, device: str) -> tuple[Tensor, ...]:
        return zero_pages(self.spec, num_blocks, device)

    def _allocate_on_host(self, num_blocks: int) -> tuple[Tensor, ...]:
        return zero_pages(self.spec, num_blocks, "cpu")

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._copy_blocks(self.pages, self.pages, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._copy_blocks(self.pages, self.host_pages, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._copy_blocks(self.host_pages, self.pages, pairs)

    def attach_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.windowed is not None:  # a stage may have no layer with a window
            blocks, pages = self._on_device(list(dict(pairs).items())).unbind(1)
            self.page_of[blocks.long()] = pages

    def _on_device(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """[n, 2] int32"""
        return torch.tensor(pairs, dtype=torch.int32).to(self.k.device)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.windowed is not None:
            self.windowed.copy(pairs)

    def swap_pages_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.windowed is not None:
            self.windowed.swap_in(pairs)

    def swap_pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.windowed is not None:
            self.windowed.swap_out(pairs)

    def host_page_buffers(self, host_block: int) -> list[NDArray[np.uint8]]:
        assert self.windowed is not None
        return self.windowed.host_buffers(host_block)

    def _page_slots(self, slots: Tensor) -> Tensor:
        size = self.spec.block_size
        return self.page_of[slots // size].long() * size + slots % size

    def swap_states_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self.host_slots is not None
        for number, host in pairs:
            _copy_state(*self._state(number), self.host_slots, host)

    def swap_states_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self.host_slots is not None
        for host, number in pairs:
            _copy_state(self.host_slots, host, *self._state(number))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            _copy_state(*self._state(source), *self._state(target))

    def _state(self, number: int) -> tuple[TorchStates | TorchCheckpoints, int]:
        """A slot among those of its kind: checkpoint slots are numbered behind state slots."""
        assert self.slots is not None and self.spec.states is not None
        if number < self.spec.states.num_slots:
            return self.slots, number
        assert self.checkpoints is not None, f"there is no state slot {number}"
        return self.checkpoints, number - self.spec.states.num_slots

    def join_swaps(self) -> None:
        """A swap is done when it returns."""

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = self._on_device(at_once(pairs)).long().unbind(1)
        self._move(sources, targets)
        if self.windowed is not None:
            self.windowed._move(self._page_slots(sources), self._page_slots(targets))

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        for page in self.pages:
            slots = as_bytes(page).flatten(1, 2)  # [layers, slots, ...]
            slots[:, targets] = slots[:, sources]

    def swapped(self) -> Callable[[], None]:
        return lambda: None  # a swap is done when it returns

    def host_buffers(self, host_block: int) -> list[NDArray[np.uint8]]:
        """Layer by layer, of each page."""
        return _buffers(self.host_pages, host_block)

    def host_state_buffers(self, host_slot: int) -> list[NDArray[np.uint8]]:
        assert self.host_slots is not None
        return _buffers(self.host_slots.pages, host_slot)

    def _copy_blocks(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
    ) -> None:
        copy_blocks_in_order(sources, targets, pairs)

    def write(self, layer: int, slots: Tensor, *vectors: Tensor) -> None:
        """Store k and v, or the one vector of a latent cache, [T, kv_heads, head_dim] each, at slots [T]."""
        in_page, number = self.spec.place(layer)
        if in_page and self.windowed:
            self.windowed.write(number, self._page_slots(slots), *vectors)
            return
        if self.spec.dtype == "fp8":
            scales = self.spec.fp8_scales_of(layer)
            vectors = tuple((x / s).clamp(-FP8_MAX, FP8_MAX) for x, s in zip(vectors, scales, strict=False))
        written = quantize_kv(*vectors) if self.spec.dtype == "int8" else vectors
        for page, x in zip(self.kv_pages, written, strict=True):
            page[number].flatten(0, 1)[slots] = x.to(page.dtype)

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a block table, in fp32: k and v [length, kv_heads, head_dim]."""
        in_page, number = self.spec.place(layer)
        if in_page and self.windowed:
            return self.windowed.read(number, self.page_of[blocks].long(), length)
        pages = tuple(page[number, blocks].flatten(0, 1)[:length].float() for page in self.kv_pages)
        k, v = _keys_and_values(self.spec, pages)
        if self.spec.dtype != "int8":
            k_scale, v_scale = self.spec.fp8_scales_of(layer)
            return k * k_scale, v * v_scale
        k_scales, v_scales = pages[2:]
        return k * k_scales[..., None], v * v_scales[..., None]

    def write_tokens(self, layer: int, slots: Tensor, x: Tensor, first: int) -> None:
        """Store x [T, n] in the columns from `first` on of what a layer keeps of tokens."""
        if self.windowed is not None:
            self.windowed.write_tokens(layer, self._page_slots(slots), x, first)
            return
        page = self._tokens(layer)
        page[slots // self.spec.block_size, slots % self.spec.block_size, first : first + x.shape[1]] = x.to(page.dtype)

    def read_tokens(self, layer: int, blocks: Tensor, positions: Tensor) -> Tensor:
        """What a layer keeps of the tokens at these positions of a block table, in fp32: [positions, columns]."""
        if self.windowed is not None:
            return self.windowed.read_tokens(layer, self.page_of[blocks].long(), positions)
        return self._tokens(layer)[blocks[positions // self.spec.block_size], positions % self.spec.block_size].float()

    def write_entries(self, layer: int, blocks: Tensor, entries: Tensor, part: int, x: Tensor) -> None:
        """Store part 0 or 1 of a layer's entries of a block table."""
        page, (block, place) = self._entries(layer, part), self._entry_places(layer, entries)
        page[blocks[block], place] = x.to(page.dtype)

    def read_entries(self, layer: int, blocks: Tensor, count: int, part: int) -> Tensor:
        """Part 0 or 1 of the first entries of a block table, in fp32: [count, columns]."""
        block, place = self._entry_places(layer, torch.arange(count))
        return self._entries(layer, part)[blocks[block], place].float()

    def _entry_places(self, layer: int, entries: Tensor) -> tuple[Tensor, Tensor]:
        """The block of each entry, of a block table, and its place among those of the block."""
        assert self.spec.compressed is not None
        size, group = self.spec.block_size, self.spec.compressed.layers[layer].group
        block = ((entries + 1) * group - 1) // size
        return block, entries - block * size // group

    def _entries(self, layer: int, part: int) -> Tensor:
        assert self.spec.compressed is not None
        before = sum(len(one.parts) for one in self.spec.compressed.layers[:layer])
        return self.pages[before + part][0]

    def _tokens(self, layer: int) -> Tensor:
        assert self.spec.compressed is not None
        return self.pages[layer - len(self.spec.compressed.layers)][0]

    def write_index_key(self, layer: int, slots: Tensor, k: Tensor) -> None:
        self.index_keys[layer].flatten(0, 1)[slots] = k.to(self.index_keys.dtype)

    def read_index_keys(self, layer: int, blocks: Tensor, length: int) -> Tensor:
        """The keys of an indexer for the first `length` tokens of a block table, in fp32: [length, columns]."""
        return self.index_keys[layer, blocks].flatten(0, 1)[:length].float()


def _windowed(spec: KVSpec) -> KVSpec:
    """The pages of the layers with a window alone."""
    assert spec.windows is not None
    if spec.compressed is not None:
        tokens = tuple(CompressedLayer(layer.columns) for layer in spec.compressed.layers)
        return replace(spec, compressed=replace(spec.compressed, layers=tokens), windows=None)
    layers = spec.windows.layers
    scales = tuple(spec.fp8_scales_of(layer) for layer in layers) if spec.fp8_scales else ()
    return replace(spec, num_layers=len(layers), fp8_scales=scales, windows=None)


def _host_slots(states: StateSpec) -> TorchStates | TorchCheckpoints:
    if states.small_host_slots:
        return TorchCheckpoints(states, states.num_host_slots, "cpu")
    return TorchStates(states, "cpu", states.num_host_slots)


def _copy_state(
    source: TorchStates | TorchCheckpoints, from_slot: int, target: TorchStates | TorchCheckpoints, to_slot: int
) -> None:
    if type(source) is type(target):
        copy_blocks_in_order(source.pages, target.pages, [(from_slot, to_slot)])
    else:
        target.write(to_slot, source.read(from_slot))


def _buffers(pages: Sequence[Tensor], block: int) -> list[NDArray[np.uint8]]:
    return [layer.flatten().view(torch.uint8).numpy() for page in pages for layer in page[:, block]]


def _keys_and_values(spec: KVSpec, pages: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return (pages[0], pages[0][..., : spec.latent]) if spec.latent else (pages[0], pages[1])


def quantize_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v [..., head_dim] -> both in int8, and their scales [...]: NaN for both where k or v is not finite."""
    finite = (k.isfinite() & v.isfinite()).all(-1)
    quantized, scales = [], []
    for x in (k, v):
        abs_max = x.abs().amax(-1)
        nonzero = finite & (abs_max >= MIN_ABS_MAX)
        inverse = torch.where(nonzero, INT8_MAX / abs_max, 0.0)
        scaled = torch.where(finite[..., None], x * inverse[..., None], 0.0)
        quantized.append(scaled.round().to(torch.int8))
        scales.append(torch.where(nonzero, abs_max / INT8_MAX, 0.0).masked_fill(~finite, float("nan")))
    return quantized[0], quantized[1], scales[0], scales[1]


def page_layout(spec: KVSpec, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of k, of v (absent from a latent cache), in int8 of the scales of k and of v, and of the keys of
    indexers or the states of convolutions, where the model has any. Of compressed attention: of the parts of entries,
    layer by layer, and of what layers keep of tokens, where there are no window pages."""
    if (compressed := spec.compressed) is not None:
        kept = [
            *((one.block_entries(spec.block_size), part) for one in compressed.layers for part in one.parts),
            *((spec.block_size, one.columns) for one in compressed.layers if not spec.windows),
        ]
        return [((1, num_blocks, *shape), DTYPES[spec.dtype]) for shape in kept]
    slots = (spec.block_layers, num_blocks, spec.block_size, spec.num_kv_heads)
    vectors = [((*slots, spec.head_dim), DTYPES[spec.dtype])] * (1 if spec.latent else 2)
    scales: list[tuple[tuple[int, ...], torch.dtype]] = [(slots, torch.float32)] * 2 if spec.dtype == "int8" else []
    if spec.index is not None:
        return [*vectors, ((*slots[:3], spec.index.columns), DTYPES[spec.dtype])]
    if spec.conv is None:
        return [*vectors, *scales]
    states = (spec.conv.num_layers, num_blocks, spec.conv.taps - 1, spec.conv.channels)
    return [*vectors, *scales, (states, torch.float32)]


def as_bytes(page: Tensor) -> Tensor:
    """Pages of 8 bits as integers, which torch can index in every type."""
    return page.view(torch.uint8) if page.dtype.itemsize == 1 else page


def at_once(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Copies (source, target) that do at once what the given ones do one after the other."""
    origins: dict[int, int] = {}  # of what a target holds
    for source, target in pairs:
        origins[target] = origins.get(source, source)
    return [(source, target) for target, source in origins.items()]


def zero_pages(spec: KVSpec, num_blocks: int, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in page_layout(spec, num_blocks))


def copy_blocks_in_order(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy (source, target) blocks pair by pair: a later pair may read what an earlier one wrote."""
    for from_block, to_block in pairs:
        for source, target in zip(sources, targets, strict=True):
            target[:, to_block] = source[:, from_block]
