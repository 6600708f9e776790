"""The sampler in plain torch: the specification of native/src/sampler.cpp and ops/gpu/sampling, which sample the same
tokens.

Written to be read: one row at a time, the whole vocabulary sorted. Logits may be on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log, log2

import numpy as np
import torch
from torch import Tensor

from quire.core.draft_tree import ROOT, child_with
from quire.core.plan import SampledRow
from quire.ops.opset import Int32, Masks
from quire.ops.philox import UNIFORM_BITS, random_bits
from quire.ops.race import winner
from quire.ops.reference.filters import MAX_WEIGHT, Survivors, distances, greatest_of, weights
from quire.ops.reference.repetition import dry_penalties, ends_ngram
from quire.ops.row_params import RowParams
from quire.ops.sampled_row import BROKEN, CANDIDATES, Draw, Logprobs, sampled_row
from quire.ops.watermark import green_tokens


@dataclass(slots=True)
class SamplerRow:
    params: RowParams
    tokens: list[int]
    num_prompt: int
    mu: float = 0.0  # of mirostat

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class TorchSampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self._rows: dict[int, SamplerRow] = {}

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int, mu: float | None = None
    ) -> None:
        tokens = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        if not 0 <= row < self.num_rows or row in self._rows:
            raise ValueError(f"row {row} is held or does not exist")
        ids = [*tokens, *(token for token, _ in params.logit_bias), *(params.allowed or ())]
        ids += [*sum(params.banned, ()), *params.logprob_ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token}, and the vocabulary has {self.vocab_size}")
        if mu is None:
            mu = params.mirostat.initial_mu if params.mirostat else 0.0
        self._rows[row] = SamplerRow(params, list(tokens), num_prompt, mu)

    def retire(self, row: int) -> None:
        del self._rows[row]

    def admit_all(
        self, rows: Sequence[int], params: Sequence[RowParams], texts: Sequence[Int32], num_prompts: Sequence[int]
    ) -> None:
        for one in zip(rows, params, texts, num_prompts, strict=True):
            self.admit(*one)

    def retire_all(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.retire(row)

    def draw(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        permitted = logits if masks is None else apply_masks(logits, masks)
        lines = zip(rows, logits, permitted, strict=True)
        return [
            sampled_row(row, [self._draw(self._rows[row], line, allowed)], self._mu(row))
            for row, line, allowed in lines
        ]

    def last(self, row: int) -> int:
        """The token sampled last for a row."""
        return self._rows[row].tokens[-1]

    def begin(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> Callable[[], list[SampledRow]]:
        sampled = self.draw(logits, rows, masks)
        return lambda: sampled

    def verify(
        self,
        logits: Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Callable[[], list[SampledRow]]:
        permitted = logits if masks is None else apply_masks(logits, masks)
        sampled: list[SampledRow] = []
        first = 0
        for index, (row, drafted) in enumerate(zip(rows, drafts, strict=True)):
            draws: list[Draw] = []
            node: int | None = ROOT
            while node is not None:
                line = first + 1 + node
                draws.append(self._draw(self._rows[row], logits[line], permitted[line]))
                node = child_with(drafted, parents[index] if parents else (), node, draws[-1][0])
            sampled.append(sampled_row(row, draws, self._mu(row)))
            first += 1 + len(drafted)
        return lambda: sampled

    def _mu(self, row: int) -> float | None:
        return self._rows[row].mu if self._rows[row].params.mirostat else None

    def logprobs(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[Logprobs]:
        return [
            _raw_logprobs(_nan_to_neg_inf(line), target, num_top) for line, target in zip(logits, targets, strict=True)
        ]

    def _draw(self, row: SamplerRow, line: Tensor, permitted: Tensor) -> Draw:
        params = row.params
        raw, permitted = _nan_to_neg_inf(line), _nan_to_neg_inf(permitted)
        logits = edit(permitted, row)
        greedy = params.is_greedy
        if logits.max() == -inf:  # everything is masked: the best token that mask and `allowed` permit
            logits, greedy = restrict(permitted, params.allowed), True
        if logits.max() == -inf:
            return BROKEN, []
        if params.num_candidates:
            temperature = 1.0 if greedy else params.temperature
            whole = torch.where(logits == -inf, raw, logits)  # masked tokens are no candidates, but count in the sum
            return CANDIDATES, _most_likely(logits, _log_softmax(whole, temperature), params.num_candidates)
        token = int(logits.argsort(descending=True, stable=True)[0]) if greedy else self._sample(logits, row)
        logprobs: Logprobs = []
        if params.num_logprobs >= 0:
            logprobs = _raw_logprobs(raw, token, params.num_logprobs, params.logprob_ids)
        row.tokens.append(token)
        return token, logprobs

    def _sample(self, logits: Tensor, row: SamplerRow) -> int:
        params, mirostat = row.params, row.params.mirostat
        key, xtc_bits = random_bits(params.seed, len(row.tokens), params.sample)
        survivors = Survivors(logits)
        survivors.filter(params, xtc_bits * 2.0**-UNIFORM_BITS)
        if mirostat is not None:
            survivors.mirostat(mirostat, row.mu, self.vocab_size)
        token = winner(key, survivors.ids.cpu().numpy(), survivors.weight.cpu().numpy())
        if mirostat is not None:
            surprise = log2(float(survivors.total) / float(survivors.weight[survivors.ids == token]))
            row.mu -= mirostat.eta * (surprise - mirostat.tau)
        return token


# -- edits of the logits ----------------------------------------------------------------------------------------------


def _nan_to_neg_inf(line: Tensor) -> Tensor:
    """NaN does not compare: it counts as -inf."""
    return torch.where(line.isnan(), -inf, line)


def apply_masks(logits: Tensor, masks: Masks) -> Tensor:
    """logits [R, vocab], with -inf for the tokens that a line's mask forbids."""
    words = torch.from_numpy(masks.bits.view("int32")).to(logits.device, non_blocking=True)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    permitted = bits.flatten(1)[:, : logits.shape[1]].bool()
    out, lines = logits.clone(), torch.tensor(masks.lines, dtype=torch.int64).to(logits.device, non_blocking=True)
    out[lines] = torch.where(permitted, logits[lines], -inf)
    return out


