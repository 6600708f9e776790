"""The sampler's rows on the device: `upload` sends the parameters of all rows admitted since the last step at once.

Copies come from pinned memory and nothing waits for them: work on one stream keeps its order."""

import struct
from collections.abc import Sequence
from math import ceil, inf, nan

import numpy as np
import torch
from torch import Tensor

from quire.core.draft_tree import MAX_TREE_NODES
from quire.ops.gpu.sampling import job
from quire.ops.gpu.sampling.kept_trees import new_kept_trees
from quire.ops.opset import Int32
from quire.ops.reference.filters import MAX_WEIGHT  # a number of the specification
from quire.ops.row_params import RowParams

MAX_KEPT_DRAFTS = MAX_TREE_NODES  # of a row, that wait on the device


class Features:
    """What a row needs of the sampler: bits. A step's features are the union of its rows'. (An IntFlag would cost a
    step a tenth of a millisecond.)"""

    GREEDY = 0  # the greatest logit
    SAMPLED = 1  # temperature and min_p
    FILTERED = 2  # top_k or top_p
    BIASED = 4  # logit_bias, allowed, banned
    MARKED = 8  # penalties, and stop tokens before min_tokens
    WATERMARKED = 16
    ON_HOST = 32  # rows that the CPU's sampler samples for: see `_is_on_host`


def features_of(params: RowParams, vocab: int) -> int:
    if _is_on_host(params):
        return Features.ON_HOST
    features, flags = Features.GREEDY, _flags(params)
    if not is_greedy(params):
        features |= Features.SAMPLED
        if 0 < params.top_k < vocab or params.top_p < 1.0:
            features |= Features.FILTERED
    if flags & job.BIASED.value:
        features |= Features.BIASED
    if flags & job.WATERMARKED.value:
        features |= Features.WATERMARKED
    if flags & (job.PENALIZED.value | job.STOPPED_LATER.value):
        features |= Features.MARKED
    return features


def is_greedy(params: RowParams) -> bool:
    return params.is_greedy or (params.top_k == 1 and _is_in_default_order(params))


def _is_on_host(params: RowParams) -> bool:
    """Beams, what looks at more tokens than the last, and filters that no kernel has or in an order that none has."""
    sequences = any(len(sequence) > 1 for sequence in params.banned)
    if params.num_candidates > 0 or sequences or params.dry or params.no_repeat_ngram:
        return True
    if is_greedy(params):
        return False
    no_kernel = params.typical_p < 1.0 or params.top_n_sigma > 0.0 or params.xtc_probability > 0.0
    no_kernel = no_kernel or params.dynatemp_range > 0.0 or params.mirostat is not None
    return no_kernel or not _is_in_default_order(params)


def _is_in_default_order(params: RowParams) -> bool:
    return params.filters == sorted(params.filters)


def _flags(params: RowParams) -> int:
    biased = params.logit_bias or params.allowed is not None or params.banned
    penalized = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
    stopped_later = params.min_tokens > 0 and params.stop_ids
    return (
        (job.GREEDY.value if is_greedy(params) else 0)
        | (job.BIASED.value if biased else 0)
        | (job.PENALIZED.value if penalized else 0)
        | (job.STOPPED_LATER.value if stopped_later else 0)
        | (job.WATERMARKED.value if params.watermark else 0)
    )


