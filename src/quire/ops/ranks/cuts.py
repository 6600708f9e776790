"""Which columns of a value a rank computes."""

from dataclasses import dataclass, replace
from functools import cache

from quire.core.errors import BadRequest

MAX_RANKS = 64  # as in native/src/rank_group.h
TILE = 16  # columns: a cache line, and the outputs that a matmul kernel computes together


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns first .. first + count of a value of `total` columns: those of this rank."""

    first: int
    count: int
    total: int
    unit: int = 1  # columns that are never separated: those of a head
    of_states: bool = False  # heads of a recurrence: on no rank this is another cut by chance, or ranks would disagree

    @property
    def is_whole(self) -> bool:
        return self.count == self.total


def whole(total: int) -> Cut:
    return Cut(0, total, total, total)


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The query heads of one rank, and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    num_kv: int

    @property
    def num_columns(self) -> int:
        """The columns of queries, keys and values, counted in heads."""
        return self.count + 2 * self.num_kv


@dataclass(frozen=True, slots=True)
class RankIndex:
    """One rank of `size`. `whole_groups`: all query heads that share a KV head are one rank's, as GPU kernels want it,
    unless there are fewer KV heads than ranks."""

    rank: int
    size: int
    whole_groups: bool = False

    def even(self, total: int) -> Cut:
        """About as many columns as every other rank, in whole tiles where there are enough. A value with fewer columns
        than ranks is not cut."""
        if total < self.size:
            return whole(total)
        tile = TILE if total >= TILE * self.size else 1
        num_tiles = -(-total // tile)
        first, last = (min(total, tile * (num_tiles * rank // self.size)) for rank in (self.rank, self.rank + 1))
        return Cut(first, last - first, total)

    def kv_heads(self, columns: int, heads: int, kv_heads: int) -> Cut:
        """The KV heads of this rank. Several ranks may have the same one."""
        own = self._head_range(heads, kv_heads)
        return _heads(own.first_kv, own.num_kv, kv_heads, columns)

    def heads(self, columns: int, heads: int, kv_heads: int) -> Cut:
        """The query heads of this rank."""
        own = self._head_range(heads, kv_heads)
        return _heads(own.first, own.count, heads, columns)

    def _head_range(self, heads: int, kv_heads: int) -> HeadRange:
        if self.whole_groups:
            return _by_kv_heads(self.rank, self.size, heads, heads // kv_heads)
        return head_ranges(heads, kv_heads, self.size)[self.rank]

    def state_heads(self, heads: int, groups: int) -> HeadRange:
        """The heads of a recurrence that this rank has, and the groups of them that share b and c, or q and k: whole
        groups, or a part of one. Without groups, or with fewer heads than ranks, every rank has all."""
        if not groups or heads < self.size:
            return HeadRange(0, heads, 0, groups)
        return _by_kv_heads(self.rank, self.size, heads, heads // groups)

    def experts(self, total: int) -> Cut:
        """The experts of this rank, of which there are as many as ranks at least."""
        first, last = total * self.rank // self.size, total * (self.rank + 1) // self.size
        return Cut(first, last - first, total)

    def sharing(self, heads: int, kv_heads: int) -> dict[str, int]:
        """How this rank's query heads share its KV heads, as `OpSet.paged_attention` takes it; empty: all alike."""
        own, group = self._head_range(heads, kv_heads), heads // kv_heads
        skipped = own.first - own.first_kv * group
        uneven = own.num_kv > 1 and (skipped or own.count != own.num_kv * group)
        return {"group": group, "skipped": skipped} if uneven else {}


@cache
def head_ranges(heads: int, kv_heads: int, size: int) -> list[HeadRange]:
    """The heads of every rank. A rank has whole KV heads and all query heads that share them (or a part, where there
    are fewer KV heads than ranks), unless the largest part is smaller when query heads are divided evenly: two ranks
    then have the KV head between them."""
    group = heads // kv_heads
    layouts = [[layout(rank, size, heads, group) for rank in range(size)] for layout in (_by_kv_heads, _by_heads)]
    return min(layouts, key=lambda ranges: max(one.num_columns for one in ranges))


def _by_kv_heads(rank: int, size: int, heads: int, group: int) -> HeadRange:
    kv_heads = heads // group
    if size <= kv_heads:
        first, last = kv_heads * rank // size, kv_heads * (rank + 1) // size
        return HeadRange(first * group, (last - first) * group, first, last - first)
    kv_head = rank * kv_heads // size
    ranks = [other for other in range(size) if other * kv_heads // size == kv_head]
    first, last = (group * place // len(ranks) for place in (ranks.index(rank), ranks.index(rank) + 1))
    return HeadRange(kv_head * group + first, last - first, kv_head, 1)


def _by_heads(rank: int, size: int, heads: int, group: int) -> HeadRange:
    first, last = heads * rank // size, heads * (rank + 1) // size
    first_kv, last_kv = first // group, (last - 1) // group + 1
    return HeadRange(first, last - first, first_kv, last_kv - first_kv)


def state_columns(first: int, count: int, heads: int, columns: int) -> Cut:
    """The columns of some heads of a recurrence, in a value of all heads."""
    return replace(_heads(first, count, heads, columns), of_states=True)


def _heads(first: int, count: int, heads: int, columns: int) -> Cut:
    unit = columns // heads
    return Cut(first * unit, count * unit, columns, unit)


def check_size(size: int, heads: int, model: str = "the model") -> None:
    """Refuse more ranks than heads, or than a group has room for."""
    most = min(heads, MAX_RANKS)
    if size > most:
        raise BadRequest(
            f"tensor_parallel_size is {size}, and {model} has {heads} attention heads, which stay whole"
            if most == heads
            else f"tensor_parallel_size is {size}, and there are {MAX_RANKS} ranks at most",
            f"use 1 to {most}",
            param="tensor_parallel_size",
        )
