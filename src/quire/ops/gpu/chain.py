"""Steps that follow each other without the host: each reads the token that the one before sampled, and the hidden state
that it kept. All of them are one CUDA graph, and one copy brings their arrays."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.aligned import pack, views
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.device_timer import DeviceTimer
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.ops.gpu.sampling.rows import MAX_KEPT_DRAFTS, Features
from quire.ops.gpu.sampling.sampler import DeviceSampler, padded
from quire.ops.gpu.tree_steps import TreeSteps
from quire.ops.opset import Int32, StepBatch, TreeNode, TreeRoots, TreeShape


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
        self._trees = TreeSteps(forward, cache, hidden, max_model_len, width)
        self._timer = DeviceTimer(cache.k.device)

    def takes(self, rows: Sequence[int], count: int) -> bool:
        return 1 < count <= MAX_KEPT_DRAFTS and not self._sampler.needs(rows) & Features.ON_HOST

    def run(self, batch: StepBatch, rows: Sequence[int], count: int, target: DeviceSampler) -> None:
        features = self._sampler.needs(rows)
        arrays = [*self._arrays(batch, rows, count - 1), kept_places(rows, count, target)]
        shapes = [array.shape for array in arrays]

        def launch(on_device: Tensor) -> Tensor:
            *of_steps, places = views(on_device, shapes)
            drafts = self._steps(of_steps, features).clamp(min=0)  # where none could be sampled, any other will do
            return target.last.index_copy_(0, places.flatten().long(), drafts.flatten())

        with torch.inference_mode():
            key = len(arrays[0]), count, features
            self._graphs.run(key, pack(arrays).numpy(), launch)
        self._timer.stop()

    def read_drafts(self, row: int, count: int, target: DeviceSampler) -> list[int]:
        places = slice(row + target.num_rows, row + (1 + count) * target.num_rows, target.num_rows)
        return [int(token) for token in target.last[places].tolist()]

    def start_timer(self) -> None:
        self._timer.start()

    def take_seconds(self) -> list[float]:
        return self._timer.take()

    def grow(self, logits: Tensor, roots: TreeRoots, shape: TreeShape) -> Callable[[], list[list[TreeNode]]]:
        return self._trees.run(logits, roots, shape)

    def _arrays(self, batch: StepBatch, rows: Sequence[int], count: int) -> list[Int32]:
        """rows, ids, positions, context_lens, hidden_rows [S], seq_starts [S + 1], slots [count, S], block_tables
        [S, W]; S is padded: no row, slot -1, an empty context, and the last of the hidden states."""
        n, s = len(rows), padded(len(rows))
        of_seqs = np.zeros((5, s), np.int32)
        of_seqs[0], of_seqs[4] = -1, len(self._hidden.rows) - 1
        assert batch.hidden_rows is not None
        of_seqs[:, :n] = np.array([rows, batch.ids, batch.positions, batch.positions + 1, batch.hidden_rows])
        positions = batch.positions + np.arange(count, dtype=np.int32)[:, None]  # [count, n]
        size = self._cache.spec.block_size
        slots = np.full((count, s), -1, np.int32)
        slots[:, :n] = batch.block_tables[np.arange(n), positions // size] * size + positions % size
        tables = np.zeros((s, self._width), np.int32)
        used = min(batch.block_tables.shape[1], self._width)
        tables[:n, :used] = batch.block_tables[:, :used]
        return [*of_seqs, np.arange(s + 1, dtype=np.int32), slots, tables]

    def _steps(self, arrays: Sequence[Tensor], features: int) -> Tensor:
        """-> the token that stands for an id, and those of each step [1 + count, S]"""
        rows, ids, positions, context_lens, places, seq_starts, slots, tables = arrays
        tokens, targets = [self._sampler.last[(~ids).clamp(min=0)]], places.long()
        for number, of_step in enumerate(slots):
            step = GpuBatch(
                TokenIds(ids, self._sampler.last),
                positions + number,
                of_step.contiguous(),
                Runs(seq_starts, torch.where(context_lens > 0, context_lens + number, 0), tables),
                seq_starts[:-1],
                self._cache,
                self._max_model_len,
                decodes=True,
                prefills=False,
                batch_invariant=self._batch_invariant,
                all_logits=True,
                hidden=self._hidden.rows[places],
            )
            tokens.append(self._sampler.launch(self._forward(step), rows, len(rows), features))
            assert step.kept is not None, "the program keeps no hidden states"
            if number + 1 < len(slots):
                self._hidden.rows.index_copy_(0, targets, step.kept.to(self._hidden.rows.dtype))
        return torch.stack(tokens)


def kept_places(rows: Sequence[int], count: int, sampler: DeviceSampler) -> Int32:
    """Where the sampler keeps so many drafts of these rows [count, S]; those of padding go to the last place."""
    places = np.full((count, padded(len(rows))), len(sampler.last) - 1, np.int32)
    places[:, : len(rows)] = np.array(rows) + np.arange(1, 1 + count)[:, None] * sampler.num_rows
    return places