class DeviceRows:
    """`bias` and `marks` are allocated when they are first needed, and never move afterwards."""

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self.num_rows, self.vocab, self.device = num_rows, vocab, device
        self.params = torch.zeros((num_rows, job.FIELDS.value), dtype=torch.int64, device=device)
        # The token sampled last for each row; 0: none. Behind them each row's first draft, its second, and so on, and a
        # place for what belongs nowhere.
        self.last = torch.zeros((1 + MAX_KEPT_DRAFTS) * num_rows + 1, dtype=torch.int32, device=device)
        self.trees = new_kept_trees(self.last)
        self.bias: Tensor | None = None  # [num_rows, vocab]; see job.py
        self.marks: Tensor | None = None  # [num_rows, vocab]; see job.py
        self._pending: dict[int, tuple[RowParams, Sequence[int] | Int32, int]] = {}
        self._moved: dict[int, tuple[int, int]] = {}  # row -> number of its tokens, and the last
        self._sent: dict[int, tuple[RowParams, int, int]] = {}  # row -> parameters, length of its prompt, features

    @property
    def has_pending(self) -> bool:
        return bool(self._pending or self._moved)

    def admit(self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int) -> None:
        self._moved.pop(row, None)
        self._pending[row] = (params, tokens.copy() if isinstance(tokens, np.ndarray) else list(tokens), num_prompt)

    def features_before(self, row: int, params: RowParams, num_prompt: int) -> int | None:
        """If the row's last owner had these very parameters, and no marks of its tokens: then `move` suffices."""
        sent = self._sent.get(row)
        return sent[2] if sent and sent[0] is params and sent[1] == num_prompt else None

    def move(self, row: int, num_tokens: int, last: int) -> None:
        """A row has other tokens, and all else as before."""
        self._moved[row] = num_tokens, last

    def retire(self, row: int) -> None:
        self._pending.pop(row, None)
        self._moved.pop(row, None)

    def reserve(self, features: int) -> None:
        shape = (self.num_rows, self.vocab)
        if features & Features.BIASED and self.bias is None:
            self.bias = torch.empty(shape, dtype=torch.float32, device=self.device)
        if features & Features.MARKED and self.marks is None:
            self.marks = torch.empty(shape, dtype=torch.int32, device=self.device)

    def upload(self) -> None:
        """Send the rows admitted since the last upload. Before a step's `launch`, or the replay of its graph."""
        if self._moved:
            moved = np.array([(row, *moved) for row, moved in self._moved.items()], np.int64)
            rows, num_tokens, last = self._to_device(torch.from_numpy(np.ascontiguousarray(moved.T)))
            self.params[:, job.NUM_TOKENS.value].index_copy_(0, rows, num_tokens)
            self.last.index_copy_(0, rows, last.int())
            self._moved.clear()
        if not self._pending:
            return
        lines = [
            [row, int(tokens[-1]) if len(tokens) else 0, *_fields(params, len(tokens), num_prompt, self.vocab)]
            for row, (params, tokens, num_prompt) in self._pending.items()
        ]
        columns = self.send(lines, torch.int64)
        rows, last, fields = columns[:, 0], columns[:, 1], columns[:, 2:]
        self.params.index_copy_(0, rows, fields)
        self.last.index_copy_(0, rows, last.int())
        for row, (params, tokens, num_prompt) in self._pending.items():
            features = features_of(params, self.vocab)
            self.reserve(features)
            self._sent.pop(row, None)
            if not features & Features.MARKED:
                self._sent[row] = params, num_prompt, features
            if features & Features.BIASED:
                self._set_bias(row, params)
            if features & Features.MARKED:
                self._set_marks(row, params, [int(token) for token in tokens], num_prompt)
        self._pending.clear()

    def send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return self._to_device(torch.tensor(values, dtype=dtype))

    def _to_device(self, host: Tensor) -> Tensor:
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _set_bias(self, row: int, params: RowParams) -> None:
        assert self.bias is not None
        line = self.bias[row]
        entries: dict[int, float] = {}
        if params.allowed is None:
            line.zero_()
        else:
            line.fill_(-inf)
            entries = dict.fromkeys(params.allowed, 0.0)
        for token, bias in params.logit_bias:
            if params.allowed is None or token in entries:
                entries[token] = bias
        for (token,) in params.banned:
            if params.allowed is None or token in entries:
                entries[token] = nan
        line.index_copy_(0, self.send(list(entries), torch.int64), self.send(list(entries.values()), torch.float32))

    def _set_marks(self, row: int, params: RowParams, tokens: list[int], num_prompt: int) -> None:
        assert self.marks is not None
        marks = dict.fromkeys(tokens, job.SEEN.value)
        for token in tokens[num_prompt:]:
            marks[token] += 1
        for token in params.stop_ids:
            if 0 <= token < self.vocab:
                marks[token] = marks.get(token, 0) | job.STOP.value
        line = self.marks[row].zero_()
        line.index_copy_(0, self.send(list(marks), torch.int64), self.send(list(marks.values()), torch.int32))


def _fields(params: RowParams, num_tokens: int, num_prompt: int, vocab: int) -> list[int]:
    fields = [0] * job.FIELDS.value
    fields[job.SEED.value] = _signed(params.seed)
    fields[job.SAMPLE.value] = params.sample
    fields[job.NUM_TOKENS.value] = num_tokens
    fields[job.NUM_PROMPT.value] = num_prompt
    fields[job.MIN_TOKENS.value] = params.min_tokens
    fields[job.FLAGS.value] = _flags(params)
    fields[job.TOP_K.value] = params.top_k if params.top_k < vocab else 0
    fields[job.TOP_P.value] = _bits(params.top_p)
    fields[job.MIN_WEIGHT.value] = ceil(params.min_p * MAX_WEIGHT)
    fields[job.INVERSE_TEMPERATURE.value] = _bits(1.0 if is_greedy(params) else 1.0 / params.temperature)
    fields[job.REPETITION.value] = _bits(params.repetition_penalty)
    fields[job.FREQUENCY.value] = _bits(params.frequency_penalty)
    fields[job.PRESENCE.value] = _bits(params.presence_penalty)
    if mark := params.watermark:
        fields[job.WATERMARK_KEY.value] = _signed(mark.key)
        fields[job.GREEN_BELOW.value] = mark.green_below
        fields[job.DELTA.value] = _bits(mark.delta)
    return fields


def _signed(bits: int) -> int:
    """64 bits as an int64."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
