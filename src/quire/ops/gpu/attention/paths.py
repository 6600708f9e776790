"""Trees of drafts where a row must not depend on the batch: every token is a sequence of its own, with a path.

A path says where the positions of a token's ancestors lie. Attention goes over positions in the order of a chain, and
so gives the token the bits that it would have in one. Sequences without a tree stay as they are."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.ops.opset import WORD_BITS, Int32, Int64, StepBatch

NO_PATH = 2**30  # no position reaches it


class PathArgs(NamedTuple):
    begins: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Paths:
    begins: Tensor  # [S] int32: the position at which the path of a sequence begins, or NO_PATH
    places: Tensor  # [S, WORD_BITS] int32: the places of the positions from there on

    def args(self) -> PathArgs:
        return PathArgs(self.begins, self.places)


def split_trees(batch: StepBatch) -> tuple[StepBatch, Int32, Int32]:
    """-> the step with a sequence for every token of a tree, begins and places"""
    assert batch.ancestors is not None
    owners, starts, contexts, begins, places = [], [0], [], [], []
    for seq, (first, end) in enumerate(zip(batch.seq_starts.tolist(), batch.seq_starts[1:].tolist(), strict=False)):
        words = batch.ancestors[first:end]
        if _is_chain(words):
            owners.append(seq)
            starts.append(end)
            contexts.append(int(batch.context_lens[seq]))
            begins.append(NO_PATH)
            places.append([0] * WORD_BITS)
            continue
        for token, word in enumerate(words.tolist(), first):
            bits = [bit for bit in range(WORD_BITS) if word >> bit & 1]
            num_before = int(batch.positions[token]) + 1 - len(bits)  # places before the tree
            path = [num_before + bit for bit in bits]
            owners.append(seq)
            starts.append(token + 1)
            contexts.append(num_before + len(path))
            begins.append(num_before)
            places.append([*path, *[0] * (WORD_BITS - len(path))])
    step = replace(
        batch,
        seq_starts=np.array(starts, np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=batch.block_tables[owners],
        source_lens=None if batch.source_lens is None else batch.source_lens[owners],
        source_tables=None if batch.source_tables is None else batch.source_tables[owners],
        ancestors=None,
    )
    return step, np.array(begins, np.int32), np.array(places, np.int32)


def _is_chain(words: Int64) -> bool:
    """Whether a sequence has too many tokens for a tree, or tokens that see all before them."""
    return len(words) > WORD_BITS or bool((words & (words + 1) == 0).all())
