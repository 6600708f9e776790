"""Where the tokens of a step find states and leave them, as the kernels read it.

`StepBatch.states` has segments of tokens in order; a later one may continue what an earlier one leaves. Segments that
depend on each other form a chain, which one program goes through from its first segment to its last; chains run at the
same time. A convolution needs the last few inputs only: it finds them through `before`, and all tokens run at the same
time. The segments of long chains are cut into tiles, for kernels that take many tokens at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.aligned import StagedArrays, to_device
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Int32, StepBatch

NO_STATE = -1  # the slot of a segment that starts from zeros, or leaves nothing
TILE = 64  # tokens that tensor cores take at once; the last tile of a segment may have fewer
MIN_TILE_TOKENS = 32  # on average: a chain whose tiles have fewer takes its tokens one after the other


class SegmentArrays(NamedTuple):
    """On the host, of G segments in C chains, M of which have N tiles together."""

    table: Int32  # [G, 4] first token, end, source, target; chain after chain
    chain_starts: Int32  # [C + 1] segments of a chain
    num_near: Int32  # [C] so many segments at the beginning of a chain reach a slot within `taps - 1` tokens
    before: Int32  # [T] the token before each; -1: there is none; -2 - slot: the state in that slot
    tiles: Int32  # [N, 2] first token, end; a chain's are neighbours, in order
    tile_chains: Int32  # [M, 2] a chain with tiles, its first tile; those with most tiles first
    num_tiles: Int32  # [2] M, N
    has_tiles: Int32  # [C] 1: the chain has tiles


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSegments:
    """`SegmentArrays` on the device. Of padding, chains have no segments, and tokens nothing before them."""

    table: Tensor
    chain_starts: Tensor
    num_near: Tensor
    before: Tensor
    tiles: Tensor
    tile_chains: Tensor
    num_tiles: Tensor
    has_tiles: Tensor
    single: bool = field(kw_only=True)  # every chain is one segment of one token, in order
    all_tiles: bool = field(default=False, kw_only=True)  # every chain has tiles

    @property
    def num_chains(self) -> int:
        return len(self.num_near)

    @property
    def max_tiles(self) -> int:
        return len(self.tiles)


def has_states(spec: KVSpec) -> bool:
    return spec.states is not None or spec.conv is not None


def taps_of(spec: KVSpec) -> int:
    if spec.conv is not None:
        return spec.conv.taps
    return spec.states.conv_taps if spec.states is not None else 1


def with_segments(batch: StepBatch, spec: KVSpec) -> StepBatch:
    """The batch with `states`: of convolutions whose states are in blocks, segments end where blocks do, and a slot is
    a block. A batch that names no slots reads and leaves nothing: a dry run."""
    if spec.conv is not None:
        return replace(batch, states=_segments_of_blocks(batch, spec.block_size))
    if batch.states is None:
        nothing = np.full(len(batch.context_lens), NO_STATE, np.int32)
        return replace(batch, states=np.stack([batch.seq_starts[1:], nothing, nothing], axis=1))
    return batch


def _segments_of_blocks(batch: StepBatch, block_size: int) -> Int32:
    positions, ends = batch.positions, (batch.positions + 1) % block_size == 0
    counts = np.diff(batch.seq_starts)
    ends[batch.seq_starts[1:][counts > 0] - 1] = True
    last = np.flatnonzero(ends)
    first = np.concatenate([[0], last[:-1] + 1])
    rows = np.repeat(np.arange(len(counts)), counts)[first]
    places = np.maximum(positions[first] - 1, 0) // block_size
    sources = np.where(positions[first] > 0, batch.block_tables[rows, places], NO_STATE)
    targets = np.where(batch.slots[last] >= 0, batch.slots[last] // block_size, NO_STATE)
    return np.stack([last + 1, sources, targets], axis=1).astype(np.int32)


def segment_arrays(states: Int32, taps: int) -> SegmentArrays:
    """`states` [G, 3] as in `StepBatch`."""
    ends, sources, targets = states.T
    firsts = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    writers = _writers(sources.tolist(), targets.tolist())
    chains: list[int] = []
    reach: list[int] = []  # tokens from the end of a segment back to the slot that it goes back to
    num_chains = 0
    for count, writer in zip((ends - firsts).tolist(), writers, strict=True):
        chains.append(num_chains if writer < 0 else chains[writer])
        reach.append(count if writer < 0 else count + reach[writer])
        num_chains += writer < 0
    near = np.array(reach) < taps - 1
    chain = np.array(chains)
    order = np.lexsort((~near, chain))  # stable: a near segment depends on near ones only
    before = np.arange(-1, ends[-1] - 1, dtype=np.int32)
    written = np.array(writers)
    before[firsts] = np.where(written >= 0, ends[written] - 1, np.where(sources >= 0, -2 - sources, -1))
    table = np.stack([firsts, ends, sources, targets], axis=1)[order]
    return SegmentArrays(
        table,
        np.concatenate([[0], np.cumsum(np.bincount(chain))]).astype(np.int32),
        np.bincount(chain, weights=near).astype(np.int32),
        before,
        *_tiles(table, chain[order]),
    )


def _tiles(table: Int32, chain: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """The last four of `SegmentArrays`; `chain` [G] of each segment, ascending."""
    tokens = table[:, 1] - table[:, 0]
    counts = -(-tokens // TILE)
    num_tiles, num_tokens = (np.bincount(chain, weights=x).astype(np.int32) for x in (counts, tokens))
    has_tiles = num_tokens >= MIN_TILE_TOKENS * num_tiles
    counts = np.where(has_tiles[chain], counts, 0)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a tile in its segment
    firsts = np.repeat(table[:, 0], counts) + TILE * index
    tiles = np.stack([firsts, np.minimum(firsts + TILE, np.repeat(table[:, 1], counts))], axis=1)
    num_tiles = np.where(has_tiles, num_tiles, 0)
    longest = np.argsort(-num_tiles, kind="stable")[: has_tiles.sum()]
    chains = np.stack([longest, (np.cumsum(num_tiles) - num_tiles)[longest]], axis=1)
    totals = np.array([len(chains), len(tiles)])
    return tiles.astype(np.int32), chains.astype(np.int32), totals.astype(np.int32), has_tiles.astype(np.int32)


def _writers(sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The segment of this step that leaves what each starts from, or -1."""
    last: dict[int, int] = {}
    writers = []
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        writers.append(last.get(source, -1) if source >= 0 else -1)
        if target >= 0:
            last[target] = index
    return writers


