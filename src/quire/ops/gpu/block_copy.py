# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Copies of whole KV blocks [layers, blocks, ...], many in one launch.

A block is one contiguous range in every layer. Either side may be pinned memory of the host: it is mapped, so a kernel
reads and writes it over the bus without staging. The host never waits: the stream orders a copy after the step that
wrote its source and before the step that needs its target."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Pairs = Sequence[tuple[int, int]]  # (source, target) block each

WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
WORDS_AT_ONCE = 1024
PART_BYTES = 32768  # of a block, at once: more parts keep more reads of a slow bus in flight
BESIDE = 32  # programs of a copy that runs beside kernels: what a bus needs in flight, and no more


def copy_blocks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Pairs, *, max_programs: int | None = None
) -> None:
    """Copy blocks as if pair by pair: a later pair may read what an earlier one wrote, and write what an earlier one
    read.

    `sources` and `targets` are the same pages, or do not overlap."""
    for wave in waves(pairs, same_pages=sources[0] is targets[0]):
        on_device = to_device(wave, _device(sources[0], targets[0]))
        for source, target in zip(sources, targets, strict=True):
            _launch(source, target, on_device, max_programs)


def waves(pairs: Pairs, same_pages: bool) -> Iterator[list[tuple[int, int]]]:
    """Runs of pairs that may be copied in any order, or all at once. Usually all pairs are one wave."""
    wave: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if target in written or (same_pages and (source in written or target in read)):
            yield wave
            wave, read, written = [], set(), set()
        wave.append((source, target))
        read.add(source)
        written.add(target)
    if wave:
        yield wave


def _device(source: Tensor, target: Tensor) -> torch.device:
    return source.device if source.device.type == "cuda" else target.device


def to_device(pairs: Pairs, device: torch.device) -> Tensor:
    """[n, 2] int32, sent without waiting."""
    host = torch.tensor(pairs, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _launch(source: Tensor, target: Tensor, pairs: Tensor, max_programs: int | None) -> None:
    if len(source) == 0:  # a stage may have layers with a window alone
        return
    block_bytes = source[0, 0].nbytes
    assert target[0, 0].nbytes == block_bytes and source.is_contiguous() and target.is_contiguous()
    word = next(word for word in WORDS if block_bytes % word.itemsize == 0)
    num_words = block_bytes // word.itemsize
    part = PART_BYTES // word.itemsize
    parts = triton.cdiv(num_words, part)
    total = len(pairs) * len(source) * parts
    _copy_blocks[(min(total, max_programs or total),)](
        source.flatten().view(word),
        target.flatten().view(word),
        pairs,
        source.shape[1],
        target.shape[1],
        len(source),
        total,
        BLOCK_WORDS=num_words,
        PARTS=parts,
        PART=part,
        AT_ONCE=min(WORDS_AT_ONCE, int(triton.next_power_of_2(num_words))),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["source_blocks", "target_blocks", "total"])
def _copy_blocks(
    source,
    target,
    pairs,
    source_blocks,
    target_blocks,
    num_layers,
    total,
    BLOCK_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        pair = index // PARTS // num_layers
        layer = (index // PARTS % num_layers).to(tl.int64)
        from_block = tl.load(pairs + 2 * pair)
        to_block = tl.load(pairs + 2 * pair + 1)
        read = source + (layer * source_blocks + from_block) * BLOCK_WORDS
        write = target + (layer * target_blocks + to_block) * BLOCK_WORDS
        first = index % PARTS * PART
        for begin in range(first, tl.minimum(first + PART, BLOCK_WORDS), AT_ONCE):
            word = begin + tl.arange(0, AT_ONCE)
            inside = word < BLOCK_WORDS
            tl.store(write + word, tl.load(read + word, mask=inside), mask=inside)
