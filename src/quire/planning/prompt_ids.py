"""Prompts of a workload: ranges of token ids, since an hour of requests has many millions of tokens."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload


class JoinedIds(Sequence[int]):
    """Ranges one after the other: a prefix that prompts share, what was said before, tokens of its own."""

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Sequence[range]) -> None:
        self.parts = tuple(parts)
        self._length = sum(map(len, self.parts))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


def parts_of(ids: Sequence[int]) -> tuple[Sequence[int], ...]:
    return ids.parts if isinstance(ids, JoinedIds) else (ids,)


def joined(*prompts: Sequence[int]) -> Sequence[int]:
    """One prompt of several, whose parts it keeps."""
    parts = [part for prompt in prompts for part in parts_of(prompt) if part]
    if all(isinstance(part, range) for part in parts):
        return JoinedIds(parts) if len(parts) > 1 else parts[0] if parts else range(0)  # type: ignore[arg-type]
    return list(chain.from_iterable(parts))


def simulated_tokens(ids: Sequence[int]) -> list[int]:
    """What a scheduler is given: every token of a range is the range's first id. No two ranges of a workload overlap,
    so that tokens are equal where ids are; one number in memory stands for all of them."""
    tokens: list[int] = []
    for part in parts_of(ids):
        tokens += [part.start] * len(part) if isinstance(part, range) else part
    return tokens
