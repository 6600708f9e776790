"""Rows of q, k and v that a checkpoint stores in another order than ours, which is all of q, then k, then v, and in a
head the two columns of a rotary pair half the rotated columns apart."""

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int32]


def groups_apart(kv_heads: int, heads: int, head_dim: int) -> Order:
    """Stored are, for each key head, the query heads that share it, then it, then its value head."""
    rows = np.arange((heads + 2 * kv_heads) * head_dim, dtype=np.int32)
    grouped = rows.reshape(kv_heads, heads // kv_heads + 2, head_dim)
    return np.concatenate([grouped[:, :-2].ravel(), grouped[:, -2].ravel(), grouped[:, -1].ravel()])


def pairs_apart(heads: int, head_dim: int, rotary_dim: int) -> Order:
    """Stored are the columns of a pair side by side, in the first `rotary_dim` rows of a head."""
    rows = np.arange(heads * head_dim, dtype=np.int32).reshape(heads, head_dim)
    turning, rest = rows[:, :rotary_dim], rows[:, rotary_dim:]
    return np.concatenate([turning[:, ::2], turning[:, 1::2], rest], axis=1).ravel()
