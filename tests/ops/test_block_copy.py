"""Blocks that move: the kernel beside plain assignments, and a cache that swaps. Compiled where there is a GPU."""

import random
from itertools import pairwise

import pytest
import torch

from quire.core.errors import DoesNotFit
from quire.ops.gpu.block_copy import copy_blocks, waves
from quire.ops.gpu.cache import GpuCache, pinned_pages
from quire.ops.kv_spec import KVSpec
from quire.ops.reference.cache import DTYPES, copy_blocks_in_order, zero_pages

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NUM_BLOCKS, NUM_HOST = 9, 7
# layers, heads, columns, slots, type: the last ones have blocks of 3 and of 10,240 words
SPECS = [
    KVSpec(3, 2, 16, 4, "float16"),
    KVSpec(2, 3, 8, 2, "int8"),
    KVSpec(2, 1, 5, 3, "fp8"),
    KVSpec(1, 1, 3, 1, "float32"),
    KVSpec(2, 5, 128, 32, "float32"),
]


def fill(pages: tuple[torch.Tensor, ...], seed: int) -> None:
    """With random bytes, so that whatever is not copied exactly is seen."""
    generator = torch.Generator().manual_seed(seed)
    for page in pages:
        rubbish = torch.randint(0, 120, (page.nbytes,), dtype=torch.uint8, generator=generator)
        page.copy_(rubbish.view(page.dtype).view(page.shape))


def made(spec: KVSpec, seed: int) -> GpuCache:
    cache = GpuCache(spec, NUM_BLOCKS, NUM_HOST, DEVICE)
    fill(cache.pages, seed)
    fill(cache.host_pages, seed + 1)
    return cache


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    if ON_GPU:
        torch.cuda.synchronize()
    return all(torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8)) for x, y in zip(a, b, strict=True))


def pairs(count: int, sources: int, targets: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(sources), rng.randrange(targets)) for _ in range(count)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.block_bytes}")
def test_a_copy_is_as_if_pair_by_pair(spec: KVSpec) -> None:
    cache = made(spec, 0)
    plain = tuple(page.clone() for page in cache.pages)
    chains = pairs(12, NUM_BLOCKS, NUM_BLOCKS, seed=1)  # blocks are read after they are written, and the other way
    copy_blocks(cache.pages, cache.pages, chains)
    copy_blocks_in_order(plain, plain, chains)
    assert same(cache.pages, plain)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.block_bytes}")
def test_blocks_go_to_the_host_and_come_back(spec: KVSpec) -> None:
    cache = made(spec, 0)
    pages, host = (tuple(page.clone() for page in side) for side in (cache.pages, cache.host_pages))
    out, back = pairs(6, NUM_BLOCKS, NUM_HOST, seed=2), pairs(6, NUM_HOST, NUM_BLOCKS, seed=3)
    copy_blocks(cache.pages, cache.host_pages, out)
    copy_blocks(cache.host_pages, cache.pages, back)
    copy_blocks_in_order(pages, host, out)
    copy_blocks_in_order(host, pages, back)
    assert same(cache.pages, pages) and same(cache.host_pages, host)


@pytest.mark.parametrize("max_programs", [1, 3, 1000])
def test_few_programs_copy_all(max_programs: int) -> None:
    cache = made(SPECS[-1], 0)
    pages, host = (tuple(page.clone() for page in side) for side in (cache.pages, cache.host_pages))
    out = [(block, block) for block in range(5)]
    copy_blocks(cache.pages, cache.host_pages, out, max_programs=max_programs)
    copy_blocks_in_order(pages, host, out)
    assert same(cache.host_pages, host)


@pytest.mark.skipif(not ON_GPU, reason="streams are a GPU's")
def test_swaps_beside_steps_are_in_order() -> None:
    """Each time: write a block, swap it out, join, write over it, and swap in what was saved."""
    spec = KVSpec(4, 8, 128, 16, "float16")
    cache = GpuCache(spec, 256, 64, DEVICE)
    for round in range(50):
        for page in cache.pages:
            page[:, :64] = round
        cache.swap_out([(block, block) for block in range(64)])
        wait = cache.swapped()
        cache.join_swaps()
        for page in cache.pages:
            page[:, :64] = -1
        cache.swap_in([(block, 128 + block) for block in range(64)])
        wait()
        assert all(bool((page == round).all()) for page in cache.host_pages)
        assert all(bool((page[:, 128:192] == round).all()) for page in cache.pages)