def restrict(logits: Tensor, allowed: Sequence[int] | None) -> Tensor:
    if allowed is None:
        return logits.clone()
    out = torch.full_like(logits, -inf)
    out[list(allowed)] = logits[list(allowed)]
    return out


def edit(raw: Tensor, row: SamplerRow) -> Tensor:
    """Watermark, bias, allowed, banned, min_tokens, n-grams and penalties, in fp32. raw [vocab] -> [vocab]"""
    params = row.params
    logits = restrict(raw, params.allowed)
    if params.watermark is not None:
        green = green_tokens(params.watermark, row.tokens[-1] if row.tokens else 0, len(logits))
        logits[torch.from_numpy(green).to(logits.device)] += params.watermark.delta
    for token, bias in params.logit_bias:
        logits[token] += bias
    for *before, last in params.banned:
        if row.tokens[len(row.tokens) - len(before) :] == before:
            logits[last] = -inf
    if len(row.output) < params.min_tokens:
        logits[[token for token in params.stop_ids if 0 <= token < len(logits)]] = -inf
    if params.no_repeat_ngram:
        logits[sorted(ends_ngram(row.tokens, params.no_repeat_ngram))] = -inf

    seen = sorted(set(row.tokens))
    penalty = logits.new_tensor(params.repetition_penalty)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.bincount(torch.tensor(row.output, dtype=torch.int64), minlength=len(logits)).to(logits)
    logits = torch.where(counts > 0, logits - logits.new_tensor(params.frequency_penalty) * counts, logits)
    logits = torch.where(counts > 0, logits - logits.new_tensor(params.presence_penalty), logits)
    for token, penalty in dry_penalties(params.dry, row.tokens).items() if params.dry else ():
        logits[token] -= logits.new_tensor(penalty)
    return logits


# -- logprobs ---------------------------------------------------------------------------------------------------------


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """The logprobs of all tokens. These are not clamped as weights are: a token of weight 0 still has one."""
    total = int(weights(distances(logits, temperature)).sum())
    distance = ((logits.double() - greatest_of(logits)) * (1.0 / temperature)).clamp(max=0.0)
    return distance - log(total / MAX_WEIGHT)


def _rank(logits: Tensor, token: int) -> int:
    return 1 + int((logits > logits[token]).sum())


def _most_likely(logits: Tensor, logprobs: Tensor, count: int) -> Logprobs:
    ids = logits.argsort(descending=True, stable=True)[:count].tolist()
    return [(id, float(logprobs[id]), _rank(logits, id)) for id in ids if logits[id] > -inf]


def _raw_logprobs(raw: Tensor, token: int, num_top: int, listed: Sequence[int] = ()) -> Logprobs:
    if raw.max() == -inf:
        return [(token, -inf, 1)]
    logprobs = _log_softmax(raw, 1.0)
    own, *others = [(id, float(logprobs[id]), _rank(raw, id)) for id in (token, *listed)]
    return [own, *_most_likely(raw, logprobs, num_top), *others]
