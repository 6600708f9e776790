"""Window pages in the GPU's op set: interpreted where there is no GPU, compiled where there is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.ops.gpu.attention.page_tables import find_pages
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.opset import GpuOps
from quire.ops.kv_spec import KVSpec, WindowSpec
from quire.ops.opset import ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec
from runtime.tiny_model import BLOCK_SIZE, MAX_LEN, MIXED_WINDOWS, random_gemma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = [7, 2, 9, 4, 0, 5, 11, 1]  # blocks of a sequence
WINDOWS = WindowSpec((0,), MIXED_WINDOWS[0], num_pages=6)


def test_slots_and_tables_are_found_in_pages() -> None:
    page_of, slots = torch.tensor([3, 0, 2, 1]).int(), torch.tensor([-1, 0, 7, 15, -1]).int()
    tables = torch.arange(3000).remainder(4).int().view(3, 1000)
    page_slots, page_tables = find_pages(page_of.to(DEVICE), slots.to(DEVICE), tables.to(DEVICE), 4)
    assert page_slots.tolist() == [-1, 12, 3, 7, -1]
    assert page_tables.tolist() == page_of[tables.long()].tolist()


def batch(start: int, end: int) -> StepBatch:
    positions, table = np.arange(start, end, dtype=np.int32), np.array(TABLE, np.int32)
    return StepBatch(
        ids=(positions * positions + 3) % 90,
        positions=positions,
        slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        seq_starts=np.array([0, end - start], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=table[None, : -(-end // BLOCK_SIZE)],
        logit_rows=np.arange(end - start, dtype=np.int32),
    )


def logits_of(windows: WindowSpec | None, batch_invariant: bool) -> list[torch.Tensor]:
    """Of a prompt in two chunks and of decoded tokens. A page goes to another block when no window reaches its own."""
    ops = GpuOps(DEVICE, dtype="float32", batch_invariant=batch_invariant, graphs=DEVICE == "cuda")
    model = random_gemma(ops)
    cache = ops.new_cache(replace(kv_spec(model.config, BLOCK_SIZE, "float32"), windows=windows), 12)
    program = ops.compile(model.forward, cache, ProgramSpec(MAX_LEN, 1, MAX_LEN))
    found, held, free = [], {}, list(range(6))  # by number of block: its page
    for start, end in ((0, 7), (7, 19), (19, 20)):
        if windows is not None:
            first = max(start - MIXED_WINDOWS[0] + 1, 0) // BLOCK_SIZE
            free += [held.pop(i) for i in list(held) if i < first]
            new = [i for i in range(first, -(-end // BLOCK_SIZE)) if i not in held]
            held |= {i: free.pop(0) for i in new}
            if new:
                cache.attach_pages([(TABLE[i], held[i]) for i in new])
        found.append(program.run(batch(start, end)).clone())
    return found


@pytest.mark.parametrize("batch_invariant", [False, True] if DEVICE == "cuda" else [False])
def test_a_forward_pass_with_window_pages_gives_the_bits_of_whole_blocks(batch_invariant: bool) -> None:
    whole, in_pages = (logits_of(windows, batch_invariant) for windows in (None, WINDOWS))
    assert all(torch.equal(one, other) for one, other in zip(in_pages, whole, strict=True))
    assert not torch.equal(whole[-1][0], whole[-2][-1])


def test_what_moves_in_blocks_moves_in_their_pages() -> None:
    spec = KVSpec(2, 1, 8, 4, "float32", windows=replace(WINDOWS, num_pages=3))
    cache = GpuCache(spec, 5, 4, DEVICE)
    windowed = cache.windowed
    assert isinstance(windowed, GpuCache) and windowed.k.shape == (1, 3, 4, 1, 8) and cache.k.shape == (1, 5, 4, 1, 8)
    windowed.k.copy_(torch.arange(96.0).view(windowed.k.shape))
    rows = windowed.k.flatten(1, 2)[0, :, 0].clone()  # by slot
    cache.attach_pages([(4, 1), (1, 2), (4, 0)])  # the last one counts
    assert cache.page_of[[4, 1]].tolist() == [0, 2]
    cache.move([(4 * 4 + 1, 1 * 4 + 3), (1 * 4 + 3, 4 * 4)])
    expected = rows.clone()
    expected[[2 * 4 + 3, 0]] = rows[1]
    assert torch.equal(windowed.k.flatten(1, 2)[0, :, 0], expected)
    cache.swap_pages_out([(0, 3)])
    cache.copy_pages([(2, 0)])
    cache.swap_pages_in([(3, 1)])
    cache.swapped()()
    after = expected.view(3, 4, 8)
    assert torch.equal(windowed.k[0, :, :, 0], torch.stack([after[2], after[0], after[2]]))
    host = np.concatenate(cache.host_page_buffers(3)).view(np.float32)
    assert host[: 4 * 8].tolist() == after[0].flatten().tolist()
