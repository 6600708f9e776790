"""The shape of the KV cache: blocks, window pages, the keys of indexers, entries of compressed attention, states; and
what a backend's cache can do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

KV_DTYPES = ("float16", "bfloat16", "float32", "int8")
GPU_KV_DTYPES = (*KV_DTYPES, "fp8")


MAX_CONV_TAPS = 16
STATE_ALIGNMENT = 16  # numbers
CHECKPOINT_DTYPES = ("float32", "bfloat16", "int8")
CHECKPOINT_GROUP = 64  # numbers of a state that share a scale in int8


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """The causal convolutions of a model. The state of one is its last `taps - 1` inputs, in fp32."""

    num_layers: int
    channels: int  # columns of an input
    taps: int  # inputs that an output depends on: of its own token, and of those before it

    def __post_init__(self) -> None:
        assert self.num_layers > 0 and 1 <= self.taps <= MAX_CONV_TAPS

    @property
    def state_bytes(self) -> int:
        """The convolution states of all layers after one token."""
        return 4 * self.num_layers * (self.taps - 1) * self.channels

    def in_slots(self) -> "StateSpec":
        """The same states in slots beside the blocks, with a recurrence of one number, which is not used."""
        return StateSpec(self.num_layers, (1,), self.channels, self.taps)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent states of a model. A state slot has one of every such layer, in fp32: the last `conv_taps - 1`
    inputs of its causal convolution [conv_taps - 1, conv_channels], and what its recurrence keeps, `shape`.

    A step has the tokens of its sequences in segments, in order (`StepBatch.states`): (end, source, target). A segment
    is the tokens from the end of the one before it up to `end`. It starts from the state in the slot `source`, or from
    zeros if that is below zero, and leaves the state after its last token in the slot `target`, which may be `source`.
    The segments of a sequence follow each other; a segment may continue what one before it has left.

    Checkpoints that are not in fp32 have slots of their own, *checkpoint slots*. In int8, `CHECKPOINT_GROUP` numbers
    are integers in -127 .. 127 and a scale in fp32, max|x| / 127, which is NaN if one of them is not finite."""

    num_layers: int
    shape: tuple[int, ...]  # of one layer: (heads, rows, columns), say
    conv_channels: int = 0  # 0: the layers have no convolution
    conv_taps: int = 1
    num_slots: int = 0  # of a cache
    num_host_slots: int = 0  # to swap states to
    checkpoint_dtype: str = "float32"  # one of CHECKPOINT_DTYPES
    num_checkpoint_slots: int = 0  # 0: checkpoints are in state slots
    small_host_slots: bool = False  # whether host slots are of checkpoints, in their dtype

    def __post_init__(self) -> None:
        assert self.checkpoint_dtype in CHECKPOINT_DTYPES
        assert self.num_layers > 0 and 1 <= self.conv_taps <= MAX_CONV_TAPS and all(n > 0 for n in self.shape)

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_taps - 1, self.conv_channels

    @property
    def conv_numbers(self) -> int:
        """The numbers of one layer's convolution, padded to whole vectors."""
        return -(-(self.conv_taps - 1) * self.conv_channels // STATE_ALIGNMENT) * STATE_ALIGNMENT

    @property
    def numbers(self) -> int:
        """The numbers of one layer's recurrence, padded to whole vectors."""
        return -(-prod(self.shape) // STATE_ALIGNMENT) * STATE_ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """The bytes of a state slot, which has the states of all layers."""
        return 4 * self.num_layers * (self.conv_numbers + self.numbers)

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint, which has all layers. Numbers of an int8 one are padded to whole groups."""
        if self.checkpoint_dtype != "int8":
            return self.slot_bytes // (2 if self.checkpoint_dtype == "bfloat16" else 1)
        return -(-self.slot_bytes // 4 // CHECKPOINT_GROUP) * (CHECKPOINT_GROUP + 4)

    @property
    def host_slot_bytes(self) -> int:
        return self.checkpoint_bytes if self.small_host_slots else self.slot_bytes


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """The layers of a cache that have a sliding window (or chunks), where others have none. Their part of a block is in
    a window page, and a block has one only as long as a window reaches it."""

    layers: tuple[int, ...]  # of the cache
    size: int  # the largest window
    num_pages: int

    def __post_init__(self) -> None:
        assert self.layers and self.size > 0 and self.num_pages > 0


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexers of sparse attention (DSA). A token has a key of `columns` numbers in every layer, beside what the
    layer's attention keeps of it; a query attends to the `top_k` positions whose keys score best."""

    columns: int
    top_k: int

    def __post_init__(self) -> None:
        assert self.columns > 1 and self.top_k > 0


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """What a layer of compressed attention (DeepSeek V4) keeps. A token has `columns` numbers: the vector that is its
    key and its value for all heads, then what entries are made of. A group of `group` tokens becomes one entry, of
    `parts` numbers: the vector that is key and value, and the key of the layer's indexer, if it has one. Entry i is of
    the tokens from `group * i` on, and is in the block of the last of them."""

    columns: int
    group: int = 0  # 0: the layer has no entries
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.columns > 0 and bool(self.group) == bool(self.parts) and len(self.parts) <= 2

    def block_entries(self, block_size: int) -> int:
        """Room for entries in a block."""
        return -(-block_size // self.group) if self.group else 0


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """The layers of a cache of compressed attention. Of tokens more than `reach` positions back, only entries are
    read: what tokens have is in window pages, where there are any, and else behind the entries of their block."""

    layers: tuple[CompressedLayer, ...]
    reach: int  # positions that are read as tokens, the newest included

    def __post_init__(self) -> None:
        assert self.layers and self.reach > 0

    def entry_numbers(self, block_size: int) -> int:
        """Numbers of the entries of a block, in all layers."""
        return sum(layer.block_entries(block_size) * sum(layer.parts) for layer in self.layers)

    def token_numbers(self, block_size: int) -> int:
        """Numbers of the tokens of a block, in all layers."""
        return block_size * sum(layer.columns for layer in self.layers)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the paged KV cache. A block holds `block_size` tokens of every layer.

    A token has a key and a value of `head_dim` numbers for each KV head. A latent cache (MLA) has one vector a token
    instead, shared by all query heads: its first `latent` numbers serve as key and as value, the rest (the rope part)
    as key alone.

    int8 stores a key, or a value, of one token and head as `head_dim` integers in -127 .. 127 and a scale in fp32,
    max|k| / 127. If a key or its value is not finite, both scales are NaN. fp8 is e4m3, saturated at 448; keys and
    values are divided by `fp8_scales` of their layer, where it has any.

    With `conv`, a block also has the state of every causal convolution after the last token written to it: a full block
    is a prefix from which a sequence can continue. States that are too large for that, or that have to go back to where
    a draft was rejected, are beside the blocks, in slots of their own: `states`. A cache has one of both, or neither.

    With `windows`, a block has no part of the layers with a window: that is in window pages. With `index`, a block of a
    latent cache also has the key of each layer's indexer, in the same type.

    With `compressed`, a latent cache, all of whose columns are the value too, has what these layers keep instead."""

    num_layers: int  # that have keys and values
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # one of GPU_KV_DTYPES; a latent cache is never int8
    latent: int = 0  # 0: not a latent cache
    fp8_scales: tuple[tuple[float, float], ...] = ()  # of keys and values, by layer; (): 1 for all
    conv: ConvSpec | None = None
    states: StateSpec | None = None
    windows: WindowSpec | None = None
    index: IndexSpec | None = None
    compressed: CompressedSpec | None = None

    def __post_init__(self) -> None:
        assert self.conv is None or self.states is None
        assert self.windows is None or (not self.has_states and (self.compressed or not self.latent))
        assert self.index is None or (self.latent and self.conv is None)
        assert not self.latent or (self.num_kv_heads == 1 and self.latent <= self.head_dim and self.dtype != "int8")
        assert self.compressed is None or (self.latent == self.head_dim and not (self.index or self.has_states))

    def fp8_scales_of(self, layer: int) -> tuple[float, float]:
        return self.fp8_scales[layer] if self.fp8_scales else (1.0, 1.0)

    @property
    def value_dim(self) -> int:
        """Numbers in a value of one head."""
        return self.latent or self.head_dim

    @property
    def has_states(self) -> bool:
        return self.conv is not None or self.states is not None

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees: what a place keeps, and which are read, depends on no position before it."""
        return self.states is None and self.index is None and self.compressed is None

    def place(self, layer: int) -> tuple[bool, int]:
        """Whether a layer is in window pages, and its number among the layers that are, or are not."""
        in_pages = self.windows.layers if self.windows else ()
        if layer in in_pages:
            return True, in_pages.index(layer)
        return False, layer - sum(other < layer for other in in_pages)

    @property
    def block_layers(self) -> int:
        """Layers whose keys and values are in blocks."""
        if self.compressed:
            return 0
        return self.num_layers - (len(self.windows.layers) if self.windows else 0)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the keys and values of `block_size` tokens in one layer."""
        return (1 if self.latent else 2) * self.num_kv_heads * self.block_size * self._head_bytes

    @property
    def kv_bytes(self) -> int:
        """The bytes that the tokens of a block have in all layers, in the block itself or in its window page."""
        if self.compressed:
            return self.compressed.token_numbers(self.block_size) * self._number_bytes
        return self.num_layers * self.layer_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of the entries of a block."""
        return self.compressed.entry_numbers(self.block_size) * self._number_bytes if self.compressed else 0

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexers' keys of a block."""
        return self.kv_bytes // self.head_dim * self.index.columns if self.index else 0

    @property
    def block_bytes(self) -> int:
        if self.compressed:
            return self.entry_bytes + (0 if self.windows else self.kv_bytes)
        kv_bytes = self.block_layers * self.layer_bytes
        return kv_bytes + self.index_bytes + (self.conv.state_bytes if self.conv else 0)

    @property
    def page_bytes(self) -> int:
        """The bytes of a window page."""
        if self.compressed:
            return self.kv_bytes if self.windows else 0
        return len(self.windows.layers) * self.layer_bytes if self.windows else 0

    @property
    def host_block_bytes(self) -> int:
        """The bytes of a block on the host, which has all layers."""
        return self.block_bytes + self.page_bytes

    @property
    def _head_bytes(self) -> int:
        """Bytes of a key, or of a value, of one token and head."""
        if self.dtype == "int8":
            return -(-self.head_dim // 16) * 16 + 4  # kernels read 16 values at a time; then the scale
        return self.head_dim * self._number_bytes

    @property
    def _number_bytes(self) -> int:
        return {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}[self.dtype]


class KVCache(Protocol):
    """`num_blocks` KV blocks, and `num_host_blocks` more to swap to; state slots, checkpoint slots and host slots, of
    `KVSpec.states`. Checkpoint slots are numbered behind the state slots. States are converted to the dtype of the slot
    that they are copied to."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, in order: pairs of (source, target)."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the host: pairs of (block, host block)."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the host: pairs of (host block, block)."""

    def swap_states_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states to the host: pairs of (state slot or checkpoint slot, host slot). What is launched next begins
        after it."""

    def swap_states_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states from the host: pairs of (host slot, state slot)."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states from a state slot to a checkpoint slot, or back, in order: pairs of (source, target)."""

    def join_swaps(self) -> None:
        """What is launched from here on begins after the swaps so far. A swap to the host may still read its blocks
        before: until then, nothing may write them."""

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of slots, in all layers and in order: pairs of (source, target). A slot is block *
        block_size + offset."""

    def swapped(self) -> Callable[[], None]:
        """Call the result, in any thread, to wait for all swaps so far."""

    def host_buffers(self, host_block: int) -> list[NDArray[np.uint8]]:
        """The memory of a host block, in an order that depends on nothing but the shape of the cache."""

    def host_state_buffers(self, host_slot: int) -> list[NDArray[np.uint8]]:
        """The memory of a host slot, the same."""


class WindowedKVCache(KVCache, Protocol):
    """A cache with window pages, of `KVSpec.windows`."""

    def attach_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Let blocks have window pages from now on: pairs of (block, page)."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy window pages, in order: pairs of (source, target)."""

    def swap_pages_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy window pages from the host: pairs of (host block, page)."""

    def swap_pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy window pages to the host: pairs of (page, host block)."""

    def host_page_buffers(self, host_block: int) -> list[NDArray[np.uint8]]:
        """The memory of the window page of a host block, as `host_buffers` has that of the block."""
