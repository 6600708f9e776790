"""The sampler in plain torch: the specification of native/src/sampler.cpp and ops/gpu/sampling, which sample the same
tokens.

Written to be read: one row at a time, the whole vocabulary sorted. Logits may be on any device.

Probabilities are integer weights. A token weighs round(2**44 * exp((logit - max) / temperature)), and sums of integers
are exact in any order. So a row's token does not depend on how a device splits its sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, factorial, inf, log

import torch
from torch import Tensor

from quire.core.plan import SampledRow
from quire.ops.opset import GREEDY_BELOW, Masks, RowParams
from quire.ops.philox import UNIFORM_BITS, uniform_bits
from quire.ops.sampled_row import BROKEN, CANDIDATES, Draw, Logprobs, sampled_row
from quire.ops.watermark import green_tokens

MAX_WEIGHT = 1 << 44  # of the most likely token
MIN_DISTANCE = -32.0  # exp(-32) * 2**44 = 0.22: a token this far below the greatest logit weighs 0
FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(slots=True)
class SamplerRow:
    params: RowParams
    tokens: list[int]
    num_prompt: int

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class TorchSampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self._rows: dict[int, SamplerRow] = {}

    def admit(self, row: int, params: RowParams, tokens: Sequence[int], num_prompt: int) -> None:
        if not 0 <= row < self.num_rows or row in self._rows:
            raise ValueError(f"row {row} is held or does not exist")
        ids = [*tokens, *(token for token, _ in params.logit_bias), *(params.allowed or ()), *sum(params.banned, ())]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token}, and the vocabulary has {self.vocab_size}")
        self._rows[row] = SamplerRow(params, list(tokens), num_prompt)

    def retire(self, row: int) -> None:
        del self._rows[row]

    def draw(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        permitted = logits if masks is None else apply_masks(logits, masks)
        lines = zip(rows, logits, permitted, strict=True)
        return [sampled_row(row, [self._draw(self._rows[row], line, allowed)]) for row, line, allowed in lines]

    def last(self, row: int) -> int:
        """The token sampled last for a row."""
        return self._rows[row].tokens[-1]

    def begin(self, logits: Tensor, rows: Sequence[int], masks: Masks | None = None) -> Callable[[], list[SampledRow]]:
        sampled = self.draw(logits, rows, masks)
        return lambda: sampled

    def verify(
        self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]], masks: Masks | None = None
    ) -> Callable[[], list[SampledRow]]:
        permitted = logits if masks is None else apply_masks(logits, masks)
        sampled: list[SampledRow] = []
        first = 0
        for row, drafted in zip(rows, drafts, strict=True):
            draws: list[Draw] = []
            for line, draft in enumerate([*drafted, None], first):
                draws.append(self._draw(self._rows[row], logits[line], permitted[line]))
                if draws[-1][0] != draft:
                    break
            sampled.append(sampled_row(row, draws))
            first += 1 + len(drafted)
        return lambda: sampled

    def logprobs(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[Logprobs]:
        return [
            _raw_logprobs(_nan_to_neg_inf(line), target, num_top) for line, target in zip(logits, targets, strict=True)
        ]

    def _draw(self, row: SamplerRow, line: Tensor, permitted: Tensor) -> Draw:
        params = row.params
        raw, permitted = _nan_to_neg_inf(line), _nan_to_neg_inf(permitted)
        logits = edit(permitted, row)
        greedy = params.temperature < GREEDY_BELOW
        if logits.max() == -inf:  # everything is masked: the best token that mask and `allowed` permit
            logits, greedy = restrict(permitted, params.allowed), True
        if logits.max() == -inf:
            return BROKEN, []
        if params.num_candidates:
            temperature = 1.0 if greedy else params.temperature
            whole = torch.where(logits == -inf, raw, logits)  # masked tokens are no candidates, but count in the sum
            return CANDIDATES, _most_likely(logits, _log_softmax(whole, temperature), params.num_candidates)
        if greedy:
            token = int(logits.argsort(descending=True, stable=True)[0])
        else:
            token = _pick(logits, params, uniform_bits(params.seed, len(row.tokens), params.sample))
        logprobs = _raw_logprobs(raw, token, params.num_logprobs) if params.num_logprobs >= 0 else []
        row.tokens.append(token)
        return token, logprobs


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
    """Watermark, bias, allowed, banned, min_tokens and penalties, in fp32. raw [vocab] -> [vocab]"""
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

    seen = sorted(set(row.tokens))
    penalty = logits.new_tensor(params.repetition_penalty)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.bincount(torch.tensor(row.output, dtype=torch.int64), minlength=len(logits)).to(logits)
    logits = torch.where(counts > 0, logits - logits.new_tensor(params.frequency_penalty) * counts, logits)
    return torch.where(counts > 0, logits - logits.new_tensor(params.presence_penalty), logits)


# -- softmax in integers ----------------------------------------------------------------------------------------------


def _unbounded_distances(logits: Tensor, temperature: float) -> Tensor:
    """(logit - max) / temperature of each logit: fp64, at most 0."""
    greatest = logits.max().clamp(max=FLOAT_MAX)
    return ((logits.double() - greatest.double()) * (1.0 / temperature)).clamp(max=0.0)


def distances(logits: Tensor, temperature: float) -> Tensor:
    """(logit - max) / temperature, at least MIN_DISTANCE."""
    return _unbounded_distances(logits, temperature).clamp(min=MIN_DISTANCE)


def weights(distance: Tensor) -> Tensor:
    """round(2**44 * exp(distance)), to a relative 1e-11: a polynomial of single multiplications and additions, which
    every device rounds alike. distance [n] fp64 in [-32, 0] -> [n] int64"""
    power = (distance * 1.4426950408889634).round()
    r = distance - power * 0.6931471805599453  # |r| <= ln(2) / 2
    e = torch.full_like(r, 1.0 / factorial(9))
    for n in range(8, -1, -1):
        e = e * r + 1.0 / factorial(n)
    scaled = (e.view(torch.int64) + (power.long() + 44 << 52)).view(torch.float64)  # e * 2 ** (power + 44)
    return scaled.round().long()


# -- filters and the sample -------------------------------------------------------------------------------------------


def survivors(logits: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """-> ids [n] that may be sampled and their weights [n]. Each filter sees what the one before it leaves."""
    ids = logits.argsort(descending=True, stable=True)  # the most likely first; among equals the lowest id
    if params.top_k > 0:
        ids = ids[: params.top_k]
    distance = distances(logits, params.temperature)
    weight = weights(distance)
    if params.top_p < 1.0:
        ids = _smallest_share(params.top_p, ids, weight)
    if params.min_p > 0.0:
        ids = ids[weight[ids].double() >= params.min_p * MAX_WEIGHT]
    if params.typical_p < 1.0:
        ids = ids[weight[ids] > 0].sort().values
        untypical = (_mean_distance(distance[ids], weight[ids]) - distance[ids]).abs()  # = |surprisal - entropy|
        ids = _smallest_share(params.typical_p, ids[untypical.argsort(stable=True)], weight)
    return ids, weight[ids]


def _smallest_share(share: float, ids: Tensor, weight: Tensor) -> Tensor:
    """The smallest prefix of `ids` that has `share` of their weight: the token that reaches it is kept."""
    running = weight[ids].cumsum(0)
    total = int(running[-1])
    need = min(ceil(share * total), total)
    return ids[running - weight[ids] < need]


def _mean_distance(distance: Tensor, weight: Tensor) -> float:
    """The weighted mean, with distances rounded to 2**-40: summed in integers, so that the order does not matter."""
    fixed_point = (distance * 2.0**40).round().long()
    total = int(weight.sum())
    weighted: int = sum(w * d for w, d in zip(weight.tolist(), fixed_point.tolist(), strict=True))
    return float(weighted) / float(total) / 2.0**40


def _pick(logits: Tensor, params: RowParams, bits: int) -> int:
    """The id at which the running total of weights, in the order of ids, first exceeds bits / 2**53 of the whole."""
    ids, weight = survivors(logits, params)
    ids, order = ids.sort()
    running = weight[order].cumsum(0)
    below = bits * int(running[-1]) >> UNIFORM_BITS
    return int(ids[int((running <= below).sum())])


# -- logprobs ---------------------------------------------------------------------------------------------------------


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    total = int(weights(distances(logits, temperature)).sum())
    return _unbounded_distances(logits, temperature) - log(total / MAX_WEIGHT)


def _rank(logits: Tensor, token: int) -> int:
    return 1 + int((logits > logits[token]).sum())


def _most_likely(logits: Tensor, logprobs: Tensor, count: int) -> Logprobs:
    ids = logits.argsort(descending=True, stable=True)[:count].tolist()
    return [(id, float(logprobs[id]), _rank(logits, id)) for id in ids if logits[id] > -inf]


def _raw_logprobs(raw: Tensor, token: int, num_top: int) -> Logprobs:
    if raw.max() == -inf:
        return [(token, -inf, 1)]
    logprobs = _log_softmax(raw, 1.0)
    return [(token, float(logprobs[token]), _rank(raw, token)), *_most_likely(raw, logprobs, num_top)]
