"""The KV cache that all ranks, or stages, have room for."""

from collections.abc import Sequence
from dataclasses import replace

from quire.executors.ranks.messages import AllocateRank, RankLoaded
from quire.runtime.kv import KVSize

SLOTS = ("num_slots", "num_checkpoint_slots", "num_host_slots")


def counts(size: KVSize) -> tuple[int, int, int, int, int, int, int]:
    """The sizes of a KV cache in the order in which messages have them."""
    slots = size.num_slots, size.num_checkpoint_slots, size.num_host_slots
    return size.num_blocks, size.num_host_blocks, *slots, size.num_pages, size.max_model_len


def smallest(sizes: Sequence[KVSize | RankLoaded | AllocateRank]) -> KVSize:
    """The least of all, with the shape of the first, which is a KVSize. One that has no memory for window pages has
    whole blocks, fewer than the others would have: then all have so many."""
    own = sizes[0]
    assert isinstance(own, KVSize)
    spec = own.spec
    if spec.states is not None:
        spec = replace(spec, states=replace(spec.states, **{n: min(getattr(one, n) for one in sizes) for n in SLOTS}))
    num_pages = min(one.num_pages for one in sizes)
    if spec.windows is not None:
        spec = replace(spec, windows=replace(spec.windows, num_pages=num_pages) if num_pages else None)
    num_blocks = min(one.num_blocks for one in sizes if bool(one.num_pages) == bool(num_pages))
    names = ("num_host_blocks", "max_model_len")
    return KVSize(spec, num_blocks, *(min(getattr(one, name) for one in sizes) for name in names))