def are_independent(states: Int32) -> bool:
    """Whether no segment continues another."""
    return max(_writers(states[:, 1].tolist(), states[:, 2].tolist())) < 0


def segments_on_device(batch: StepBatch, taps: int, device: torch.device) -> DeviceSegments:
    assert batch.states is not None
    arrays = segment_arrays(batch.states, taps)
    single = len(arrays.num_near) == batch.num_tokens
    return DeviceSegments(*to_device(arrays, device), single=single, all_tiles=bool(arrays.has_tiles.all()))


class SegmentInputs:
    """The segments of a step of at most T tokens in C chains, where a graph reads them."""

    def __init__(self, num_tokens: int, num_chains: int, taps: int, device: torch.device, single: bool) -> None:
        self._taps, self._num_tokens, self._single = taps, num_tokens, single
        max_tiles = 0 if single else num_tokens // MIN_TILE_TOKENS
        tiles = [(max_tiles, 2), (max_tiles, 2), (2,), (num_chains,)]
        shapes = [(num_tokens, 4), (num_chains + 1,), (num_chains,), (num_tokens,), *tiles]
        self._staged = StagedArrays(shapes, device, lambda arrays: self._pad(SegmentArrays(*arrays), 0, 0, 0))
        self.segments = DeviceSegments(*self._staged.on_device, single=single)

    def _pad(self, arrays: SegmentArrays, num_tokens: int, num_segments: int, num_chains: int) -> None:
        """Pad what follows the tokens and chains of a step. In a step that decodes, a padding token is a segment that
        starts from zeros and leaves nothing."""
        table, chain_starts, num_near, before = arrays[:4]
        before[num_tokens:], num_near[num_chains:] = NO_STATE, 0
        chain_starts[num_chains + 1 :] = chain_starts[num_chains]
        table[num_segments:] = (0, 0, NO_STATE, NO_STATE)
        if self._single:
            rows = np.arange(num_tokens, self._num_tokens)
            table[num_tokens:, :2] = np.stack([rows, rows + 1], axis=1)
            chain_starts[num_chains + 1 :] = rows + 1

    def send(self, batch: StepBatch) -> None:
        assert batch.states is not None
        sent, arrays = segment_arrays(batch.states, self._taps), SegmentArrays(*self._staged.next_host())
        for array, values in zip(arrays, sent, strict=True):
            array[: len(values)] = values
        self._pad(arrays, batch.num_tokens, len(sent.table), len(sent.num_near))
        self._staged.send()
