"""Drafts of Medusa's heads: all from the target's last hidden state, each for a position, or a level, of its own."""

from collections.abc import Mapping, Sequence

import numpy as np

from quire.core.draft_tree import ROOT, DraftTree
from quire.core.errors import BadRequest
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Int32, ProgramSpec, StepBatch
from quire.runtime.spec.growing_tree import GrowingTree
from quire.runtime.spec.head import HeadProposer
from quire.runtime.spec.proposer import ProposerContext

NO_CACHE = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="float16")


class Medusa(HeadProposer):
    """Head i drafts the token i + 1 positions behind the one that was sampled last, whatever the tokens between are. So
    in a tree, all nodes of a level have the same children."""

    def __init__(
        self,
        context: ProposerContext,
        num_tokens: int,
        draft_tensor_parallel_size: int = 1,
        tree_nodes: int = 0,
        tree_top_k: int = 0,
    ) -> None:
        super().__init__(context, num_tokens, tree_nodes, tree_top_k)
        if num_tokens > (num_heads := len(self._head.forwards)):
            raise BadRequest(
                f"num_speculative_tokens is {num_tokens}, and there are {num_heads} heads",
                f"ask for {num_heads} or less",
                param="speculative_config",
            )
        cache = context.ops.new_cache(NO_CACHE, 1)
        self._programs = [
            context.ops.compile(
                forward,
                cache,
                ProgramSpec(context.max_rows, context.max_rows, NO_CACHE.block_size, hidden=self._hidden),
            )
            for forward in self._head.forwards[:num_tokens]
        ]

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {row: [] for row in texts}
        rows = list(texts)
        for number, program in enumerate(self._programs):
            drawn = self._draw(program, self._batch(rows, texts), rows)
            for row, token in drawn.items():
                drafts[row].append(token)
            rows = [row for row in drawn if counts[row] > number + 1]
            if not rows:
                break
        return drafts

    def _draft_trees(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, DraftTree]:
        trees = {row: GrowingTree() for row in texts}
        batch = self._batch(list(texts), texts)
        for level, program in enumerate(self._programs):
            lines = self._most_likely(program, batch, self._num_candidates(texts))
            for (row, tree), line in zip(trees.items(), lines, strict=True):
                parents = tree.likeliest(self.tree_nodes) if level else [ROOT]
                tree.add_level(parents, self._children(row, len(texts[row]) + level, [line]) * len(parents))
        return {row: tree.best(counts[row]) for row, tree in trees.items()}

    def _batch(self, rows: Sequence[int], texts: Mapping[int, Int32]) -> StepBatch:
        return _batch(np.concatenate([self._rows_of(row, len(texts[row]) - 2, texts[row]) for row in rows]))


def _batch(hidden_rows: Int32) -> StepBatch:
    """A sequence of one token for each row. Only hidden states are read: the rest is filled in."""
    zeros = np.zeros(len(hidden_rows), np.int32)
    lines = np.arange(len(hidden_rows) + 1, dtype=np.int32)
    return StepBatch(
        ids=zeros,
        positions=zeros,
        slots=zeros,
        seq_starts=lines,
        context_lens=zeros + 1,
        block_tables=zeros[:, None],
        logit_rows=lines[:-1],
        hidden_rows=hidden_rows,
    )
