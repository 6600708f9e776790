"""Steps that follow each other without the host: the first reads what is new of the texts, and each other one the token
that the one before sampled, with the hidden state that it kept. All of them are one CUDA graph, and one copy brings
their arrays."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.accepted import continue_behind_accepted
from quire.ops.gpu.accepted_trees import follow_accepted_branch, move_levels
from quire.ops.gpu.aligned import pack, views
from quire.ops.gpu.attention.pages import Runs, next_power_of_two
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.device_timer import new_timer
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.ops.gpu.sampling.rows import MAX_KEPT_DRAFTS, Features
from quire.ops.gpu.sampling.sampler import EDIT_FEATURES, DeviceSampler, padded
from quire.ops.gpu.tree_steps import TreeSteps, grown, padded_rows
from quire.ops.opset import (
    GrownTree,
    Int32,
    StepBatch,
    TreeKeeper,
    TreeRoots,
    TreeShape,
    VerifiedLines,
    VerifiedRuns,
)

MAX_NEW_TOKENS = 8  # of a sequence on average, that a chain of fewer drafts reads first


class DraftChain:
    """`width`: blocks of a table."""

    def __init__(
        self,
        forward: Callable[[GpuBatch], Tensor],
        cache: GpuCache,
        sampler: DeviceSampler,
        hidden: GpuHiddenStates,
        max_model_len: int,
        width: int,
        batch_invariant: bool,
    ) -> None:
        self._forward, self._cache, self._sampler, self._hidden = forward, cache, sampler, hidden
        self._max_model_len, self._width, self._batch_invariant = max_model_len, width, batch_invariant
        self._graphs = LaunchGraphs(cache.k.device)
        self.takes_trees = not batch_invariant and not cache.spec.latent
        self._trees = TreeSteps(forward, cache, hidden.rows.dtype, max_model_len, width)
        # What the target's sampler has verified, at a place of its own: graphs do not depend on how many drafts it had.
        most = padded(sampler.num_rows) * (1 + MAX_KEPT_DRAFTS)
        self._verified = torch.zeros(most, dtype=torch.int32, device=cache.k.device)
        self._timer = new_timer(cache.k.device)

    def takes(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        """A single draft of a single row may be a trial, which is compared with what is sampled without it."""
        return max(count, len(rows)) > 1 and self._has_room(rows, count, num_tokens)

    def takes_verified(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        return self._has_room(rows, count, num_tokens) and not self._sampler.needs(rows) & EDIT_FEATURES

    def _has_room(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        has_room = num_tokens <= padded(len(rows)) * max(count + 1, MAX_NEW_TOKENS)
        return has_room and count <= MAX_KEPT_DRAFTS and not self._sampler.needs(rows) & Features.ON_HOST

    def run(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        count: int,
        target: DeviceSampler,
        verified: VerifiedLines | None = None,
    ) -> bool:
        self._sampler.upload()
        features = self._sampler.needs(rows)
        self._sampler.reserve(features)
        tokens_of_seq = max(count + 1, next_power_of_two(-(-batch.num_tokens // padded(len(rows)))))
        arrays = [*self._arrays(batch, rows, count, tokens_of_seq), kept_places(rows, count, target)]
        num_arrays = len(arrays)
        arrays += [] if verified is None else padded_lines(verified, len(arrays[0]), padded(len(rows)))
        shapes = [array.shape for array in arrays]
        # Attention takes a few tokens of each sequence at once; where one has read less before, as it takes prompts.
        longest = max(int(np.diff(batch.seq_starts).max()), count + 1)
        fits = self.takes_trees and longest <= max(count + 1, MAX_NEW_TOKENS)
        max_queries = next_power_of_two(longest) if fits else 1

        def launch(on_device: Tensor) -> Tensor:
            on_device_arrays = views(on_device, shapes)
            *of_steps, kept = on_device_arrays[:num_arrays]
            if verified is not None:
                self._continue(of_steps, on_device_arrays[num_arrays:], target)
            drafts = self._steps(of_steps, features, max_queries).clamp(min=0)  # where none was sampled, any will do
            return target.last.index_copy_(0, kept.flatten().long(), drafts.flatten())

        key = padded(len(rows)), count, features, max_queries, verified is not None, tokens_of_seq
        is_timed = self._graphs.is_captured(key)  # what is compiled or captured tells nothing
        with torch.inference_mode():
            if verified is not None:
                self._take_verified(target)
            if is_timed:
                self._timer.start()
            self._graphs.run(key, pack(arrays).numpy(), launch)
            if is_timed:
                self._timer.stop(len(rows), count)
        return is_timed

    def read_drafts(self, row: int, count: int, target: DeviceSampler) -> list[int]:
        places = slice(row + target.num_rows, row + (1 + count) * target.num_rows, target.num_rows)
        return [int(token) for token in target.last[places].tolist()]

    def take_steps(self) -> list[tuple[int, float]]:
        return self._timer.take()

    def _take_verified(self, target: DeviceSampler) -> None:
        of_lines = target.verified[: len(self._verified)]  # behind those of all lines is padding
        self._verified[: len(of_lines)].copy_(of_lines)

    # -- trees -----------------------------------------------------------------------------------------------------

    def takes_unknown_trees(self, rows: Sequence[int], target: DeviceSampler) -> bool:
        return self.takes_trees and target.takes_trees(rows)

    def grow(
        self, logits: Tensor, kept: Tensor, roots: TreeRoots, shape: TreeShape, keeper: TreeKeeper | None = None
    ) -> Callable[[], list[GrownTree]]:
        if keeper is not None:
            keeper.sampler.unknown_depth = shape.num_levels
        return self._trees.run(logits, kept, roots, shape, keeper)

    def grow_behind(
        self, batch: StepBatch, roots: TreeRoots, shape: TreeShape, keeper: TreeKeeper, verified: VerifiedRuns
    ) -> tuple[Callable[[], list[GrownTree]], bool]:
        target, count, size = keeper.sampler, 1 + verified.max_depth, self._cache.spec.block_size
        target.unknown_depth = shape.num_levels
        of_trees = self._trees.arrays(replace(roots, keys=roots.keys[:, : shape.num_levels]), shape)
        arrays = [*self._first_step(batch, keeper.rows, count, verified, roots), *of_trees]
        shapes = [array.shape for array in arrays]

        def launch(on_device: Tensor) -> Tensor:
            of_first, of_trees = views(on_device, shapes)[:10], views(on_device, shapes)[10:]
            ids, positions, slots, hidden_rows, rows, contexts, starts, first_lines, known, more_keys = of_first
            _, keys, logit_rows, _, _, tables, *of_steps = of_trees
            first_step, steps = (ids, hidden_rows, rows, logit_rows), thirds(of_steps)
            of_target = self._verified, target.params, target.paths
            follow_accepted_branch(first_step, (first_lines, known), *of_target, verified.window)
            move_levels(logit_rows, known, rows, steps, keys, more_keys, tables, count, size)
            runs, hidden = Runs(starts, contexts, tables), self._hidden.rows.index_select(0, hidden_rows)
            queries = next_power_of_two(count)
            step = self._batch(ids, positions, slots, runs, logit_rows, hidden, max_queries=queries)
            logits = self._forward(step)
            assert step.kept is not None, "the program keeps no hidden states"
            found = self._trees.levels(logits, step.kept, of_trees, shape)
            target.keep_trees(found, rows, shape.num_levels)
            return found

        num_seqs = len(keeper.rows)
        key = "tree", padded(num_seqs), count, shape
        is_timed = self._graphs.is_captured(key)
        with torch.inference_mode():
            self._take_verified(target)
            if is_timed:
                self._timer.start()
            found = self._graphs.run(key, pack(arrays).numpy(), launch)[:num_seqs]
            if is_timed:
                self._timer.stop(shape.top_k * num_seqs, shape.num_levels)
            return grown(found, whole=True), is_timed

    def _first_step(
        self, batch: StepBatch, rows: Sequence[int], count: int, verified: VerifiedRuns, roots: TreeRoots
    ) -> list[Int32]:
        """ids, positions, slots and hidden_rows [S * count], rows and contexts [S], seq_starts [S + 1], first lines and
        known tokens [S], keys [levels, 2, S]. S is padded."""
        n, s = len(rows), padded(len(rows))
        of_tokens = np.zeros((4, s * count), np.int32)
        of_tokens[2] = -1
        of_tokens[1:3, : n * count] = batch.positions, batch.slots
        contexts, starts = np.zeros(s, np.int32), np.full(s + 1, n * count, np.int32)
        contexts[:n], starts[: n + 1] = batch.context_lens, batch.seq_starts
        first_lines, known = of_verified = np.zeros((2, s), np.int32)
        of_verified[:, :n] = verified.first_lines, verified.known
        keys = np.zeros((roots.keys.shape[1], 2, s), np.int32)
        keys[:, :, :n] = roots.keys.astype(np.uint32).view(np.int32).transpose(1, 2, 0)
        return [*of_tokens, padded_rows(rows), contexts, starts, first_lines, known, keys]

    def _arrays(self, batch: StepBatch, rows: Sequence[int], count: int, tokens_of_seq: int) -> list[Int32]:
        """ids, positions, slots and hidden_rows [T] of the first step; rows, ids of the next step, context_lens and
        logit_rows [S], seq_starts [S + 1], positions, contexts and slots of the next steps [count - 1, S], block_tables
        [S, W]. T and S are padded: no row, slot -1, an empty context, and the last of the hidden states."""
        t, n, s = batch.num_tokens, len(rows), padded(len(rows))
        assert batch.hidden_rows is not None
        of_tokens = np.zeros((4, s * tokens_of_seq), np.int32)
        of_tokens[2], of_tokens[3] = -1, len(self._hidden.rows) - 1
        of_tokens[:, :t] = batch.ids, batch.positions, batch.slots, batch.hidden_rows
        of_seqs = np.zeros((4, s), np.int32)
        of_seqs[0] = -1
        of_rows = np.array(rows, np.int32)
        of_seqs[:, :n] = of_rows, ~of_rows, batch.context_lens, batch.logit_rows
        starts = np.full(s + 1, t, np.int32)
        starts[: n + 1] = batch.seq_starts
        positions, contexts, slots = np.zeros((3, count - 1, s), np.int32)
        places = positions[:, :n] = batch.context_lens + np.arange(count - 1, dtype=np.int32)[:, None]
        contexts[:, :n] = places + 1
        size = self._cache.spec.block_size
        slots[:, n:] = -1
        slots[:, :n] = batch.block_tables[np.arange(n), places // size] * size + places % size
        tables = np.zeros((s, self._width), np.int32)
        used = min(batch.block_tables.shape[1], self._width)
        tables[:n, :used] = batch.block_tables[:, :used]
        return [*of_tokens, *of_seqs, starts, *positions, *contexts, *slots, tables]

    def _continue(self, arrays: Sequence[Tensor], verified: Sequence[Tensor], target: DeviceSampler) -> None:
        """What of the arrays depends on how many drafts are accepted."""
        ids, rows, (logit_rows, starts), tables = arrays[0], arrays[4], arrays[7:9], arrays[-1]
        params, size = (target.params, self._sampler.params), self._cache.spec.block_size
        steps = thirds(arrays[9:-1])
        of_lines = self._verified
        continue_behind_accepted(ids, rows, logit_rows, starts, steps, tables, verified, of_lines, *params, size)

    def _steps(self, arrays: Sequence[Tensor], features: int, max_queries: int) -> Tensor:
        """-> the tokens of each step [count, S]"""
        (ids, positions, slots, hidden_rows), of_seqs, of_steps = arrays[:4], arrays[4:9], arrays[9:-1]
        rows, next_ids, context_lens, logit_rows, starts = of_seqs
        tables = arrays[-1]
        hidden = self._hidden.rows.index_select(0, hidden_rows)
        runs = Runs(starts, context_lens, tables)
        step = self._batch(ids, positions, slots, runs, logit_rows, hidden, max_queries=max_queries)
        tokens = [self._sampler.launch(self._forward(step), rows, len(rows), features)]
        assert step.kept is not None, "the program keeps no hidden states"
        hidden = step.kept.index_select(0, logit_rows).to(hidden.dtype)
        lines = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        for positions, contexts, slots in zip(*thirds(of_steps), strict=True):
            runs = Runs(lines, contexts, tables)
            step = self._batch(next_ids, positions, slots, runs, lines[:-1], hidden, decodes=True)
            tokens.append(self._sampler.launch(self._forward(step), rows, len(rows), features))
            assert step.kept is not None
            hidden = step.kept.to(hidden.dtype)
        return torch.stack(tokens)

    def _batch(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        runs: Runs,
        logit_rows: Tensor,
        hidden: Tensor,
        decodes: bool = False,
        max_queries: int = 1,
    ) -> GpuBatch:
        """`decodes`: one token of each sequence, and nothing else; `max_queries` above 1: at most so many."""
        return GpuBatch(
            TokenIds(ids, self._sampler.last),
            positions,
            slots,
            runs,
            logit_rows,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=not decodes and max_queries == 1,
            batch_invariant=self._batch_invariant,
            all_logits=decodes,
            max_queries=max_queries,
            hidden=hidden,
        )


def kept_places(rows: Sequence[int], count: int, sampler: DeviceSampler) -> Int32:
    """Where the sampler keeps so many drafts of these rows [count, S]; those of padding go to the last place."""
    places = np.full((count, padded(len(rows))), len(sampler.last) - 1, np.int32)
    places[:, : len(rows)] = np.array(rows) + np.arange(1, 1 + count)[:, None] * sampler.num_rows
    return places


def padded_lines(verified: VerifiedLines, num_tokens: int, num_seqs: int) -> list[Int32]:
    lines, known, lengths = np.zeros(num_tokens, np.int32), *np.zeros((2, num_seqs), np.int32)
    lines[: len(verified.lines)] = verified.lines
    known[: len(verified.known)], lengths[: len(verified.known)] = verified.known, verified.lengths
    return [lines, known, lengths]


def thirds(arrays: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    size = len(arrays) // 3
    return [arrays[:size], arrays[size : 2 * size], arrays[2 * size :]]