def test_nothing_to_copy_is_nothing() -> None:
    cache = made(SPECS[0], 0)
    before = tuple(page.clone() for page in cache.pages)
    cache.copy([])
    copy_blocks(cache.pages, cache.pages, [])
    assert same(cache.pages, before)


@pytest.mark.parametrize("seed", range(20))
def test_a_wave_may_be_copied_in_any_order(seed: int) -> None:
    chain = pairs(15, 6, 6, seed)
    actual = list(waves(chain, same_pages=True))
    assert [pair for wave in actual for pair in wave] == chain
    for wave in actual:
        for number, (_, target) in enumerate(wave):
            others = wave[:number] + wave[number + 1 :]
            assert all(target not in pair for pair in others)


def test_what_lies_apart_is_one_wave_unless_written_twice() -> None:
    assert list(waves([(0, 1), (1, 0), (0, 2)], same_pages=False)) == [[(0, 1), (1, 0), (0, 2)]]
    assert list(waves([(0, 1), (1, 1)], same_pages=False)) == [[(0, 1)], [(1, 1)]]


class Registry:
    """CUDA's, of pinned ranges of memory, where there is no CUDA."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == 0 and flags == 3
        self.ranges[address] = size
        return self.failure

    def cudaHostUnregister(self, address: int) -> None:
        del self.ranges[address]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.block_bytes}")
def test_pages_of_the_host_lie_in_one_range_that_is_pinned(spec: KVSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registry)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    owner = Registry()
    pages = pinned_pages(spec, NUM_HOST, owner)
    assert [(page.shape, page.dtype) for page in pages] == [
        (x.shape, x.dtype) for x in zero_pages(spec, NUM_HOST, "cpu")
    ]
    ((first, size),) = registry.ranges.items()
    places = sorted((page.data_ptr(), page.data_ptr() + page.nbytes) for page in pages)
    assert first <= places[0][0] and places[-1][1] <= first + size
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    fill(pages, 0)
    del owner
    assert not registry.ranges
    assert pinned_pages(spec, 0, registry)[0].shape[1] == 0 and not registry.ranges


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Registry(failure=2))
    with pytest.raises(DoesNotFit, match=r"0\.00 GiB of memory could not be pinned for swap_space \(CUDA error 2\)"):
        pinned_pages(SPECS[0], NUM_HOST, Registry())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: memory is pinned for it")
def test_copies_follow_the_stream_and_the_host_does_not_wait() -> None:
    """A block is swapped out, overwritten and swapped in behind a step that takes long: the order is the stream's."""
    spec = KVSpec(4, 8, 128, 16, "bfloat16")
    cache = made(spec, 0)
    assert all(page.is_pinned() for page in cache.host_pages)
    first = tuple(page[:, 0].clone() for page in cache.pages)
    cache.swap_out([(8, 6)]), cache.swap_in([(6, 8)])  # compiled before it is timed
    a = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(4):
        a = a @ a  # some tens of milliseconds
    cache.swap_out([(0, 3)])
    for page in cache.pages:
        page[:, 0].zero_()
    cache.swap_in([(3, 1), (3, 2)])
    cache.copy([(1, 0), (0, 5)])
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the host waited for a copy"
    assert same(tuple(page[:, 5] for page in cache.pages), first)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: memory is pinned for it")
@pytest.mark.parametrize("name", DTYPES)
def test_pinned_memory_is_given_back(name: str) -> None:
    cache = GpuCache(KVSpec(2, 2, 64, 16, name), 2, 3, DEVICE)
    host = cache.host_pages
    assert all(page.is_pinned() for page in host)
    del cache
    assert not any(page.is_pinned() for page in host)
