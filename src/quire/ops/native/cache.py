"""The KV cache in main memory. native/src/ops.h (Pages) describes the layout of a block."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import DoesNotFit, Unsupported
from quire.ops.checkpoint_numbers import read_checkpoint, write_checkpoint
from quire.ops.kv_spec import KV_DTYPES, KVSpec
from quire.ops.opset import Int32, StepBatch

Bytes = NDArray[np.uint8]
TokenView = tuple[NDArray[Any], tuple[int, ...]]  # what tokens have [blocks, *places, ...], the shape of places

PAGES_SLACK = 64  # bytes that the kernels may read past the last block


class NativeCache:
    """`num_blocks` blocks, and `num_host_blocks` to swap out to. Blocks that were never written take no memory.

    The keys of indexers are in an array of their own; a host block has both parts, one behind the other."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> None:
        if spec.dtype not in KV_DTYPES:
            raise Unsupported(f"a KV cache of {spec.dtype}", f"the CPU supports {', '.join(KV_DTYPES)}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.pages, self._blocks = _allocate_pages(num_blocks, spec.block_bytes - spec.index_bytes)
        self.index_keys = _allocate(num_blocks * spec.index_bytes)
        self._index_blocks = self.index_keys.reshape(num_blocks, spec.index_bytes)
        self._host = _allocate(num_host_blocks * spec.host_block_bytes).reshape(num_host_blocks, spec.host_block_bytes)
        self.window_pages, self._window_pages = _allocate_pages(
            spec.windows.num_pages if spec.windows else 0, spec.page_bytes
        )
        self._page_of = np.zeros(num_blocks if spec.windows else 0, np.int32)  # stale where a block has no page
        states = spec.states
        self.slots = _allocate(states.num_slots * states.slot_bytes if states else 0).view(np.float32)
        self._host_slots = _slots(states.num_host_slots, states.host_slot_bytes) if states else _slots(0, 0)
        self._states: list[Bytes] = []  # by number: state slots, and checkpoint slots behind them
        if states:
            self._states += list(self.slots.view(np.uint8).reshape(-1, states.slot_bytes))
            self._states += list(_slots(states.num_checkpoint_slots, states.checkpoint_bytes))

    @property
    def _host_parts(self) -> list[Bytes]:
        """The arrays of host blocks: what these have of pages, and of the keys of indexers."""
        return np.split(self._host[:, : self.spec.block_bytes], [self._blocks.shape[1]], axis=1)

    @property
    def _host_pages(self) -> Bytes:
        return self._host[:, self.spec.block_bytes :]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part in (self._blocks, self._index_blocks):
            _copy(part, part, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part, host in zip((self._blocks, self._index_blocks), self._host_parts, strict=True):
            _copy(part, host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part, host in zip((self._blocks, self._index_blocks), self._host_parts, strict=True):
            _copy(host, part, pairs)

    def attach_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.windows is not None:  # a stage may have no layer with a window
            for block, page in pairs:
                self._page_of[block] = page

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.windows is not None:
            _copy(self._window_pages, self._window_pages, pairs)

    def swap_pages_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.windows is not None:
            _copy(self._host_pages, self._window_pages, pairs)

    def swap_pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.windows is not None:
            _copy(self._window_pages, self._host_pages, pairs)

    def find_pages(self, batch: StepBatch) -> dict[str, Int32]:
        """The slots and block tables of a step in window pages, for `Tape.run`."""
        block, offset = np.divmod(batch.slots, np.int32(self.spec.block_size))
        slots = self._page_of[block] * np.int32(self.spec.block_size) + offset
        return {"window_slots": slots, "window_tables": self._page_of[batch.block_tables]}

    def swap_states_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.states is not None:  # a stage may have no layer with states
            self._copy_states(self._states, self._host_slots, pairs)

    def swap_states_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.states is not None:
            self._copy_states(self._host_slots, self._states, pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.spec.states is not None:
            self._copy_states(self._states, self._states, pairs)

    def _copy_states(
        self, sources: Sequence[Bytes] | Bytes, targets: Sequence[Bytes] | Bytes, pairs: Sequence[tuple[int, int]]
    ) -> None:
        assert self.spec.states is not None
        dtype = self.spec.states.checkpoint_dtype
        for src, dst in pairs:
            if not (0 <= src < len(sources) and 0 <= dst < len(targets)):
                raise ValueError(f"copy of state {src} of {len(sources)} to state {dst} of {len(targets)}")
            source, target = sources[src], targets[dst]
            if source.size == target.size:
                target[:] = source
            elif source.size > target.size:
                write_checkpoint(source.view(np.float32), target, dtype)
            else:
                read_checkpoint(source, target.view(np.float32), dtype)

    def join_swaps(self) -> None:
        """A swap is done when it returns."""

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        num_slots = self.num_blocks * self.spec.block_size
        for source, target in pairs:
            if not (0 <= source < num_slots and 0 <= target < num_slots):
                raise ValueError(f"copy of slot {source} to slot {target} of {num_slots}")
            _move(_token_views(self.spec, self.spec.block_layers, self._blocks), source, target)
            _move(self._index_views(), source, target)
            if self.spec.windows:
                views = _token_views(self.spec, len(self.spec.windows.layers), self._window_pages)
                _move(views, self._page_slot(source), self._page_slot(target))

    def _page_slot(self, slot: int) -> int:
        block, offset = divmod(slot, self.spec.block_size)
        return int(self._page_of[block]) * self.spec.block_size + offset

    def _index_views(self) -> list[TokenView]:
        """Views of the keys of indexers, as `_token_views` has them of pages."""
        if self.spec.index is None:
            return []
        keys = self._index_blocks.reshape(self.num_blocks, self.spec.num_layers, self.spec.block_size, -1)
        return [(np.moveaxis(keys, 2, 1), (self.spec.block_size,))]

    def swapped(self) -> Callable[[], None]:
        return lambda: None  # a swap is done when it returns

    def move_host(self, memory: Bytes) -> None:
        """Keep host blocks, and host slots behind them, in this memory from now on. None may be in use."""
        blocks, slots = np.split(memory[: self._host.size + self._host_slots.size], [self._host.size])
        self._host = blocks.reshape(self._host.shape)
        self._host_slots = slots.reshape(self._host_slots.shape)

    def host_buffers(self, host_block: int) -> list[Bytes]:
        return [self._host[host_block, : self.spec.block_bytes]]

    def host_page_buffers(self, host_block: int) -> list[Bytes]:
        return [self._host_pages[host_block]]

    def host_state_buffers(self, host_slot: int) -> list[Bytes]:
        return [self._host_slots[host_slot]]


def _allocate_pages(count: int, size: int) -> tuple[Bytes, Bytes]:
    """-> memory for pages, with slack behind them, and the pages [count, size]"""
    memory = _allocate(count * size + PAGES_SLACK)
    return memory, memory[: count * size].reshape(count, size)


def _place(slot: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Block and place of a slot in a token view."""
    block, offset = divmod(slot, prod(shape))
    return (block, *(int(index) for index in np.unravel_index(offset, shape)))


def _move(views: list[TokenView], source: int, target: int) -> None:
    """Copy what one slot has to another."""
    for view, shape in views:
        view[_place(target, shape)] = view[_place(source, shape)]


def _token_views(spec: KVSpec, num_layers: int, blocks: Bytes) -> list[TokenView]:
    """Views of the blocks [blocks, *a token's place in its block, ...], and the shape of those places."""
    size, vectors = spec.block_size, 1 if spec.latent else 2
    if not num_layers:  # a stage may have layers with a window alone
        return []
    heads = blocks.reshape(len(blocks), num_layers, vectors, spec.num_kv_heads, -1)
    if spec.dtype == "int8":
        columns = heads.shape[-1] // size - 4
        quants, scales = np.split(heads, [columns * size], axis=-1)
        quads = quants[:, :, 0].reshape(*heads.shape[:2], spec.num_kv_heads, columns // 4, size, 4)
        values = quants[:, :, 1].reshape(*heads.shape[:2], spec.num_kv_heads, size // 4, columns, 4)
        return [
            (np.moveaxis(quads, 4, 1), (size,)),
            (np.moveaxis(values, (3, 5), (1, 2)), (size // 4, 4)),
            (np.moveaxis(scales.reshape(*heads.shape[:4], size, 4), 4, 1), (size,)),
        ]
    numbers = heads.view(np.uint32 if spec.dtype == "float32" else np.uint16)
    rows = numbers[:, :, -1].reshape(*heads.shape[:2], spec.num_kv_heads, size, spec.head_dim)
    if spec.latent:
        return [(np.moveaxis(rows, 3, 1), (size,))]
    columns_first = numbers[:, :, 0].reshape(*heads.shape[:2], spec.num_kv_heads, spec.head_dim, size)
    return [(np.moveaxis(columns_first, 4, 1), (size,)), (np.moveaxis(rows, 3, 1), (size,))]


def _allocate(nbytes: int) -> Bytes:
    try:
        return np.empty(nbytes, dtype=np.uint8)
    except MemoryError as error:
        raise DoesNotFit(f"the KV cache needs {nbytes / 2**30:.1f} GiB of address space", "use fewer blocks") from error


def _slots(count: int, slot_bytes: int) -> Bytes:
    """[slots, bytes]"""
    return _allocate(count * slot_bytes).reshape(count, slot_bytes)


def _copy(source: Bytes, target: Bytes, pairs: Sequence[tuple[int, int]]) -> None:
    for src, dst in pairs:
        if not (0 <= src < len(source) and 0 <= dst < len(target)):
            raise ValueError(f"copy of block {src} of {len(source)} to block {dst} of {len(target)}")
        target[dst] = source[src]
