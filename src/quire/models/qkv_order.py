"""The order of the rows of q, k and v: from a checkpoint's to ours.

Ours is all of q, then k, then v. In a head, the two columns of a rotary pair are rotary_dim / 2 apart."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int32]  # row i is the stored row order[i]


def ungrouped_qkv(kv_heads: int, heads: int, head_dim: int) -> Order:
    """For a tensor that has, for each key head, the query heads that share it, then the key head and the value head."""
    rows = np.arange((heads + 2 * kv_heads) * head_dim, dtype=np.int32)
    grouped = rows.reshape(kv_heads, heads // kv_heads + 2, head_dim)
    return np.concatenate([grouped[:, :-2].ravel(), grouped[:, -2].ravel(), grouped[:, -1].ravel()])


def parted_qkv(parts: int, sizes: Sequence[int]) -> Order:
    """For a tensor of as many parts, each of which has its share of q, then of k, then of v. `sizes`: of all parts."""
    rows = np.arange(sum(sizes), dtype=np.int32).reshape(parts, -1)
    ends = np.cumsum([size // parts for size in sizes])
    return np.concatenate([rows[:, end - size // parts : end].ravel() for end, size in zip(ends, sizes, strict=True)])


def parted_kv(kv_heads: int, head_dim: int) -> Order:
    """For a tensor that has the value of each head behind its key."""
    return np.arange(2 * kv_heads * head_dim, dtype=np.int32).reshape(kv_heads, 2, head_dim).swapaxes(0, 1).ravel()


def deinterleaved_rope(heads: int, head_dim: int, rotary_dim: int) -> Order:
    """For a tensor that has rotary pairs side by side in the first `rotary_dim` rows of each head."""
    rows = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, head_dim)
    rope, rest = rows[:, :rotary_dim], rows[:, rotary_dim:]
    return np.concatenate([rope[:, ::2], rope[:, 1::2], rest], axis=1).ravel()


def swapped_rope(heads: int, head_dim: int) -> NDArray[np.int32]:
    """The two columns of each rotary pair in turned order. They then rotate the other way round."""
    columns = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, 2, head_dim // 2)
    return columns[:, ::-1].ravel()
