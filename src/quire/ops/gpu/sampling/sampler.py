"""The sampler on the device: kernels that sample the tokens of ops/reference/sampler.py.

`launch` is a few kernels without synchronization or allocation, so it may be captured in a graph. `last` holds the
token sampled last for each row, and behind those each row's drafts: the next step may read them before the host has
seen them. Rows with features that no kernel has are sampled by the CPU's sampler: their logits are copied, and the step
waits for them.

Drafts are verified by one launch: which token a line samples is known from its logits and its position alone. Only
where logits are edited it depends on the tokens before, and those rows are sampled level by level."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from quire.core.draft_tree import ROOT, depths, is_unknown
from quire.core.plan import SampledRow
from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.accept import MAX_PATH, DraftLines, accept
from quire.ops.gpu.sampling.accepted import accepted_draws, divided_as, finish_at_once
from quire.ops.gpu.sampling.cutoff import find_cutoffs
from quire.ops.gpu.sampling.filter import bracket_cutoffs
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.ops.gpu.sampling.job import MAX_TILES, Job, Scratch, Split
from quire.ops.gpu.sampling.kept_trees import keep_trees, look_up_lines
from quire.ops.gpu.sampling.logprobs import Wanted, begin_logprobs, to_host
from quire.ops.gpu.sampling.pick import pick, race
from quire.ops.gpu.sampling.rows import DeviceRows, Features, features_of
from quire.ops.gpu.sampling.tile_maxima import find_tile_maxima
from quire.ops.native.sampler import NativeSampler
from quire.ops.opset import Int32, Masks
from quire.ops.reference.sampler import apply_masks
from quire.ops.row_params import RowParams
from quire.ops.sampled_row import Logprobs, sampled_row

OPEN_CAPACITY = 2048  # open tokens that top_k and top_p sort out in registers; a slower kernel takes more
MAX_VOCAB = 1 << 19  # 2**19 weights of 2**44 fill 63 bits
EDIT_FEATURES = Features.BIASED | Features.MARKED | Features.WATERMARKED
MAX_SMALL_BATCH = 8
SMALLEST_TILE = MAX_VOCAB // MAX_TILES.value
MAX_LINES_AT_ONCE = 2048  # of drafts: scratch of 16 KiB each
MIN_SCRATCH = 64  # lines


def split_for(lines: int) -> Split:
    """A few lines have small tiles, so that the whole device works on them."""
    return Split(tile=SMALLEST_TILE, warps=4) if lines <= MAX_SMALL_BATCH else Split(tile=4096, warps=8)


def padded(count: int) -> int:
    """Lines of a launch that may become a graph: there are few sizes, and a line without a row costs nothing."""
    return next_power_of_two(count) if count <= MAX_SMALL_BATCH else -(-count // 16) * 16


class DeviceSampler:
    """Implements `Sampler`. `split` and `open_capacity` change the speed, and never a token."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cuda",
        *,
        split: Split | None = None,
        open_capacity: int = OPEN_CAPACITY,
    ) -> None:
        if not 2 <= vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab is {vocab_size}, and 2 to {MAX_VOCAB - 1} is possible")
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, torch.device(device)
        self._split, self._open_capacity = split, open_capacity
        self._tiles = -(-vocab_size // (split.tile if split else SMALLEST_TILE))
        assert self._tiles <= MAX_TILES.value
        self._rows = DeviceRows(num_rows, vocab_size, self.device)
        self._params: dict[int, RowParams] = {}
        self._features: dict[int, int] = {}  # bits of Features
        self._host = NativeSampler(num_rows, vocab_size)  # holds the rows that are sampled on the host
        self._graphs = LaunchGraphs(self.device)
        self._scratch = {0: self._new_scratch(padded(num_rows))}  # by lines of drafts, up to powers of two; 0: without
        self._no_depths = torch.zeros(padded(num_rows), dtype=torch.int32, device=self.device)
        self.last, self.params, self.trees = self._rows.last, self._rows.params, self._rows.trees
        self.unknown_depth = 0  # of the trees that are kept, at most
        self.paths = torch.zeros((num_rows, MAX_PATH.value), dtype=torch.int32, device=self.device)  # of `accept`
        self.verified = torch.zeros(0, dtype=torch.int32, device=self.device)  # [lines] tokens, until the next `verify`

    # -- rows ------------------------------------------------------------------------------------------------------

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int, mu: float | None = None
    ) -> None:
        """Nothing is sent before `upload`."""
        if not 0 <= row < self.num_rows or row in self._params:
            raise ValueError(f"row {row} is held or does not exist")
        if len(tokens) and (features := self._rows.features_before(row, params, num_prompt)) is not None:
            self._check_ids(tokens[-1:])
            self._rows.move(row, len(tokens), int(tokens[-1]))
            self._params[row], self._features[row] = params, features
            return
        self._check_ids(tokens, [token for token, _ in params.logit_bias], params.allowed or (), *params.banned)
        self._check_ids(params.logprob_ids)
        features = features_of(params, self.vocab_size)
        if features & Features.ON_HOST:
            self._host.admit(row, params, tokens, num_prompt, mu)
        else:
            self._rows.admit(row, params, tokens, num_prompt)
        self._params[row], self._features[row] = params, features

    def retire(self, row: int) -> None:
        """Nothing is sent: a row is overwritten when it is admitted again."""
        if self._features.pop(row) & Features.ON_HOST:
            self._host.retire(row)
        else:
            self._rows.retire(row)
        del self._params[row]

    def admit_all(
        self, rows: Sequence[int], params: Sequence[RowParams], texts: Sequence[Int32], num_prompts: Sequence[int]
    ) -> None:
        """Rows whose last owner had the same parameters have only their tokens moved."""
        lasts = [int(text[-1]) for text in texts]
        self._check_ids(lasts)
        for row, of_row, text, num_prompt, last in zip(rows, params, texts, num_prompts, lasts, strict=True):
            features = None if row in self._params else self._rows.features_before(row, of_row, num_prompt)
            if features is None:
                self.admit(row, of_row, text, num_prompt)
            else:
                self._rows.move(row, len(text), last)
                self._params[row], self._features[row] = of_row, features

    def retire_all(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.retire(row)

    def upload(self) -> None:
        """Send the rows admitted since the last upload, without waiting. Before `launch`, or the replay of its
        graph."""
        self._rows.upload()

    def needs(self, rows: Iterable[int]) -> int:
        """The features of these rows. With Features.ON_HOST among them, only `draw` serves all rows."""
        features = 0
        for row in rows:
            features |= self._features[row]
        return features

    def reserve(self, features: int) -> None:
        """Allocate what the features need and do not have yet. It never moves, so captured graphs stay valid."""
        self._rows.reserve(features)
        self._scratch[0].reserve(bool(features & Features.FILTERED), bool(features & EDIT_FEATURES))

    def _new_scratch(self, lines: int) -> Scratch:
        return Scratch(lines, self.vocab_size, self._tiles, self._open_capacity, self.device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of common requests, for a few lines and for more, so that the first request does not
        wait."""
        for lines in sorted({1, min(2 * MAX_SMALL_BATCH, self.num_rows)}):
            logits = torch.zeros(lines, self.vocab_size, dtype=dtype, device=self.device)
            padding = torch.full((lines,), -1, dtype=torch.int32, device=self.device)
            for features in (
                Features.GREEDY,
                Features.SAMPLED,
                Features.SAMPLED | Features.FILTERED,
            ):
                self.launch(logits, padding, lines, features)
        self._verify_at_once(logits, [-1], [[]], [()])

    # -- tokens ----------------------------------------------------------------------------------------------------

    def launch(self, logits: Tensor, rows: Tensor, num_rows: int, features: int) -> Tensor:
        """Sample for the first num_rows lines of logits [R, vocab], fp32 or bf16; line i belongs to rows[i] (int32, on
        the device), and is skipped if that is negative. -> tokens [num_rows] int32 on the device: BROKEN where no token
        could be sampled, 0 for skipped lines.

        `features` may be more than the rows need. Before capturing a graph, reserve the features."""
        assert not self._rows.has_pending, "upload() comes before launch()"
        assert logits.stride(1) == 1 and num_rows <= padded(self.num_rows)
        self.reserve(features)
        tokens = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        job = self._job(logits, rows, self._no_depths, num_rows, features, self._scratch[0])
        self._launch(job, features, tokens, advances=True)
        return tokens

    def _launch(self, job: Job, features: int, tokens: Tensor, *, advances: bool) -> None:
        find_tile_maxima(job)
        if features & Features.FILTERED:
            bracket_cutoffs(job)
            find_cutoffs(job)
        if features & Features.SAMPLED:
            race(job)
        pick(job, tokens, self.last, sampled=bool(features & Features.SAMPLED), advances=advances)

    def draw(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        return self.begin(logits, rows, masks)()

    def begin(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> Callable[[], list[SampledRow]]:
        self._check_lines(logits, rows, len(rows))
        self.upload()
        permitted = logits if masks is None else apply_masks(logits, masks)
        features, lines = self.needs(rows), padded(len(rows))
        self.reserve(features)
        on_device = np.full(lines, -1, np.int32)
        on_device[: len(rows)] = [-1 if self._features[row] & Features.ON_HOST else row for row in rows]
        key = permitted.data_ptr(), permitted.stride(0), permitted.dtype, lines, features
        tokens = self._graphs.run(key, on_device, lambda of_lines: self.launch(permitted, of_lines, lines, features))
        spans = [(line, line + 1) for line in range(len(rows))]
        return self._finish(logits, rows, [[]] * len(rows), None, spans, tokens, masks)

    def verify(
        self,
        logits: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Callable[[], list[SampledRow]]:
        """Without waiting: the device decides which drafts are accepted. Where only the device knows a tree, the caller
        fills in its drafts and parents before it asks for the result."""
        spans = list(pairwise(accumulate((1 + len(of_row) for of_row in drafts), initial=0)))  # of lines
        num_lines = spans[-1][1]
        self._check_lines(logits, rows, num_lines)
        self.upload()
        permitted = logits if masks is None else apply_masks(logits, masks)
        trees = parents or [()] * len(rows)
        is_many = num_lines > MAX_LINES_AT_ONCE
        on_device = [index for index, row in enumerate(rows) if not self._features[row] & Features.ON_HOST]
        by_level = [
            index
            for index in on_device
            if (is_many and not is_unknown(trees[index])) or self._features[rows[index]] & EDIT_FEATURES
        ]
        at_once = set(on_device).difference(by_level)
        tokens = torch.zeros(num_lines, dtype=torch.int32, device=self.device)
        if at_once:
            of_lines = [row if index in at_once else -1 for index, row in enumerate(rows)]
            tokens = self.verified = self._verify_at_once(permitted, of_lines, drafts, trees)
        if len(at_once) == len(rows) and not self._wants_logprobs(rows):
            return finish_at_once(rows, spans, padded(len(rows)), to_host(tokens), drafts, trees)
        if by_level:
            walked = [(rows[index], drafts[index], trees[index], spans[index][0]) for index in by_level]
            tokens = tokens[:num_lines] + self._verify_by_level(permitted, *zip(*walked, strict=True))
        self.verified = tokens
        return self._finish(logits, rows, drafts, parents, spans, tokens[:num_lines], masks)

    def _wants_logprobs(self, rows: Sequence[int]) -> bool:
        return any(self._params[row].num_logprobs >= 0 for row in rows)

    def _verify_at_once(
        self,
        permitted: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> Tensor:
        """All lines of the rows that are not negative. -> tokens of the lines, 0 for the others; behind them padding,
        and at the end how many drafts of each row are accepted [padded(rows)]"""
        features = self.needs(row for row in rows if row >= 0)
        padding = padded(len(permitted)), padded(len(rows))
        lines = DraftLines.pack(rows, drafts, parents, *padding, self.unknown_depth)
        size = max(MIN_SCRATCH, next_power_of_two(lines.num_lines))
        if size not in self._scratch:
            self._scratch[size] = self._new_scratch(size)
        scratch = self._scratch[size]
        scratch.reserve(bool(features & Features.FILTERED), edits=False)

        def launch(flat: Tensor) -> Tensor:
            of_lines, depth_of_lines, known, parent_of_lines = lines.split(flat)[0]
            if lines.has_unknown:
                look_up_lines(known, depth_of_lines, parent_of_lines, self.trees)
            job = self._job(permitted, of_lines, depth_of_lines, lines.num_lines, features, scratch)
            found = torch.empty(lines.num_lines + lines.num_seqs, dtype=torch.int32, device=self.device)
            tokens, num_accepted = found.split([lines.num_lines, lines.num_seqs])
            self._launch(job, features, tokens, advances=False)
            accept(lines, flat, tokens, num_accepted, self.last, self._rows.params, self.paths)
            return found

        where = permitted.data_ptr(), permitted.stride(0), permitted.dtype
        sizes = lines.num_lines, lines.num_seqs, lines.max_nodes
        key = *where, *sizes, lines.max_depth, lines.has_unknown, features
        return self._graphs.run(key, lines.flat, launch)

    def takes_trees(self, rows: Iterable[int]) -> bool:
        """Whether trees of these rows may be known to the device alone."""
        return not self.needs(rows) & (Features.ON_HOST | EDIT_FEATURES)

    def keep_trees(self, found: Tensor, rows: Tensor, num_levels: int) -> None:
        """Of `rows` [S] on the device, the trees found [S, 3, nodes]: drafts that the host need not know."""
        keep_trees(found, rows, self.last, self.trees, self.num_rows, num_levels)

    def _verify_by_level(
        self,
        permitted: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        firsts: Sequence[int],
    ) -> Tensor:
        """From the line of one node to that of the child that was sampled. -> tokens [lines]; 0 where none was"""
        trees = [tree or range(ROOT, len(of_row) - 1) for tree, of_row in zip(parents, drafts, strict=True)]
        width = max(1, *map(len, drafts))
        nodes_of_rows = [[*of_row, *[0] * (width - len(of_row))] for of_row in drafts]
        above = [[*tree, *[width] * (width - len(tree))] for tree in trees]  # no node has the parent `width`
        of_nodes = self._known(self._rows.send(nodes_of_rows, torch.int32))
        parent_of_nodes = self._rows.send(above, torch.int64)
        first_lines = self._rows.send(firsts, torch.int64)
        nodes = torch.full_like(first_lines, ROOT)
        alive = self._rows.send(rows, torch.int32)
        void = len(permitted)  # where rows that have ended write
        tokens = torch.zeros(void + 1, dtype=torch.int32, device=self.device)
        features = self.needs(rows)
        for _ in range(1 + max(max(depths(tree), default=0) for tree in trees)):
            lines = first_lines + 1 + nodes
            drawn = self.launch(permitted[torch.where(alive < 0, 0, lines)], alive, len(rows), features)
            tokens.index_copy_(0, torch.where(alive < 0, void, lines), drawn)
            sampled = (parent_of_nodes == nodes[:, None]) & (of_nodes == drawn[:, None])
            alive = torch.where(sampled.any(1), alive, -1)
            nodes = sampled.int().argmax(1)
        return tokens[:void]

    def _finish(
        self,
        logits: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None,
        spans: Sequence[tuple[int, int]],
        tokens: Tensor,
        masks: Masks | None,
    ) -> Callable[[], list[SampledRow]]:
        """Sample for the rows that `launch` skips, and wait, later, for the tokens [lines] and logprobs of the
        others."""
        trees = parents or [()] * len(rows)
        on_host = self._sample_on_host(logits, rows, drafts, trees, spans, masks)
        wanted = {
            line: (self._params[row].num_logprobs, self._params[row].logprob_ids)
            for row, span in zip(rows, spans, strict=True)
            if row not in on_host and self._params[row].num_logprobs >= 0
            for line in range(*span)
        }
        logprobs = begin_logprobs(logits, wanted, tokens)
        ids = [token for of_row in drafts for token in of_row]
        kept = [self._known(self._rows.send(ids, torch.int32))] if min(ids, default=0) < 0 else []
        arrive = to_host(tokens, *kept)

        def finish() -> list[SampledRow]:
            entries = dict(zip(wanted, logprobs(), strict=True))
            sampled, *known = arrive()
            of_rows = divided_as(drafts, known[0].tolist()) if known else drafts
            drawn = [(token, entries.get(line, [])) for line, token in enumerate(sampled.tolist())]
            return [
                on_host.get(row) or sampled_row(row, accepted_draws(drawn[slice(*span)], of_row, tree))
                for row, span, of_row, tree in zip(rows, spans, of_rows, trees, strict=True)
            ]

        return finish

    def _known(self, ids: Tensor) -> Tensor:
        """Tokens; an id below zero stands for last[~id]."""
        return torch.where(ids < 0, self.last[(~ids).clamp(min=0)], ids)

    def _sample_on_host(
        self,
        logits: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        masks: Masks | None,
    ) -> dict[int, SampledRow]:
        """What the rows that `launch` skips sample, by row. It waits for their logits."""
        indices = [index for index, row in enumerate(rows) if self._features[row] & Features.ON_HOST]
        if not indices:
            return {}
        lines = [line for index in indices for line in range(*spans[index])]
        host_masks = None
        if masks is not None:
            bits = dict(zip(masks.lines, masks.bits, strict=True))
            masked = [place for place, line in enumerate(lines) if line in bits]
            if masked:
                host_masks = Masks(masked, np.stack([bits[lines[place]] for place in masked]))
        host_rows = [rows[index] for index in indices]
        on_cpu = logits[lines].float().cpu().numpy()
        of_rows, trees = ([of[index] for index in indices] for of in (drafts, parents))
        sample = self._host.verify(on_cpu, host_rows, of_rows, host_masks, trees)
        sampled = {one.row: one for one in sample()}
        tokens = [one.tokens[-1] if one.tokens else 0 for one in sampled.values()]
        on_device = self._rows.send(list(sampled), torch.int64)
        self.last.index_copy_(0, on_device, self._rows.send(tokens, torch.int32))
        return sampled

    def logprobs(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[Logprobs]:
        wanted: dict[int, Wanted] = dict.fromkeys(range(len(targets)), (num_top, ()))
        return begin_logprobs(logits, wanted, self._rows.send(targets, torch.int64))()

    def _job(
        self, logits: Tensor, rows: Tensor, depth_of_lines: Tensor, lines: int, features: int, scratch: Scratch
    ) -> Job:
        return Job(
            logits,
            rows,
            depth_of_lines,
            lines,
            self._split or split_for(lines),
            self._rows.params,
            self._rows.bias if features & Features.BIASED else None,
            self._rows.marks if features & Features.MARKED else None,
            self.last if features & Features.WATERMARKED else None,
            scratch.tile_maxima,
            scratch.tile_times,
            scratch.edits if features & EDIT_FEATURES else None,
            scratch.filters if features & Features.FILTERED else None,
        )

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_ids(self, *lists: Sequence[int] | Int32) -> None:
        for ids in lists:
            if not len(ids):
                continue
            for token in (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids)):
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"token {token}, and the vocabulary has {self.vocab_size}")

    def _check_lines(self, logits: Tensor, rows: Sequence[int], num_lines: int) -> None:
        for row in rows:
            if row not in self._params:
                raise ValueError(f"row {row} is not admitted")
        if len(set(rows)) < len(rows):
            raise ValueError("a row is sampled twice")
        if logits.shape != (num_lines, self.vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}, and [{num_lines}, {self.vocab_size}] is expected")
