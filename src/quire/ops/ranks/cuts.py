"""Which columns of a value a rank computes."""

from dataclasses import dataclass

from quire.core.errors import BadRequest

TILE = 16  # columns: a cache line, and the outputs that a matmul kernel computes together


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns first .. first + count of a value of `total` columns: those of this rank."""

    first: int
    count: int
    total: int
    unit: int = 1  # columns that are never separated: those of a head

    @property
    def is_whole(self) -> bool:
        return self.count == self.total


def whole(total: int) -> Cut:
    return Cut(0, total, total, total)


@dataclass(frozen=True, slots=True)
class RankIndex:
    """One rank of `size`."""

    rank: int
    size: int

    def even(self, total: int) -> Cut:
        """About as many columns as every other rank, in whole tiles where there are enough. A value with fewer columns
        than ranks is not cut."""
        if total < self.size:
            return whole(total)
        tile = TILE if total >= TILE * self.size else 1
        num_tiles = -(-total // tile)
        first, last = (min(total, tile * (num_tiles * rank // self.size)) for rank in (self.rank, self.rank + 1))
        return Cut(first, last - first, total)

    def kv_heads(self, columns: int, kv_heads: int) -> Cut:
        """The KV heads of this rank. Where there are fewer than ranks, several ranks have the same one."""
        first, last = self._kv_range(kv_heads)
        return _heads(first, last, kv_heads, columns)

    def heads(self, columns: int, heads: int, kv_heads: int) -> Cut:
        """The query heads of this rank: those that share its KV heads, or a part of them."""
        group = heads // kv_heads
        first, last = self._kv_range(kv_heads)
        if self.size <= kv_heads:
            return _heads(first * group, last * group, heads, columns)
        ranks = [rank for rank in range(self.size) if rank * kv_heads // self.size == first]
        place, count = ranks.index(self.rank), len(ranks)
        begin = first * group
        return _heads(begin + group * place // count, begin + group * (place + 1) // count, heads, columns)

    def _kv_range(self, kv_heads: int) -> tuple[int, int]:
        if self.size <= kv_heads:
            return kv_heads * self.rank // self.size, kv_heads * (self.rank + 1) // self.size
        first = self.rank * kv_heads // self.size
        return first, first + 1


def _heads(first: int, last: int, heads: int, columns: int) -> Cut:
    unit = columns // heads
    return Cut(first * unit, (last - first) * unit, columns, unit)


def check_size(size: int, heads: int) -> None:
    """Refuse more ranks than heads."""
    if size > heads:
        raise BadRequest(
            f"tensor_parallel_size is {size}, and the model has {heads} attention heads, which are not divided",
            f"use 1 to {heads}",
            param="tensor_parallel_size",
        )
